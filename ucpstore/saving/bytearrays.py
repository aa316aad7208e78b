"""Arrays of bytes that one rank writes by itself: per-rank documents, large leaves of the tree."""

from __future__ import annotations

import numpy as np

from ucpstore.arrays.metadata import array_document, to_bytes
from ucpstore.arrays.packed import ObjectEncoder
from ucpstore.arrays.raw import RawArray
from ucpstore.geometry import Block, Blocks, Box, Grid, Index, Layout
from ucpstore.options import Options
from ucpstore.plan import choose_grid
from ucpstore.saving.writer import Written
from ucpstore.staging import pool_for
from ucpstore.storage import Storage

BYTES = "uint8"


def bytes_grid(size: int, options: Options) -> Grid:
    """The grid of a one-dimensional array of bytes that one rank holds."""
    held = [Block(Box((0,), (size,)), (0,))] if size else []
    whole = Layout((size,), Blocks.of(1, held))
    return choose_grid(whole, 1, options)


def bytes_document(path: str, grid: Grid) -> bytes:
    """The document of an array of bytes."""
    names = tuple(f"{path}:{n}" for n in range(len(grid.shape)))
    return to_bytes(array_document(grid, BYTES, names))


def write_bytes(
    storage: Storage, prefix: str, path: str, data: bytes, grid: Grid, options: Options
) -> Written:
    """Write all objects of a one-dimensional array of bytes."""
    values = np.frombuffer(data, np.uint8)
    put = Written(0, 0, 0)
    for index in grid.object_indices():
        box = grid.object_box(index)
        put += put_object(storage, prefix, path, grid, index, box, values[box.slices()], options)
    return put


def put_object(
    storage: Storage,
    prefix: str,
    path: str,
    grid: Grid,
    index: Index,
    box: Box,
    values: RawArray,
    options: Options,
) -> Written:
    """Encode and put one object whose whole region is `box`."""
    with pool_for(options.budget_bytes).take(grid.object_bytes(index, 1)) as buffer:
        encoder = ObjectEncoder(buffer, grid, index, BYTES)
        encoder.fill(box, values)
        data = encoder.finish()
        storage.put(f"{prefix}/{path}/{grid.key(index)}", data)
        return Written(1, data.nbytes, 0)

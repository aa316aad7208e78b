"""Rank functions of the tests of flat ranges: every element tells its place in its array."""

from __future__ import annotations

import itertools
import json
import math
from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np
import torch
import torch.distributed as dist

import ucpstore
from ucpstore import Flat, Spec
from ucpstore.spec import replicate, shard

ITEMSIZE = 8
CHECKSUM_BYTES = 4
FUSED = (1536, 512, 512)
"""Sections of `qkv`."""
SHAPES = {
    "embed": (1500, 700),
    "qkv": (2560, 640),
    "norm": (700,),
    "out": (640, 2048),
    "long": (900_001,),
}
Numbers = np.ndarray
Shape = tuple[int, ...]
Sizes = dict[str, int]


def numbers() -> dict[str, Numbers]:
    """The arrays: int64, the number of each element in row-major order."""
    return {name: np.arange(math.prod(shape)).reshape(shape) for name, shape in SHAPES.items()}


def block(name: str, whole: Numbers, tp: int, at: int) -> Numbers:
    """What a tensor-parallel rank holds: rows of `embed`, fused rows, columns of `out`."""
    if name == "qkv":
        starts = np.cumsum(FUSED)[:-1]
        return np.concatenate([np.split(part, tp)[at] for part in np.split(whole, starts)])
    if name in ("embed", "out"):
        return np.split(whole, tp, axis=("embed", "out").index(name))[at]
    return whole


def rules(sizes: Sizes) -> Spec:
    return Spec(
        sizes,
        {
            "model.embed": shard(0, "tp"),
            "model.qkv": shard(0, "tp", sections=FUSED),
            "model.out": shard(1, "tp"),
            "model.norm": replicate("tp"),
            "model.long": replicate("tp"),
        },
        replicate=("dp",),
    )


def range_of(sizes: Sizes, rank: int) -> tuple[dict[str, Shape], Numbers, dict[str, Numbers]]:
    """The shapes of a rank's blocks, its part of their row (-1 is padding), and which elements of
    each array it has; ranks are numbered with `tp` fastest.
    """
    dp_at, tp_at = divmod(rank, sizes["tp"])
    blocks = {n: block(n, each, sizes["tp"], tp_at) for n, each in numbers().items()}
    row = np.concatenate([each.reshape(-1) for each in blocks.values()])
    per_rank = -(-len(row) // sizes["dp"])
    padded = np.full(per_rank * sizes["dp"], -1)
    padded[: len(row)] = row
    first, stop = dp_at * per_rank, (dp_at + 1) * per_rank
    held, position = {}, 0
    for name, each in blocks.items():
        ends = [min(max(edge - position, 0), each.size) for edge in (first, stop)]
        held[name] = each.reshape(-1)[slice(*ends)]
        position += each.size
    return {name: each.shape for name, each in blocks.items()}, padded[first:stop], held


def save_row(url: str, options: dict[str, object], sizes: Sizes) -> int:
    """Save every rank's range as `o`; bytes that this rank sent to others, as reported."""
    shapes, part, _ = range_of(sizes, dist.get_rank())
    row = Flat(torch.from_numpy(part.copy()), shapes, "dp")
    handle = ucpstore.save(url, {"o": row}, step=1, spec=rules(sizes), storage_options=options)
    return handle.result().exchanged_bytes


def load_row(url: str, options: dict[str, object], sizes: Sizes) -> tuple[bool, int]:
    """Load a range: whether all is equal, and bytes read as reported."""
    shapes, part, held = range_of(sizes, dist.get_rank())
    target = torch.full(part.shape, -1)
    row = Flat(target, shapes, "dp")
    report = ucpstore.load(url, {"o": row}, spec=rules(sizes), storage_options=options)
    assert report.bytes_needed == sum(each.nbytes for each in held.values())
    return bool(torch.equal(target, torch.from_numpy(part))), report.bytes_read


@dataclass(frozen=True)
class Stored:
    """How an array is stored, read from its own metadata."""

    folder: str
    shape: Shape
    object: Shape
    chunk: Shape

    @staticmethod
    def of(folder: str, document: bytes) -> Stored:
        found = json.loads(document)
        extents = found["chunk_grid"]["configuration"]["chunk_shape"]
        first = found["codecs"][0]
        sharded = first["name"] == "sharding_indexed"
        inner = first["configuration"]["chunk_shape"] if sharded else extents
        return Stored(folder, tuple(found["shape"]), tuple(extents), tuple(inner))

    def cells(self, elements: Numbers, cell: Shape) -> set[Shape]:
        """The cells of a regular grid that hold the elements."""
        counts = [-(-extent // c) for extent, c in zip(self.shape, cell, strict=True)]
        at = np.unravel_index(elements, self.shape)
        along = tuple(a // c for a, c in zip(at, cell, strict=True))
        touched = np.zeros(counts, bool)
        touched[along] = True
        return {tuple(each) for each in np.argwhere(touched).tolist()}

    def objects(self, elements: Numbers) -> set[str]:
        """The names of the objects that hold the elements."""
        found = self.cells(elements, self.object)
        return {f"{self.folder}/c.{'.'.join(map(str, each))}" for each in found}

    @property
    def object_bytes(self) -> int:
        return math.prod(self.object) * ITEMSIZE

    def chunk_bytes(self, elements: Numbers) -> int:
        """Bytes of the chunks that hold the elements, full at the edges too, with checksums."""
        each = math.prod(self.chunk) * ITEMSIZE + CHECKSUM_BYTES
        return len(self.cells(elements, self.chunk)) * each


@dataclass(frozen=True)
class Run:
    """The part of a range in one section of its block: its elements, and the section's extents."""

    elements: Numbers
    extents: Shape

    @property
    def nbytes(self) -> int:
        return int(self.elements.nbytes)

    def row_bytes(self, chunk: Shape) -> int:
        """Bytes of the chunks at one place of the first dimension along which they are cut."""
        first = next((dim for dim, n in enumerate(chunk) if n > 1), 0)
        rest = zip(self.extents[first + 1 :], chunk[first + 1 :], strict=True)
        count = math.prod(-(-extent // c) for extent, c in rest)
        return count * (math.prod(chunk) * ITEMSIZE + CHECKSUM_BYTES)


def runs(sizes: Sizes, rank: int) -> Iterator[tuple[str, Run]]:
    """Every run of a rank's range, with the array's name."""
    shapes, _, held = range_of(sizes, rank)
    for name, elements in held.items():
        whole = SHAPES[name]
        edges = np.cumsum((0, *FUSED)) if name == "qkv" else np.array((0, whole[0]))
        rows = elements // math.prod(whole[1:])
        for first, last in itertools.pairwise(edges.tolist()):
            inside = elements[(rows >= first) & (rows < last)]
            if inside.size:
                share = shapes[name][0] * (last - first) // whole[0]
                yield name, Run(inside, (share, *shapes[name][1:]))

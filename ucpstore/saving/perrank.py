"""Store per-rank documents: rows of one array of bytes, or an array each where they are long."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

import numpy as np

from ucpstore.describe import PerRankDocument
from ucpstore.format.layout import DOCUMENT
from ucpstore.format.per_rank import alone_path, layout_of, packed_path, to_row
from ucpstore.geometry import Box, Grid
from ucpstore.options import Options
from ucpstore.saving.arrival import PerRankRows
from ucpstore.saving.bytearrays import bytes_document, bytes_grid, put_object, write_bytes
from ucpstore.saving.writer import Written
from ucpstore.storage import Storage


def _packed_grid(count: int, row_bytes: int) -> Grid:
    """One chunk and object for each row."""
    return Grid((count, row_bytes), (1, row_bytes), (1, row_bytes), False)


def rows_documents(rows: Iterable[PerRankRows], options: Options) -> dict[str, bytes]:
    """The documents of the arrays of all per-rank values, by path."""
    documents: dict[str, bytes] = {}
    for each in rows:
        layout = layout_of(each.lengths)
        if layout.row_bytes:
            path = packed_path(each.path)
            documents[path] = bytes_document(path, _packed_grid(layout.count, layout.row_bytes))
        for index in layout.alone:
            path = alone_path(each.path, index)
            documents[path] = bytes_document(path, bytes_grid(each.lengths[index], options))
    return documents


def rows_size(rank: int, rows: Iterable[PerRankRows], options: Options) -> tuple[int, int]:
    """Bytes and number of the objects that `write_rows` puts on this rank."""
    sizes: list[int] = []
    for each in rows:
        layout = layout_of(each.lengths)
        packed = _packed_grid(layout.count, layout.row_bytes)
        for number in (n for n, writer in enumerate(each.writers) if writer == rank):
            if number in layout.alone:
                whole = bytes_grid(each.lengths[number], options)
                sizes += (whole.object_bytes(index, 1) for index in whole.object_indices())
            if layout.row_bytes:
                sizes.append(packed.object_bytes((number, 0), 1))
    return sum(sizes), len(sizes)


def write_rows(
    storage: Storage,
    prefix: str,
    rank: int,
    rows: Iterable[PerRankRows],
    held: Sequence[PerRankDocument],
    options: Options,
) -> Written:
    """Write the documents of which this rank is the first holder."""
    mine = {document.path: document for document in held}
    put = Written(0, 0, 0)
    for each in rows:
        document = mine.get(each.path)
        if document is None or each.writers[document.index] != rank:
            continue
        layout = layout_of(each.lengths)
        if document.index in layout.alone:
            path = alone_path(each.path, document.index)
            whole = bytes_grid(len(document.data), options)
            put += write_bytes(storage, prefix, path, document.data, whole, options)
            _put_document(storage, prefix, path, whole)
        if layout.row_bytes:
            grid = _packed_grid(layout.count, layout.row_bytes)
            row = np.frombuffer(to_row(document.data, layout.row_bytes), np.uint8)
            path = packed_path(each.path)
            box = Box((document.index, 0), (1, layout.row_bytes))
            put += put_object(
                storage, prefix, path, grid, (document.index, 0), box, row.reshape(1, -1), options
            )
            if document.index == 0:
                _put_document(storage, prefix, path, grid)
    return put


def _put_document(storage: Storage, prefix: str, path: str, grid: Grid) -> None:
    storage.put(f"{prefix}/{path}/{DOCUMENT}", bytes_document(path, grid))

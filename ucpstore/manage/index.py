"""Basic indexing: from `a[0:128, ..., 3]` to the box to read and what to take of it. Pure."""

from __future__ import annotations

from dataclasses import dataclass

from ucpstore.geometry import Box


@dataclass(frozen=True, slots=True)
class Selection:
    """The box that holds everything asked for, and the index into that box that gives it."""

    box: Box
    within: tuple[int | slice, ...]


def select(index: object, shape: tuple[int, ...], name: str) -> Selection:
    """Resolve integers, slices with positive steps and one `...` against `shape`.

    Raises IndexError, naming the array, for what is out of range or not supported.
    """
    entries = list(index) if isinstance(index, tuple) else [index]
    if sum(entry is Ellipsis for entry in entries) > 1:
        raise IndexError(f"{name}: an index can hold one `...`, but this one holds more")
    if Ellipsis in [entry for entry in entries if entry is Ellipsis]:
        at = next(n for n, entry in enumerate(entries) if entry is Ellipsis)
        rest = [slice(None)] * (len(shape) - len(entries) + 1)
        entries[at : at + 1] = rest
    if len(entries) > len(shape):
        raise IndexError(
            f"{name} has {len(shape)} dimensions, but the index has {len(entries)} entries"
        )
    entries += [slice(None)] * (len(shape) - len(entries))
    offset, extent, within = [], [], []
    for entry, size in zip(entries, shape, strict=True):
        start, count, take = _resolve(entry, size, name)
        offset.append(start)
        extent.append(count)
        within.append(take)
    return Selection(Box(tuple(offset), tuple(extent)), tuple(within))


def _resolve(entry: object, size: int, name: str) -> tuple[int, int, int | slice]:
    if isinstance(entry, slice):
        start, stop, step = entry.indices(size)
        if step < 0:
            raise IndexError(f"{name}: slices with a negative step are not supported; use flip()")
        if start >= stop:
            return 0, 0, slice(None)
        last = start + (stop - 1 - start) // step * step
        return start, last + 1 - start, slice(None, None, step)
    if isinstance(entry, bool) or not hasattr(entry, "__index__"):
        raise IndexError(
            f"{name} can be indexed with integers, slices and `...`, but not with "
            f"{type(entry).__name__}; read the part and index the tensor"
        )
    position = int(entry.__index__())
    if not -size <= position < size:
        raise IndexError(f"{name}: index {position} is out of range for extent {size}")
    return position % size, 1, 0

"""Facts as text for people: sizes, ages, shapes, aligned columns."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from ucpstore.format.documents import Json, canonical

_AGES = ((86400.0, "d"), (3600.0, "h"), (60.0, "min"))


def age(seconds: float | None) -> str:
    """A time span in its largest unit, `-` where it is not known."""
    if seconds is None:
        return "-"
    for length, unit in _AGES:
        if seconds >= 2 * length:
            return f"{seconds / length:.0f} {unit}"
    return f"{max(0.0, seconds):.0f} s"


def moment(created: str) -> str:
    """An ISO 8601 time in UTC, without the zone."""
    return created.removesuffix("+00:00").replace("T", " ")


def shape(extents: Sequence[int]) -> str:
    """`4096 x 512`; `scalar` for no dimensions."""
    return " x ".join(map(str, extents)) if extents else "scalar"


def counted(count: int, thing: str) -> str:
    """`1 array`, `2 arrays`."""
    return f"{count} {thing}" if count == 1 else f"{count} {thing}s"


def printable(text: str) -> str:
    """The text with everything escaped that would move a terminal's cursor."""
    return "".join(c if c.isprintable() else repr(c)[1:-1] for c in text)


def cut(text: str, limit: int) -> str:
    """At most `limit` characters of one line."""
    text = printable(text)
    return text if len(text) <= limit else text[: limit - 3] + "..."


def json_short(value: Json, limit: int = 60) -> str:
    """A JSON value on one short line; nothing for null and for an empty object."""
    return "" if value is None or value == {} else cut(canonical(value).decode("ascii"), limit)


def columns(rows: Sequence[Sequence[str]], right: frozenset[int] = frozenset()) -> Iterator[str]:
    """Aligned lines. Numbers of `right` are right-aligned columns.

    A row that is shorter than the longest keeps its last cell out of the widths: it may run on.
    """
    most = max(map(len, rows), default=0)
    widths = [0] * most
    for row in rows:
        for n, cell in enumerate(row if len(row) == most else row[:-1]):
            widths[n] = max(widths[n], len(cell))
    for row in rows:
        cells = [
            cell.rjust(widths[n]) if n in right and len(row) == most else cell.ljust(widths[n])
            for n, cell in enumerate(row)
        ]
        yield "  ".join(cells).rstrip()

"""Facts as text for people: sizes, ages, values of the tree, aligned columns."""

from __future__ import annotations

import base64
import struct
from collections.abc import Callable, Iterator, Sequence
from typing import Final

import numpy as np

from ucpstore.format.documents import Json, canonical
from ucpstore.tree import Node
from ucpstore.tree.nodes import MAPPINGS, SEQUENCES, body_of, items_of, pairs_of, tag_of

_UNITS = ("B", "KiB", "MiB", "GiB", "TiB", "PiB")
_AGES = ((86400.0, "d"), (3600.0, "h"), (60.0, "min"))


def size(count: int) -> str:
    """A number of bytes: `512 B`, `6.2 MiB`."""
    value, unit = float(count), 0
    while value >= 1024 and unit < len(_UNITS) - 1:
        value, unit = value / 1024, unit + 1
    return f"{value:.1f} {_UNITS[unit]}" if unit else f"{count} B"


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
    """A JSON value on one short line; nothing for null."""
    return "" if value is None else cut(canonical(value).decode("ascii"), limit)


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


def value(node: Node, limit: int = 90) -> str:
    """A value of the tree as Python would write it, cut to `limit` characters."""
    return cut(_value(node, limit), limit)


def _value(node: Node, limit: int) -> str:
    tag = tag_of(node)
    if isinstance(node, list) or tag in SEQUENCES:
        return _sequence(tag, items_of(node), limit)
    if tag in MAPPINGS:
        inside = _joined(
            (f"{_value(key, limit)}: {_value(item, limit)}" for key, item in pairs_of(node)), limit
        )
        return f"{{{inside}}}" if tag == "dict" else f"{tag}({{{inside}}})"
    if tag is None:
        return repr(node)
    try:
        return _LEAVES[tag](body_of(node))
    except (KeyError, TypeError, ValueError, struct.error):
        return canonical(node).decode("ascii")


def _sequence(tag: str | None, items: Sequence[Node], limit: int) -> str:
    inside = _joined((_value(item, limit) for item in items), limit)
    if tag is None:
        return f"[{inside}]"
    if tag == "tuple":
        return f"({inside},)" if len(items) == 1 else f"({inside})"
    return f"{tag}([{inside}])"


def _joined(parts: Iterator[str], limit: int) -> str:
    """Parts with commas, as many as can be shown."""
    found, length = [], 0
    for part in parts:
        found.append(part)
        length += len(part) + 2
        if length > limit:
            break
    return ", ".join(found)


def _scalar(body: Node) -> str:
    """A 0-d tensor; those of types that numpy does not know are shown as their bytes."""
    dtype, data = _field(body, "dtype"), base64.b64decode(_field(body, "data"))
    if dtype == "bfloat16":
        number: object = np.frombuffer(b"\0\0" + data, "<f4")[0]
    elif dtype.startswith("float8"):
        return f"tensor(0x{data.hex()}, {dtype})"
    else:
        number = np.frombuffer(data, np.dtype(dtype).newbyteorder("<"))[0]
    return f"tensor({number}, {dtype})"


def _numpy(body: Node) -> str:
    dtype = np.dtype(_field(body, "dtype"))
    number = np.frombuffer(base64.b64decode(_field(body, "data")), dtype)[0]
    return f"numpy.{dtype.newbyteorder('=').name}({number})"


def _deque(body: Node) -> str:
    return f"deque({_value({'tuple': items_of({'deque': body})}, 90)})"


def _per_rank(body: Node) -> str:
    entry = _object(body)
    return f"<per rank: {entry['count']} along {entry['axis']}>"


def _document(body: Node) -> str:
    kind = _object(body)["of"]
    return f"<large {'bytes' if kind == 'bytes' else 'value'}, stored apart>"


def _field(body: Node, name: str) -> str:
    return str(_object(body)[name])


def _object(body: Node) -> dict[str, Node]:
    if not isinstance(body, dict):
        raise TypeError(f"{body!r} is no object")
    return body


_LEAVES: Final[dict[str, Callable[[Node], str]]] = {
    "int": lambda body: str(int(str(body), 16)),
    "float": lambda body: repr(struct.unpack(">d", bytes.fromhex(str(body)))[0]),
    "str": lambda body: repr(base64.b64decode(str(body)).decode("utf-8", "surrogatepass")),
    "complex": lambda body: f"complex{_value({'tuple': body}, 90)}",
    "bytes": lambda body: repr(base64.b64decode(str(body))),
    "bytearray": lambda body: repr(bytearray(base64.b64decode(str(body)))),
    "size": lambda body: f"torch.Size({body})",
    "dtype": lambda body: f"torch.{body}",
    "device": lambda body: f"torch.device({body!r})",
    "scalar": _scalar,
    "numpy": _numpy,
    "deque": _deque,
    "per_rank": _per_rank,
    "document": _document,
}

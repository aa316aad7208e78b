"""Values of the tree as text, without torch and without making them."""

from __future__ import annotations

import base64
import struct
from collections.abc import Callable, Iterator, Sequence
from typing import Final

import numpy as np

from ucpstore.cli.text import cut
from ucpstore.format.documents import canonical
from ucpstore.tree import Node
from ucpstore.tree.nodes import MAPPINGS, SEQUENCES, body_of, items_of, pairs_of, tag_of


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

"""From nodes back to Python values. Nothing in a node can run code."""

from __future__ import annotations

import base64
import struct
from collections import Counter, OrderedDict, deque
from collections.abc import Callable
from typing import TYPE_CHECKING, Final

import numpy as np

from ucpstore import dtypes
from ucpstore.errors import FormatError, UcpstoreError
from ucpstore.format.documents import expect
from ucpstore.tree.encode import NUMPY_KINDS
from ucpstore.tree.nodes import Node, body_of, items_of, pairs_of, short, tag_of

if TYPE_CHECKING:
    import torch

OnArray = Callable[[str, Node], object]
"""Gives the value of a node whose contents lie elsewhere, from its tag and body."""

ELSEWHERE: Final = frozenset({"array", "link", "per_rank", "optimizer", "document"})
"""Tags of nodes that say where values are stored, not what they are."""


def decode(node: Node, on_array: OnArray | None = None) -> object:
    """The value of a node, exact in type and value; tensors are on the CPU.

    `on_array` is asked for the values of nodes tagged as in `ELSEWHERE`; without it they raise
    FormatError, as do tags that are not known and nodes of another form than their tag promises.
    """
    try:
        return _decode(node, on_array)
    except (UcpstoreError, RecursionError):
        raise
    except (KeyError, ValueError, TypeError, OverflowError, RuntimeError, struct.error) as error:
        raise FormatError(f"a node of the tree cannot be read ({error}): {short(node)}") from error


def _decode(node: Node, on_array: OnArray | None) -> object:
    if isinstance(node, list):
        return [_decode(item, on_array) for item in node]
    tag = tag_of(node)
    if tag is None:
        return node
    if tag in ELSEWHERE:
        if on_array is None:
            raise FormatError(
                f"a value that lies elsewhere, {short(node)}, cannot be read from the tree alone"
            )
        return on_array(tag, body_of(node))
    if tag in _MAPPINGS:
        pairs = [(_decode(key, None), _decode(item, on_array)) for key, item in pairs_of(node)]
        return _MAPPINGS[tag](pairs)
    if tag in _SEQUENCES:
        return _SEQUENCES[tag]([_decode(item, on_array) for item in items_of(node)])
    if tag == "deque":
        items = [_decode(item, on_array) for item in items_of(node)]
        entry: dict[str, Node] = expect(body_of(node), dict, "a deque")
        maxlen = entry.get("maxlen")
        return deque(items, None if maxlen is None else expect(maxlen, int, "maxlen of a deque"))
    read = _LEAVES.get(tag)
    if read is None:
        raise FormatError(
            f"the tree holds a {tag!r}, which this ucpstore does not know; "
            "upgrade ucpstore to read this step"
        )
    return read(body_of(node))


_MAPPINGS: Final[dict[str, Callable[[list[tuple[object, object]]], object]]] = {
    "dict": dict,
    "ordered_dict": OrderedDict,
    "counter": lambda pairs: Counter(dict(pairs)),
}

_SEQUENCES: Final[dict[str, Callable[[list[object]], object]]] = {
    "tuple": tuple,
    "set": set,
    "frozenset": frozenset,
}


def _float(body: Node) -> float:
    (number,) = struct.unpack(">d", bytes.fromhex(_str(body)))
    return float(number)


def _complex(body: Node) -> complex:
    real, imaginary = (_decode(part, None) for part in expect(body, list, "a complex number"))
    return complex(_exact_float(real), _exact_float(imaginary))


def _exact_float(value: object) -> float:
    if type(value) is not float:
        raise TypeError(f"a part of a complex number is {value!r}")
    return value


def _size(body: Node) -> torch.Size:
    import torch

    return torch.Size([expect(extent, int, "an extent") for extent in expect(body, list, "a size")])


def _dtype(body: Node) -> torch.dtype:
    import torch

    found = getattr(torch, _str(body), None)
    if not isinstance(found, torch.dtype):
        raise FormatError(f"torch {torch.__version__} has no dtype {body!r}; upgrade torch")
    return found


def _device(body: Node) -> torch.device:
    import torch

    return torch.device(_str(body))


def _numpy(body: Node) -> np.generic:
    entry: dict[str, Node] = expect(body, dict, "a numpy scalar")
    dtype, data = _numpy_dtype(entry), _data(entry)
    if len(data) != dtype.itemsize:
        raise ValueError(f"{len(data)} bytes are no {dtype}")
    # An array would drop zeros at the end of a text.
    if dtype.kind == "U":
        return np.str_(data.decode("utf-32-le", "surrogatepass"))
    if dtype.kind == "S":
        return np.bytes_(data)
    found: np.generic = np.frombuffer(data, dtype)[0]
    return found


def _ndarray(body: Node) -> np.ndarray:
    entry: dict[str, Node] = expect(body, dict, "a numpy array")
    dtype = _numpy_dtype(entry)
    # numpy cannot view a buffer as strings of length 0
    flat = np.frombuffer(_data(entry), dtype) if dtype.itemsize else np.zeros(_shape(entry), dtype)
    return flat.reshape(_shape(entry)).copy()


def _numpy_dtype(entry: dict[str, Node]) -> np.dtype:
    dtype = np.dtype(_str(entry["dtype"]))
    if dtype.kind not in NUMPY_KINDS:
        raise TypeError(f"numpy type {dtype} is not one that is stored")
    return dtype.newbyteorder("=")


def _scalar(body: Node) -> torch.Tensor:
    entry: dict[str, Node] = expect(body, dict, "a scalar tensor")
    return _tensor({**entry, "shape": []})


def _tensor(body: Node) -> torch.Tensor:
    import torch

    entry: dict[str, Node] = expect(body, dict, "a tensor")
    dtype = dtypes.to_torch(_str(entry["dtype"]))
    data = bytearray(_data(entry))
    # torch refuses to view an empty buffer
    flat = torch.frombuffer(data, dtype=torch.uint8) if data else torch.empty(0, dtype=torch.uint8)
    return flat.view(dtype).reshape(_shape(entry))


_LEAVES: Final[dict[str, Callable[[Node], object]]] = {
    "int": lambda body: int(_str(body), 16),
    "float": _float,
    "str": lambda body: _base64(body).decode("utf-8", "surrogatepass"),
    "complex": _complex,
    "bytes": lambda body: _base64(body),
    "bytearray": lambda body: bytearray(_base64(body)),
    "size": _size,
    "dtype": _dtype,
    "device": _device,
    "numpy": _numpy,
    "ndarray": _ndarray,
    "scalar": _scalar,
    "tensor": _tensor,
}


def _str(body: Node) -> str:
    return expect(body, str, "a part of a node")


def _data(entry: dict[str, Node]) -> bytes:
    return _base64(entry["data"])


def _base64(body: Node) -> bytes:
    return base64.b64decode(_str(body), validate=True)


def _shape(entry: dict[str, Node]) -> tuple[int, ...]:
    return tuple(
        expect(extent, int, "an extent") for extent in expect(entry["shape"], list, "a shape")
    )

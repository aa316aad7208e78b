"""From Python values to nodes, exact in type and value, without pickle.

Types are matched exactly: a subclass would come back as something else, so it is refused. torch is
looked up only where the program has imported it already.
"""

from __future__ import annotations

import base64
import struct
import sys
from collections import Counter, OrderedDict, deque
from collections.abc import Callable, Iterable
from dataclasses import is_dataclass
from enum import Enum
from types import ModuleType
from typing import TYPE_CHECKING, Final, cast

import numpy as np

from ucpstore import dtypes
from ucpstore.errors import UnsupportedError
from ucpstore.format.documents import canonical
from ucpstore.tree.nodes import MAX_DEPTH, Node, shown

if TYPE_CHECKING:
    import torch

Keys = tuple[object, ...]
OnTensor = Callable[[object, Keys], Node | None]
"""Offered every value but numbers, strings and None, with the keys that lead to it; a node claims
the value, None leaves it to the encoder."""

MAX_JSON_INT: Final = 2**1024
"""Integers from here on, either sign, are written in hexadecimal: JSON readers limit digits."""

NUMPY_KINDS: Final = frozenset("biufcSU")


def encode(value: object, path: str = "", on_tensor: OnTensor | None = None) -> Node:
    """The node of a value of the state; `path` is what messages begin with.

    Raises UnsupportedError, naming the path, for what cannot be written. A 0-d tensor becomes a
    `scalar` node; larger tensors, numpy arrays and objects must be claimed by `on_tensor`.
    """
    return _Encoder(on_tensor, arrays=False).node(value, path, ())


def encode_value(value: object, path: str = "") -> Node:
    """The node of a value that is stored without arrays: tensors and numpy arrays lie in it."""
    return _Encoder(None, arrays=True).node(value, path, ())


class _Encoder:
    """One walk; `arrays` says that tensors of any size are written into the node."""

    def __init__(self, on_tensor: OnTensor | None, *, arrays: bool) -> None:
        self._on_tensor = on_tensor
        self._arrays = arrays

    def node(self, value: object, path: str, keys: Keys) -> Node:
        kind = type(value)
        if value is None or kind is bool:
            return cast("bool | None", value)
        if kind in _PLAIN:
            return _PLAIN[kind](value)
        if self._on_tensor is not None:
            claimed = self._on_tensor(value, keys)
            if claimed is not None:
                return claimed
        if kind in _CONTAINERS:
            return self._container(value, path, keys)
        return self._leaf(value, path)

    def _container(self, value: object, path: str, keys: Keys) -> Node:
        if len(keys) >= MAX_DEPTH:
            raise UnsupportedError(
                f"{path[:200]}: containers nest deeper than {MAX_DEPTH}, or one holds itself; "
                "flatten the state"
            )
        tag = _CONTAINERS[type(value)]
        if isinstance(value, dict):
            return {
                cast("str", tag): [
                    [
                        _key(key, path, keys),
                        self.node(item, shown(path, str(key)), (*keys, key)),
                    ]
                    for key, item in value.items()
                ]
            }
        items = [
            self.node(item, shown(path, str(index)), (*keys, index))
            for index, item in enumerate(cast("Iterable[object]", value))
        ]
        if isinstance(value, deque):
            return {"deque": {"items": items, "maxlen": value.maxlen}}
        if isinstance(value, (set, frozenset)):
            items.sort(key=canonical)
        return items if tag is None else {tag: items}

    def _leaf(self, value: object, path: str) -> Node:
        if isinstance(value, np.generic):
            return _numpy(value, path)
        if isinstance(value, np.ndarray) and self._arrays:
            return _ndarray(value, path)
        torch = sys.modules.get("torch")
        if torch is not None:
            node = _torch(torch, value, path, arrays=self._arrays)
            if node is not None:
                return node
        if isinstance(value, np.ndarray) or (torch and isinstance(value, torch.Tensor)):
            raise UnsupportedError(
                f"{path}: a {type(value).__name__} cannot be stored here, but in dicts, lists and "
                "tuples only; keep it in one of these"
            )
        raise UnsupportedError(f"{path}: {_advice(value)}")


def _key(key: object, path: str, keys: Keys) -> Node:
    try:
        return _Encoder(None, arrays=False).node(key, path, keys)
    except UnsupportedError as error:
        raise UnsupportedError(f"{error} (it is a key of a dict)") from None


def _int(value: object) -> Node:
    number = cast("int", value)
    return number if -MAX_JSON_INT < number < MAX_JSON_INT else {"int": format(number, "x")}


def _float(value: object) -> Node:
    number = cast("float", value)
    if number - number == 0:
        return number
    return {"float": struct.pack(">d", number).hex()}


def _str(value: object) -> Node:
    text = cast("str", value)
    try:
        text.encode("utf-8")
    except UnicodeEncodeError:
        # JSON would join two lone surrogates into one character.
        return {"str": _base64(text.encode("utf-8", "surrogatepass"))}
    return text


def _complex(value: object) -> Node:
    number = cast("complex", value)
    return {"complex": [_float(number.real), _float(number.imag)]}


_PLAIN: Final[dict[type, Callable[[object], Node]]] = {
    int: _int,
    float: _float,
    str: _str,
    complex: _complex,
    bytes: lambda value: {"bytes": _base64(cast("bytes", value))},
    bytearray: lambda value: {"bytearray": _base64(cast("bytearray", value))},
}

_CONTAINERS: Final[dict[type, str | None]] = {
    dict: "dict",
    OrderedDict: "ordered_dict",
    Counter: "counter",
    list: None,
    tuple: "tuple",
    set: "set",
    frozenset: "frozenset",
    deque: "deque",
}


def _numpy(value: np.generic, path: str) -> Node:
    # Text by itself: in an array it could not be empty, and zeros at its end would be padding.
    if isinstance(value, np.str_):
        data = value.encode("utf-32-le", "surrogatepass")  # str() would drop zeros
        return {"numpy": {"dtype": f"<U{len(value)}", "data": _base64(data)}}
    if isinstance(value, np.bytes_):
        return {"numpy": {"dtype": f"|S{len(value)}", "data": _base64(bytes(value))}}
    dtype = _numpy_dtype(value.dtype, path)
    return {"numpy": {"dtype": dtype.str, "data": _base64(np.asarray(value, dtype).tobytes())}}


def _ndarray(value: np.ndarray, path: str) -> Node:
    if type(value) is not np.ndarray:
        raise UnsupportedError(
            f"{path}: a {type(value).__name__} would come back as a numpy array; "
            "save numpy.asarray(...) of it"
        )
    dtype = _numpy_dtype(value.dtype, path)
    data = np.ascontiguousarray(value, dtype).tobytes()
    return {"ndarray": {"dtype": dtype.str, "shape": list(value.shape), "data": _base64(data)}}


def _numpy_dtype(dtype: np.dtype, path: str) -> np.dtype:
    """The little-endian form of a numpy type, unless its bytes differ between machines."""
    # Of the types that other packages add some call themselves floats, as float8_e5m2 does.
    added = dtype.isbuiltin == 2
    if added or dtype.kind not in NUMPY_KINDS or dtype.char in "gG":
        raise UnsupportedError(
            f"{path}: numpy type {dtype} cannot be stored; convert it to a number, string or "
            "a type of fixed size such as float64"
        )
    return dtype.newbyteorder("<")


def _torch(torch: ModuleType, value: object, path: str, *, arrays: bool) -> Node | None:
    if isinstance(value, torch.Size):
        return {"size": [int(extent) for extent in value]}
    if isinstance(value, torch.dtype):
        return {"dtype": str(value).removeprefix("torch.")}
    if isinstance(value, torch.device):
        return {"device": str(value)}
    if not isinstance(value, torch.Tensor) or (value.dim() and not arrays):
        return None
    return _tensor(torch, value, path)


def _tensor(torch: ModuleType, tensor: torch.Tensor, path: str) -> Node:
    plain = type(tensor) is torch.Tensor and tensor.layout is torch.strided
    if not plain or tensor.is_nested:
        layout = "nested" if tensor.is_nested else tensor.layout
        raise UnsupportedError(
            f"{path}: a {type(tensor).__name__} of layout {layout} cannot be stored inside of a "
            "value; save a plain dense tensor, such as tensor.detach()"
        )
    if tensor.is_meta:
        raise UnsupportedError(f"{path}: a tensor on the meta device has no values to store")
    try:
        dtype = dtypes.to_name(tensor.dtype)
    except UnsupportedError as error:
        raise UnsupportedError(f"{path}: {error}") from None
    # a copy: numpy() forbids for good that a storage is resized, and this one is the user's
    dense = tensor.detach().cpu().resolve_conj().resolve_neg().flatten().clone()
    data = _base64(dense.view(torch.uint8).numpy().tobytes())
    if tensor.dim() == 0:
        return {"scalar": {"dtype": dtype, "data": data}}
    return {"tensor": {"dtype": dtype, "shape": list(tensor.shape), "data": data}}


def _base64(data: bytes | bytearray) -> str:
    return base64.b64encode(data).decode("ascii")


def _advice(value: object) -> str:
    kind = type(value)
    name = f"{kind.__module__}.{kind.__qualname__}"
    if hasattr(value, "_fields") and isinstance(value, tuple):
        return f"the named tuple {name} cannot be stored; save its _asdict() or a tuple"
    if isinstance(value, Enum):
        return f"the enum member {value!s} cannot be stored; save its name or value"
    if kind.__module__ == "datetime":
        return f"a {name} cannot be stored; save str(...) or a number of seconds"
    for base in (bool, *_PLAIN, *_CONTAINERS):
        if isinstance(value, base):
            return (
                f"a {name} cannot be stored, for it would come back as a {base.__name__}; "
                f"save {base.__name__}(...) of it"
            )
    if is_dataclass(value) and not isinstance(value, type):
        return f"the dataclass {name} cannot be stored; save dataclasses.asdict(...) of it"
    if callable(value):
        return f"functions and classes, as {name}, cannot be stored; build them again after load"
    return (
        f"a {name} cannot be stored; save plain values or tensors, or give it state_dict() and "
        "load_state_dict()"
    )

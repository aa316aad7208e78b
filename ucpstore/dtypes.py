"""The data types that can be stored, by their names in the Zarr v3 core and extension registry.

The names are those of torch wherever both know the type. All values are stored little-endian.
torch is imported only where a torch dtype is asked for.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cache
from types import MappingProxyType
from typing import TYPE_CHECKING, Literal

from ucpstore.errors import FormatError, UnsupportedError

if TYPE_CHECKING:
    import torch

Kind = Literal["float", "complex", "int", "bool"]
FillValue = str | int | bool | list[str]


@dataclass(frozen=True, slots=True)
class _Type:
    """One storable type; `fill` is the value of one fill element, as stored bytes."""

    kind: Kind
    itemsize: int
    fill: bytes


def _floating(itemsize: int, nan: int) -> _Type:
    return _Type("float", itemsize, nan.to_bytes(itemsize, "little"))


def _complex(part: _Type) -> _Type:
    return _Type("complex", 2 * part.itemsize, 2 * part.fill)


def _integer(itemsize: int) -> _Type:
    return _Type("int", itemsize, bytes(itemsize))


# The bits of "NaN" are those that the Zarr registry fixes for each type.
_FLOAT32 = _floating(4, 0x7FC00000)
_FLOAT64 = _floating(8, 0x7FF8000000000000)
_TYPES = MappingProxyType(
    {
        "bool": _Type("bool", 1, bytes(1)),
        "int8": _integer(1),
        "int16": _integer(2),
        "int32": _integer(4),
        "int64": _integer(8),
        "uint8": _integer(1),
        "uint16": _integer(2),
        "uint32": _integer(4),
        "uint64": _integer(8),
        "float16": _floating(2, 0x7E00),
        "bfloat16": _floating(2, 0x7FC0),
        "float32": _FLOAT32,
        "float64": _FLOAT64,
        "float8_e4m3fn": _floating(1, 0x7F),
        "float8_e4m3fnuz": _floating(1, 0x80),
        "float8_e5m2": _floating(1, 0x7E),
        "float8_e5m2fnuz": _floating(1, 0x80),
        "float8_e8m0fnu": _floating(1, 0xFF),
        "complex64": _complex(_FLOAT32),
        "complex128": _complex(_FLOAT64),
    }
)

NAMES: tuple[str, ...] = tuple(_TYPES)
"""Every name that an array may have as its data type."""

_CONVERT = f"convert the tensor to one of {', '.join(NAMES)}"
_ADVICE = (
    ("complex32", "convert the tensor to complex64, or save torch.view_as_real() of it"),
    ("q", "save int_repr(), scales and zero points as tensors of their own"),
    (
        ("int", "uint", "bits", "float4"),
        "save view(torch.uint8) of it, and view it back after load",
    ),
)
"""How names begin that torch has and Zarr has not, and what to do instead."""


@cache
def to_name(dtype: torch.dtype) -> str:
    """The registry name of a torch dtype.

    Raises UnsupportedError for types without a common Zarr form: complex32, sub-byte and packed
    ones, quantized ones. Callers put the path of the tensor in front of the message.
    """
    name = str(dtype).removeprefix("torch.")
    if name not in _TYPES:
        raise UnsupportedError(
            f"dtype {dtype} has no common Zarr form; "
            + next((advice for begin, advice in _ADVICE if name.startswith(begin)), _CONVERT)
        )
    return name


def to_torch(name: str) -> torch.dtype:
    """The torch dtype of a registry name.

    Raises FormatError for a name outside `NAMES`, and UnsupportedError where the installed torch
    is too old to know the type.
    """
    import torch

    _find(name)
    dtype = getattr(torch, name, None)
    if not isinstance(dtype, torch.dtype):
        raise UnsupportedError(
            f"dtype {name} needs a newer torch than {torch.__version__}; upgrade torch to read it"
        )
    return dtype


def itemsize(name: str) -> int:
    """Bytes of one element."""
    return _find(name).itemsize


def kind(name: str) -> Kind:
    """What family of numbers the type belongs to."""
    return _find(name).kind


def fill_value(name: str) -> FillValue:
    """The `fill_value` of an array's metadata: NaN wherever the type has one, so damage shows."""
    match _find(name).kind:
        case "float":
            return "NaN"
        case "complex":
            return ["NaN", "NaN"]
        case "bool":
            return False
        case _:
            return 0


def fill_bytes(name: str) -> bytes:
    """One element of the fill value as stored, little-endian."""
    return _find(name).fill


def _find(name: str) -> _Type:
    found = _TYPES.get(name)
    if found is None:
        raise FormatError(
            f"data type {name!r} is not known; known are {', '.join(NAMES)}. "
            "It may have been written by a newer ucpstore: upgrade to read it"
        )
    return found

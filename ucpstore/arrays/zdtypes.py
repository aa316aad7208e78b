"""The data types that zarr-python does not bring: bfloat16 and the float8 kinds.

zarr-python finds the classes through the `zarr.data_type` entry points of this package, so that
any program in an environment that has ucpstore reads such arrays without importing it. The names
are those of the Zarr v3 registry. This module is loaded in processes that use nothing else of
ucpstore: it imports neither torch nor other parts of the package.

zarr-python 3.1 collects these entry points but never loads them. It does load those of
`zarr.buffer` before it parses a group, so one of them points at `Buffer` below: zarr's own class
under its own name, which changes nothing except that this module runs and registers its types. An
array opened by its own path before any group needs `import ucpstore.arrays.zdtypes` there.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, ClassVar, Literal, Self, SupportsFloat, TypeAlias, cast, overload

import ml_dtypes
import numpy as np
from zarr.buffer.cpu import Buffer
from zarr.dtype import ZDType, data_type_registry

if TYPE_CHECKING:
    from zarr.core.dtype.common import HasEndianness, HasItemSize
    from zarr.dtype import DataTypeValidationError
else:
    # An error here would break every program that uses zarr in this environment, so a name that
    # zarr moves must not be one. The two mixins have no public name. Without them zarr forgets the
    # byte order when it rewrites metadata, which matters to other readers only.
    try:
        from zarr.core.dtype.common import HasEndianness, HasItemSize
    except ImportError:

        @dataclass(frozen=True, kw_only=True)
        class HasEndianness:
            endianness: str = "little"

        class HasItemSize:
            pass

    try:
        from zarr.errors import DataTypeValidationError  # zarr 3.2 and later
    except ImportError:
        from zarr.dtype import DataTypeValidationError

__all__ = [
    "BFloat16",
    "Buffer",
    "Float8E4M3FN",
    "Float8E4M3FNUZ",
    "Float8E5M2",
    "Float8E5M2FNUZ",
    "Float8E8M0FNU",
]

JSON: TypeAlias = "str | int | float | Mapping[str, JSON] | Sequence[JSON] | None"
_Native: TypeAlias = np.dtype[np.generic]
_ZarrFormat: TypeAlias = Literal[2, 3]

_SPECIAL = {"NaN": math.nan, "Infinity": math.inf, "-Infinity": -math.inf}


@dataclass(frozen=True, kw_only=True)
class _MlFloat(ZDType[_Native, np.generic], HasItemSize):
    """What the types have in common; a subclass names its ml_dtypes scalar type."""

    _scalar: ClassVar[type[np.generic]]

    @property
    def item_size(self) -> int:
        """Bytes of one element."""
        return np.dtype(self._scalar).itemsize

    @classmethod
    def from_native_dtype(cls, dtype: _Native) -> Self:
        """The Zarr type of exactly this numpy dtype; DataTypeValidationError for any other."""
        if dtype == np.dtype(cls._scalar):
            return cls()
        raise DataTypeValidationError(f"{dtype} is not {cls._zarr_v3_name}")

    def to_native_dtype(self) -> _Native:
        """The ml_dtypes dtype, in the byte order of the machine: it has no other."""
        return np.dtype(self._scalar)

    @classmethod
    def _from_json_v2(cls, data: object) -> Self:
        raise DataTypeValidationError(f"Zarr v2 has no {cls._zarr_v3_name}")

    @classmethod
    def _from_json_v3(cls, data: object) -> Self:
        if data == cls._zarr_v3_name:
            return cls()
        raise DataTypeValidationError(f"{data!r} is not {cls._zarr_v3_name!r}")

    @overload  # type: ignore[override]  # there is no v2 form to return
    def to_json(self, zarr_format: Literal[2]) -> str: ...
    @overload
    def to_json(self, zarr_format: Literal[3]) -> str: ...
    def to_json(self, zarr_format: _ZarrFormat) -> str:
        """The registered name; ValueError for Zarr v2, which has none."""
        self._require_v3(zarr_format)
        return self._zarr_v3_name

    def _check_scalar(self, data: object) -> bool:
        return isinstance(data, (str, SupportsFloat))

    def cast_scalar(self, data: object) -> np.generic:
        """`data`, a number or the text of one, as an element; an element keeps its bits."""
        if isinstance(data, self._scalar):
            return data
        if isinstance(data, (str, SupportsFloat)):
            return self._element(float(data))
        raise TypeError(f"{data!r} is not a number and cannot be a {self._zarr_v3_name}")

    def default_scalar(self) -> np.generic:
        """Zero; NaN for a type without zero."""
        return self._element(0.0)

    def from_json_scalar(self, data: JSON, *, zarr_format: _ZarrFormat) -> np.generic:
        """An element from a number, "NaN", "Infinity", "-Infinity", or 0x and its bits in hex."""
        self._require_v3(zarr_format)
        if isinstance(data, (int, float)) and not isinstance(data, bool):
            return self._element(float(data))
        if isinstance(data, str):
            if data in _SPECIAL:
                return self._element(_SPECIAL[data])
            if data.startswith("0x") and len(data) == 2 + 2 * self.item_size:
                raw = np.array(int(data, 16), dtype=f"u{self.item_size}")
                return self._first(raw.view(self.to_native_dtype()))
        raise TypeError(
            f"{data!r} is no {self._zarr_v3_name} value; expected a number, one of "
            f"{', '.join(_SPECIAL)}, or 0x and {2 * self.item_size} hex digits"
        )

    def to_json_scalar(self, data: object, *, zarr_format: _ZarrFormat) -> float | str:
        """The JSON form of an element; a NaN other than the usual one keeps its bits as hex."""
        self._require_v3(zarr_format)
        element = self.cast_scalar(data)
        value = float(element)
        if math.isfinite(value):
            return value
        if not math.isnan(value):
            return "Infinity" if value > 0 else "-Infinity"
        if element.tobytes() == self._element(math.nan).tobytes():
            return "NaN"
        bits = int(np.array(element).view(f"u{self.item_size}"))
        return f"0x{bits:0{2 * self.item_size}x}"

    def _element(self, value: float) -> np.generic:
        return self._first(np.array(value, dtype=np.float64).astype(self._scalar))

    @staticmethod
    def _first(array: np.ndarray[tuple[()], _Native]) -> np.generic:
        return cast("np.generic", array[()])

    def _require_v3(self, zarr_format: _ZarrFormat) -> None:
        if zarr_format != 3:
            raise ValueError(f"{self._zarr_v3_name} exists in Zarr v3 only, not in v{zarr_format}")


@dataclass(frozen=True, kw_only=True)
class BFloat16(_MlFloat, HasEndianness):
    """`bfloat16`: the upper half of a float32. Stored in the byte order of the `bytes` codec."""

    dtype_cls = type(np.dtype(ml_dtypes.bfloat16))
    _zarr_v3_name: ClassVar[Literal["bfloat16"]] = "bfloat16"
    _scalar = ml_dtypes.bfloat16

    def to_native_dtype(self) -> _Native:
        """As for every type here; ValueError for big-endian chunks, which ml_dtypes cannot view."""
        if self.endianness != "little":
            raise ValueError(
                "bfloat16 is only read and written with the bytes codec's endian set to little, "
                f"but it is {self.endianness}"
            )
        return super().to_native_dtype()


@dataclass(frozen=True, kw_only=True)
class Float8E4M3FN(_MlFloat):
    """`float8_e4m3fn`: 4 exponent bits, no infinities, one NaN per sign."""

    dtype_cls = type(np.dtype(ml_dtypes.float8_e4m3fn))
    _zarr_v3_name: ClassVar[Literal["float8_e4m3fn"]] = "float8_e4m3fn"
    _scalar = ml_dtypes.float8_e4m3fn


@dataclass(frozen=True, kw_only=True)
class Float8E5M2(_MlFloat):
    """`float8_e5m2`: 5 exponent bits, infinities and NaN as in IEEE 754."""

    dtype_cls = type(np.dtype(ml_dtypes.float8_e5m2))
    _zarr_v3_name: ClassVar[Literal["float8_e5m2"]] = "float8_e5m2"
    _scalar = ml_dtypes.float8_e5m2


@dataclass(frozen=True, kw_only=True)
class Float8E4M3FNUZ(_MlFloat):
    """`float8_e4m3fnuz`: no infinities, no negative zero, whose bits are the only NaN."""

    dtype_cls = type(np.dtype(ml_dtypes.float8_e4m3fnuz))
    _zarr_v3_name: ClassVar[Literal["float8_e4m3fnuz"]] = "float8_e4m3fnuz"
    _scalar = ml_dtypes.float8_e4m3fnuz


@dataclass(frozen=True, kw_only=True)
class Float8E5M2FNUZ(_MlFloat):
    """`float8_e5m2fnuz`: no infinities, no negative zero, whose bits are the only NaN."""

    dtype_cls = type(np.dtype(ml_dtypes.float8_e5m2fnuz))
    _zarr_v3_name: ClassVar[Literal["float8_e5m2fnuz"]] = "float8_e5m2fnuz"
    _scalar = ml_dtypes.float8_e5m2fnuz


@dataclass(frozen=True, kw_only=True)
class Float8E8M0FNU(_MlFloat):
    """`float8_e8m0fnu`: powers of two only, for the scales of microscaling formats; no zero."""

    dtype_cls = type(np.dtype(ml_dtypes.float8_e8m0fnu))
    _zarr_v3_name: ClassVar[Literal["float8_e8m0fnu"]] = "float8_e8m0fnu"
    _scalar = ml_dtypes.float8_e8m0fnu


for _kind in (BFloat16, Float8E4M3FN, Float8E5M2, Float8E4M3FNUZ, Float8E5M2FNUZ, Float8E8M0FNU):
    data_type_registry.register(_kind._zarr_v3_name, _kind)

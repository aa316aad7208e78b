"""The data types given to zarr-python: names, scalars, JSON forms."""

from __future__ import annotations

import math
import subprocess
import sys
from importlib.metadata import entry_points

import numpy as np
import pytest
import zarr.buffer.cpu
import zarr.dtype

from ucpstore import dtypes
from ucpstore.arrays import zdtypes

KINDS = [
    zdtypes.BFloat16,
    zdtypes.Float8E4M3FN,
    zdtypes.Float8E4M3FNUZ,
    zdtypes.Float8E5M2,
    zdtypes.Float8E5M2FNUZ,
    zdtypes.Float8E8M0FNU,
]


def test_entry_points_name_every_type_and_zarrs_own_buffer() -> None:
    found = {
        point.name: point.load()
        for point in entry_points(group="zarr.data_type")
        if point.value.startswith("ucpstore.")
    }
    assert found == {str(kind().to_native_dtype()): kind for kind in KINDS}
    (buffer,) = entry_points(group="zarr.buffer", name="ucpstore")
    assert buffer.load() is zarr.buffer.cpu.Buffer


def test_together_with_zarr_every_storable_dtype_is_known() -> None:
    known = set(zarr.dtype.data_type_registry.contents)
    assert set(dtypes.NAMES) <= known


@pytest.mark.parametrize("kind", KINDS)
def test_names_and_native_dtypes_map_both_ways(kind: type[zdtypes.BFloat16]) -> None:
    name = kind().to_json(zarr_format=3)
    assert name in dtypes.NAMES
    assert zarr.dtype.parse_dtype(name, zarr_format=3) == kind()
    native = kind().to_native_dtype()
    assert zarr.dtype.parse_dtype(native, zarr_format=3) == kind()
    assert native.itemsize == kind().item_size == dtypes.itemsize(name)


@pytest.mark.parametrize("kind", KINDS)
def test_nan_has_the_bits_that_padding_has(kind: type[zdtypes.BFloat16]) -> None:
    name = kind().to_json(zarr_format=3)
    nan = kind().from_json_scalar(dtypes.fill_value(name), zarr_format=3)
    assert nan.tobytes() == dtypes.fill_bytes(name)
    assert kind().to_json_scalar(nan, zarr_format=3) == "NaN"


@pytest.mark.parametrize("kind", KINDS)
def test_every_element_survives_json(kind: type[zdtypes.BFloat16]) -> None:
    size = kind().item_size
    raw = np.arange(2 ** (8 * size), step=1 if size == 1 else 37, dtype=f"<u{size}")
    for element in raw.view(kind().to_native_dtype()):
        written = kind().to_json_scalar(element, zarr_format=3)
        read = kind().from_json_scalar(written, zarr_format=3)
        assert read.tobytes() == element.tobytes(), written


def test_json_forms_of_bfloat16() -> None:
    kind = zdtypes.BFloat16()
    forms = {1.5: 1.5, -0.0: -0.0, math.inf: "Infinity", -math.inf: "-Infinity"}
    for value, form in forms.items():
        assert repr(kind.to_json_scalar(value, zarr_format=3)) == repr(form)
    odd = np.array(0x7FC1, "<u2").view(kind.to_native_dtype())[()]
    assert kind.to_json_scalar(odd, zarr_format=3) == "0x7fc1"
    assert kind.cast_scalar("2.5") == 2.5
    assert kind.default_scalar() == 0
    for bad in (True, "0x7fc", "nonsense", None, [1]):
        with pytest.raises(TypeError, match="no bfloat16 value"):
            kind.from_json_scalar(bad, zarr_format=3)
    with pytest.raises(TypeError, match="cannot be a bfloat16"):
        kind.cast_scalar(object())


def test_other_dtypes_and_formats_are_refused() -> None:
    with pytest.raises(ValueError, match="float16 is not bfloat16"):
        zdtypes.BFloat16.from_native_dtype(np.dtype("float16"))
    with pytest.raises(ValueError, match="is not 'bfloat16'"):
        zdtypes.BFloat16.from_json("float16", zarr_format=3)
    with pytest.raises(ValueError, match="Zarr v2 has no bfloat16"):
        zdtypes.BFloat16.from_json("bfloat16", zarr_format=2)
    with pytest.raises(ValueError, match="Zarr v3 only"):
        zdtypes.BFloat16().to_json(zarr_format=2)
    with pytest.raises(ValueError, match="endian set to little"):
        zdtypes.BFloat16(endianness="big").to_native_dtype()


def _run(script: str) -> list[str]:
    command = [sys.executable, "-c", script]
    return subprocess.run(command, capture_output=True, text=True, check=True).stdout.split()


def test_names_that_zarr_may_move_do_not_break_zarr() -> None:
    found = _run(
        "import zarr, zarr.core.dtype.common as common\n"
        "del common.HasEndianness, common.HasItemSize\n"
        "import ucpstore.arrays.zdtypes\n"
        "store = zarr.storage.MemoryStore()\n"
        "array = zarr.create_array(store, shape=(2,), dtype='bfloat16', compressors=None)\n"
        "array[:] = [1, -2]\n"
        "print(*array[:], array.dtype)\n"
    )
    assert found == ["1", "-2", "bfloat16"]


def test_loading_it_brings_nothing_heavy() -> None:
    found = _run(
        "import sys, ucpstore.arrays.zdtypes\n"
        "print(*sorted(m for m in sys.modules if m.startswith(('ucpstore', 'torch'))))"
    )
    assert found == ["ucpstore", "ucpstore.arrays", "ucpstore.arrays.zdtypes"]

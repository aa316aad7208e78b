"""Names, sizes and fill values of the data types."""

import json
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from ucpstore import dtypes
from ucpstore.errors import FormatError, UnsupportedError

ALL = sorted({value for value in vars(torch).values() if isinstance(value, torch.dtype)}, key=str)
STORED = [dtype for dtype in ALL if str(dtype).removeprefix("torch.") in dtypes.NAMES]


def test_these_types_are_stored():
    assert len(STORED) == len(dtypes.NAMES) == 20


@pytest.mark.parametrize("dtype", STORED, ids=str)
def test_names_sizes_and_kinds_are_torchs(dtype):
    name = dtypes.to_name(dtype)
    assert dtypes.to_torch(name) is dtype
    assert dtypes.itemsize(name) == dtype.itemsize
    kind = {(True, False): "float", (False, True): "complex"}.get(
        (dtype.is_floating_point, dtype.is_complex), "bool" if dtype is torch.bool else "int"
    )
    assert dtypes.kind(name) == kind


@pytest.mark.parametrize("dtype", STORED, ids=str)
def test_fill_bytes_are_the_fill_value(dtype):
    name = dtypes.to_name(dtype)
    fill = torch.frombuffer(bytearray(dtypes.fill_bytes(name)), dtype=torch.uint8).view(dtype)
    value = dtypes.fill_value(name)
    assert fill.numel() == 1
    if dtypes.kind(name) == "float":
        assert value == "NaN"
        assert fill.float().isnan().item()
    elif dtypes.kind(name) == "complex":
        assert value == ["NaN", "NaN"]
        assert fill.real.isnan().item()
        assert fill.imag.isnan().item()
    else:
        assert type(value) is (bool if name == "bool" else int)
        assert fill.item() == value


def test_fill_bytes_are_the_bits_of_the_registry():
    assert dtypes.fill_bytes("bfloat16") == b"\xc0\x7f"
    assert dtypes.fill_bytes("float32") == b"\x00\x00\xc0\x7f"
    assert dtypes.fill_bytes("float8_e5m2") == b"\x7e"
    assert dtypes.fill_bytes("complex64") == b"\x00\x00\xc0\x7f" * 2


@pytest.mark.parametrize("dtype", [d for d in ALL if d not in STORED], ids=str)
def test_other_types_are_refused_by_name(dtype):
    with pytest.raises(UnsupportedError, match=rf"{dtype} has no common Zarr form"):
        dtypes.to_name(dtype)


def test_complex32_float4_and_quantized_types_are_among_the_refused():
    refused = {str(dtype) for dtype in ALL if dtype not in STORED}
    assert refused >= {"torch.complex32", "torch.float4_e2m1fn_x2", "torch.qint8", "torch.uint4"}


def test_unknown_names_are_refused():
    for ask in (dtypes.to_torch, dtypes.itemsize, dtypes.kind, dtypes.fill_value):
        with pytest.raises(FormatError, match="'float3'"):
            ask("float3")


def test_an_old_torch_is_told_so(monkeypatch):
    monkeypatch.delattr(torch, "float8_e8m0fnu")
    with pytest.raises(UnsupportedError, match="newer torch"):
        dtypes.to_torch("float8_e8m0fnu")


def test_the_pure_modules_do_not_import_torch():
    modules = "ucpstore.dtypes, ucpstore.format.record, ucpstore.format.step, ucpstore.format.marks"
    modules += ", ucpstore.tree.encode, ucpstore.tree.decode, ucpstore.tree.documents"
    code = f"import {modules}, sys; sys.exit('torch' in sys.modules or 'zarr' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0


PAGE = Path(__file__).parent.parent / "docs" / "dtypes.md"


def tables():
    """The rows of the page's two tables, cells without back quotes: stored types, refused ones."""
    rows = [
        [cell.strip().replace("`", "") for cell in line.strip("|").split("|")]
        for line in PAGE.read_text().splitlines()
        if line.startswith("|") and "torch." in line
    ]
    return [row for row in rows if len(row) == 8], [row for row in rows if len(row) == 3]


def test_the_page_has_every_dtype_of_torch():
    """A dtype that a newer torch brings fails here until somebody has decided about it."""
    stored, refused = tables()
    assert [row[0] for row in stored] == [f"torch.{name}" for name in dtypes.NAMES]
    there = {name for row in refused for name in row[0].split(", ")}
    missing = {str(dtype) for dtype in ALL} - there - {row[0] for row in stored}
    assert missing == set()
    unknown = {name for name in there if not hasattr(torch, name.removeprefix("torch."))}
    assert there - unknown == {str(dtype) for dtype in ALL if dtype not in STORED}


def test_the_page_has_the_names_and_fill_values_of_the_code():
    core = {"bool", "float16", "float32", "float64", "complex64", "complex128"}
    for dtype, name, registry, fill, *_ in tables()[0]:
        assert dtypes.to_name(getattr(torch, dtype.removeprefix("torch."))) == name
        assert json.loads(fill) == dtypes.fill_value(name)
        assert registry == ("core" if name in core or "int" in name else "extension")


def test_the_page_gives_the_advice_of_the_code():
    for names, _, advice in tables()[1]:
        for name in names.split(", "):
            dtype = getattr(torch, name.removeprefix("torch."), None)
            if dtype is not None:
                with pytest.raises(UnsupportedError) as caught:
                    dtypes.to_name(dtype)
                assert str(caught.value).endswith(f"; {advice}")

"""Field cases of data types: B42 to B50: negative zero, every dtype, subclasses, above 2 GiB."""

from __future__ import annotations

import json
import math
import os
import shutil
import subprocess
import sys
import sysconfig
import warnings
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np
import pytest
import torch
import torch.distributed as dist
from cases.tools import attempt, bits, line, refuse_save, same
from ranks.harness import Ranks
from torch import nn
from torch.distributed.tensor import DTensor, Shard

import ucpstore
from ucpstore import dtypes

ALL = sorted({value for value in vars(torch).values() if isinstance(value, torch.dtype)}, key=str)
STORED = [dtype for dtype in ALL if str(dtype).removeprefix("torch.") in dtypes.NAMES]
REFUSED = [dtype for dtype in ALL if dtype not in STORED]

# Bits that a conversion on the way would change, by type; every one of a byte is tried anyway.
SPECIAL = {
    "float16": ("<u2", [0x8000, 0x7E01, 0xFE00, 0x7C01, 0x7C00, 0x0001]),
    "bfloat16": ("<u2", [0x8000, 0x7FC1, 0xFFC0, 0x7F81, 0xFF80, 0x0001]),
    "float32": ("<u4", [1 << 31, 0x7FC00001, 0xFFC00000, 0x7F800001, 0xFF800000, 1]),
    "float64": ("<u8", [1 << 63, 0x7FF8000000000001, 0xFFF8 << 48, (0x7FF0 << 48) + 1, 1]),
    "int16": ("<u2", [0x8000, 0xFFFF]),
    "int32": ("<u4", [1 << 31, 2**32 - 1]),
    "int64": ("<u8", [1 << 63, 2**64 - 1, 2**53 + 1]),
    "uint16": ("<u2", [2**16 - 1]),
    "uint32": ("<u4", [2**32 - 1]),
    "uint64": ("<u8", [2**64 - 1, 1 << 63, 2**53 + 1]),
    "complex64": ("<u4", [1 << 31, 1 << 31, 0x7FC00001, 0xFFC00000, 1, 0]),
    "complex128": ("<u8", [1 << 63, 1 << 63, 0x7FF8000000000001, 1]),
}
PACKED_BYTES = 1024 * 1024 + 48
"""More than fits into one plain chunk."""


def pattern(dtype: torch.dtype, shape: Sequence[int]) -> torch.Tensor:
    """Values with the bits above in front, then random ones; of bytes all 256, again and again."""
    size = math.prod(shape) * dtype.itemsize
    if dtype is torch.bool:  # torch itself makes 1 of other bytes in a copy
        raw = bytes([1, 0, 0, 1, 1]) * (size // 5 + 1)
    elif dtype.itemsize == 1:
        raw = bytes(number % 256 for number in range(128, 384)) * (size // 256 + 1)
    else:
        kind, special = SPECIAL[str(dtype).removeprefix("torch.")]
        raw = np.array(special, kind).tobytes() + np.random.default_rng(7).bytes(size)
    flat = torch.frombuffer(bytearray(raw[: max(size, 1)]), dtype=torch.uint8)[:size]
    return flat.view(dtype).reshape(shape)


def shapes(dtype: torch.dtype) -> dict[str, tuple[int, ...]]:
    return {
        "none": (),
        "empty": (0,),
        "matrix": (5, 3),
        "bytes": (300,),
        "packed": (PACKED_BYTES // dtype.itemsize,),
    }


def written(folder: Path) -> list[str]:
    """The names of all files below a folder."""
    return sorted(path.name for path in folder.rglob("*") if path.is_file())


def filled(module: dict[str, torch.Tensor]) -> nn.Module:
    """A module with these buffers."""
    made = nn.Module()
    for name, value in module.items():
        made.register_buffer(name, value)
    return made


# B42: negative zero, and what is equal to the fill value.

ZEROS = {
    "float64": "0000000000000080",
    "float32": "00000080",
    "float16": "0080",
    "bfloat16": "0080",
    "float8_e5m2": "80",
    "float8_e4m3fn": "80",
    "complex64": "0000008000000080",
    "complex128": "00000000000000800000000000000080",
}


@pytest.mark.parametrize("name", ZEROS)
def test_b42_negative_zero_survives(tmp_path: Path, name: str) -> None:
    dtype = dtypes.to_torch(name)
    zero = torch.frombuffer(bytearray.fromhex(ZEROS[name]), dtype=torch.uint8).view(dtype)
    many = zero.expand(2 * PACKED_BYTES // dtype.itemsize).clone()
    mixed = torch.cat([zero, torch.zeros(1).to(dtype)])
    saved = {"eight": zero.expand(8).clone(), "mixed": mixed, "one": zero[0], "many": many}
    ucpstore.save(tmp_path, {"m": saved, "module": filled(saved)}, step=1)
    target = {key: torch.ones(value.shape).to(dtype) for key, value in saved.items()}
    module = filled({key: torch.ones(value.shape).to(dtype) for key, value in saved.items()})
    ucpstore.load(tmp_path, {"m": target, "module": module})
    assert bits(target["eight"]).hex() == 8 * ZEROS[name]
    assert bits(target["mixed"]).hex() == ZEROS[name] + "00" * dtype.itemsize
    assert all(same(target[key], value) for key, value in saved.items())
    assert all(same(module.get_buffer(key), value) for key, value in saved.items())


@pytest.mark.parametrize("name", ["float32", "bfloat16", "int64", "bool"])
def test_b42_chunks_of_the_fill_value_are_written(tmp_path: Path, name: str) -> None:
    """An absent chunk is damage, so zeros and NaN that equal the fill value must be there."""
    dtype = dtypes.to_torch(name)
    fill = torch.frombuffer(bytearray(dtypes.fill_bytes(name)), dtype=torch.uint8).view(dtype)
    saved = {"few": fill.expand(8).clone(), "many": fill.expand(4 * 1024 * 1024).clone()}
    ucpstore.save(tmp_path, {"m": saved}, step=1)
    (step,) = (tmp_path / "steps").glob("*-*")
    assert (step / "m" / "few" / "c.0").stat().st_size == 8 * dtype.itemsize + 4
    stored = sum(path.stat().st_size for path in (step / "m" / "many").glob("c.*"))
    assert stored > saved["many"].nbytes
    target = {key: torch.ones(value.shape, dtype=dtype) for key, value in saved.items()}
    ucpstore.load(tmp_path, {"m": target})
    assert all(same(target[key], value) for key, value in saved.items())


# B44: bfloat16 and the float8 types in a new process, and without ucpstore.

REOPEN = """
import sys, torch, ucpstore
url, name = sys.argv[1:]
opened = ucpstore.CheckpointStore(url).open()["m"]["w"]
target = {"w": torch.zeros(opened.shape, dtype=getattr(torch, name))}
ucpstore.load(url, {"m": target})
for found in (opened.read(), target["w"]):
    print(found.dtype, tuple(found.shape), bytes(found.flatten().view(torch.uint8).tolist()).hex())
"""
PLAIN = """
import sys, warnings
warnings.simplefilter("error")
import numpy as np
how, *places = sys.argv[1:]
for place in places:
    try:
        if how == "tensorstore":
            import tensorstore
            store = {"driver": "file", "path": place + "/w/"}
            values = tensorstore.open({"driver": "zarr3", "kvstore": store}, open=True, read=True)
            values = values.result().read().result()
        elif how == "xarray":
            import xarray
            values = xarray.open_zarr(place, consolidated=True, mask_and_scale=False)["w"].values
        elif how == "array":
            import zarr
            values = zarr.open_array(place + "/w", mode="r")[...]
        else:
            import zarr
            values = zarr.open_consolidated(place, mode="r")["w"][...]
    except Exception as error:
        print("refused", type(error).__name__, repr(str(error)))
    else:
        print(values.dtype, np.ascontiguousarray(values).tobytes().hex())
assert not {"torch", "ucpstore.store"} & set(sys.modules)
"""


@pytest.fixture(scope="module")
def weights(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """A store for each type that is stored, with one array `m/w`; bfloat16 is checked by name."""
    folder = tmp_path_factory.mktemp("weights")
    for dtype in STORED:
        name = dtypes.to_name(dtype)
        ucpstore.save(folder / name, {"m": {"w": pattern(dtype, (43, 6))}}, step=1)
    return {dtypes.to_name(dtype): folder / dtypes.to_name(dtype) for dtype in STORED}


def item_of(url: Path) -> Path:
    (step,) = (url / "steps").glob("*-*")
    return step / "m"


def process(script: str, *arguments: str, python: Sequence[str] = (), path: str = "") -> str:
    done = subprocess.run(
        [sys.executable, *python, "-c", script, *arguments],
        env={**os.environ, "PYTHONPATH": path},
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    return done.stdout


@pytest.mark.parametrize("name", ["bfloat16", "float8_e8m0fnu"])
def test_b44_reopened_in_a_new_process(weights: dict[str, Path], name: str) -> None:
    found = process(REOPEN, str(weights[name]), name).splitlines()
    expected = bits(pattern(dtypes.to_torch(name), (43, 6))).hex()
    assert found == [f"torch.{name} (43, 6) {expected}"] * 2
    metadata = json.loads((item_of(weights[name]) / "w" / "zarr.json").read_text())
    assert metadata["data_type"] == name
    assert metadata["fill_value"] == "NaN"


@pytest.fixture(scope="module")
def elsewhere(tmp_path_factory: pytest.TempPathFactory) -> str:
    """Packages of an environment that has everything but ucpstore: links to all else."""
    folder = tmp_path_factory.mktemp("site")
    for entry in Path(sysconfig.get_path("purelib")).iterdir():
        if "ucpstore" not in entry.name and entry.suffix != ".pth":
            (folder / entry.name).symlink_to(entry)
    return str(folder)


PAGE = Path(__file__).parents[2] / "docs" / "dtypes.md"
READERS = {
    "zarr-python": "without ucpstore",
    "zarr-python with ucpstore": "zarr",
    "TensorStore": "tensorstore",
    "xarray with ucpstore": "xarray",
}


def column(title: str) -> dict[str, str]:
    """The cells below a title of the page's first table, by the name of the stored type."""
    lines = [line for line in PAGE.read_text().splitlines() if line.startswith("|")]
    rows = [[cell.strip().strip("`") for cell in line.strip("|").split("|")] for line in lines]
    at = rows[0].index(title)
    return {row[1]: row[at] for row in rows[2:] if len(row) == len(rows[0])}


@pytest.mark.parametrize("title", READERS)
def test_b44_other_tools_read_what_the_page_says(
    weights: dict[str, Path], elsewhere: str, title: str
) -> None:
    python, path = (["-S"], elsewhere) if title == "zarr-python" else ((), "")
    items = [str(item_of(url)) for url in weights.values()]
    found = process(PLAIN, READERS[title], *items, python=python, path=path).splitlines()
    answers = dict(zip(weights, found, strict=True))
    read = {name: "no" if text.startswith("refused") else "yes" for name, text in answers.items()}
    assert read == column(title)
    for name, text in answers.items():
        if read[name] == "yes":
            assert text.split() == [name, bits(pattern(dtypes.to_torch(name), (43, 6))).hex()]
        else:
            assert name in text  # says what it does not know


def test_b44_an_array_by_its_own_path_is_refused_by_name(weights: dict[str, Path]) -> None:
    """zarr-python 3.1 looks for the types of other packages where it opens a group only."""
    found = process(PLAIN, "array", str(item_of(weights["bfloat16"])))
    assert found.startswith("refused ")
    assert "bfloat16" in found


# B45: every dtype of the installed torch.


def other(tensor: torch.Tensor) -> torch.Tensor:
    """A tensor of the same dtype and shape, of which no byte is the same."""
    raw = torch.frombuffer(bytearray(bits(tensor) or b"?"), dtype=torch.uint8)
    return (
        ((1 if tensor.dtype is torch.bool else 255) - raw)[: tensor.nbytes]
        .view(tensor.dtype)
        .reshape(tensor.shape)
    )


@pytest.mark.parametrize("dtype", STORED, ids=str)
def test_b45_every_stored_dtype_comes_back_bit_for_bit(tmp_path: Path, dtype: torch.dtype) -> None:
    saved = {key: pattern(dtype, shape) for key, shape in shapes(dtype).items()}
    if dtype.itemsize == 1 and dtype is not torch.bool:
        assert set(bits(saved["bytes"])) == set(range(256))
    ucpstore.save(tmp_path, {"m": saved, "module": filled(saved), **saved}, step=1)
    inner = {key: other(value) for key, value in saved.items()}
    top = {key: other(value) for key, value in saved.items()}
    module = filled({key: other(value) for key, value in saved.items()})
    opened = ucpstore.CheckpointStore(tmp_path).open()
    ucpstore.load(tmp_path, {"m": inner, "module": module, **top})
    for key, value in saved.items():
        assert same(inner[key], value), key
        assert same(top[key], value), key
        assert same(module.get_buffer(key), value), key
        assert same(opened["module"][key].read(), value), key


def made(dtype: torch.dtype, shape: Sequence[int]) -> torch.Tensor:
    """A tensor of a type that most operations of torch do not know."""
    with warnings.catch_warnings():
        # torch says that complex32 is experimental and that quantized types will go.
        warnings.simplefilter("ignore")
        return torch.empty(shape, dtype=dtype)


@pytest.mark.parametrize("dtype", REFUSED, ids=str)
def test_b45_every_other_dtype_is_refused_at_save(tmp_path: Path, dtype: torch.dtype) -> None:
    url = tmp_path / "s"
    for shape in ((), (0,), (6, 4)):
        value = made(dtype, shape)
        refuse_save(url, {"m": {"good": torch.ones(2), "bad": value}}, "m.bad", f"{dtype} ")
        refuse_save(url, {"top": value}, "top", f"{dtype} ")
        refuse_save(url, {"module": filled({"b": value})}, "module.b", f"{dtype} ")
        refuse_save(url, {"r": ucpstore.PerRank([value])}, "r", f"{dtype} ")
    assert written(url) == []


def halves(dtype: torch.dtype) -> tuple[torch.Tensor, torch.Tensor]:
    """The two parts that `Shard(0)` makes of five rows."""
    whole = pattern(dtype, (5, 3))
    return whole[:3].clone(), whole[3:].clone()


def dtensor_of(local: torch.Tensor) -> DTensor:
    return DTensor.from_local(
        local, line(), [Shard(0)], run_check=False, shape=(5, 3), stride=(3, 1)
    )


def save_and_load_dtensors(url: str) -> list[str]:
    """What differs after a round trip of a DTensor of every stored dtype."""
    rank = dist.get_rank()
    saved = {str(dtype): dtensor_of(halves(dtype)[rank]) for dtype in STORED}
    ucpstore.save(url, {"m": saved}, step=1)
    target = {str(dtype): dtensor_of(other(halves(dtype)[rank])) for dtype in STORED}
    ucpstore.load(url, {"m": target})
    return [
        name for name, value in target.items() if not same(value.to_local(), saved[name].to_local())
    ]


def test_b45_dtensors_of_every_stored_dtype(ranks: Ranks, tmp_path: Path) -> None:
    assert ranks.run(2, save_and_load_dtensors, str(tmp_path)) == [[], []]
    target = {str(dtype): other(pattern(dtype, (5, 3))) for dtype in STORED}
    ucpstore.load(tmp_path, {"m": target})
    wrong = [d for d in STORED if not same(target[str(d)], pattern(d, (5, 3)))]
    assert wrong == []


def refuse_dtensors(url: str) -> dict[str, str]:
    """How a DTensor of each refused dtype is refused; of those that torch can make."""
    found = {}
    for dtype in REFUSED:
        try:
            value = dtensor_of(made(dtype, (3 - dist.get_rank(), 3)))
        except (RuntimeError, NotImplementedError):
            continue
        found[str(dtype)] = attempt(lambda v=value: ucpstore.save(url, {"m": {"w": v}}, step=1))
    return found


def test_b45_dtensors_of_every_other_dtype_are_refused(ranks: Ranks, tmp_path: Path) -> None:
    first, second = ranks.run(2, refuse_dtensors, str(tmp_path / "s"))
    assert first.keys() == second.keys()
    assert {"torch.complex32", "torch.float4_e2m1fn_x2"} <= first.keys()
    for found in (first, second):
        for name, text in found.items():
            assert f"m.w: dtype {name} " in text
    assert written(tmp_path / "s") == []


ML_DTYPES = sorted(
    name
    for name, kind in vars(ml_dtypes).items()
    if isinstance(kind, type) and issubclass(kind, np.generic)
)


@pytest.mark.parametrize("name", ML_DTYPES)
def test_b45_arrays_of_ml_dtypes(tmp_path: Path, name: str) -> None:
    kind = np.dtype(getattr(ml_dtypes, name))
    saved = np.arange(256 * kind.itemsize, dtype=np.uint8).view(kind)
    if name in dtypes.NAMES:
        ucpstore.save(tmp_path, {"m": {"a": saved}}, step=1)
        target = np.zeros_like(saved)
        ucpstore.load(tmp_path, {"m": {"a": target}})
        assert (target.dtype, target.tobytes()) == (kind, saved.tobytes())
    else:
        refuse_save(tmp_path / "s", {"m": {"a": saved}}, "m.a", f"dtype {name} ")
    for value in (kind.type(1), ucpstore.PerRank(saved)):  # there bits have no name to go by
        refuse_save(tmp_path / "s", {"m": {"v": value}}, "m.v", f"numpy type {name} ")
    assert written(tmp_path / "s") == []


# B47: tensor subclasses that keep their values in their own way.


class LowBit(torch.Tensor):
    """As in torchao: codes and a scale that act as a tensor of another dtype."""

    @staticmethod
    def __new__(cls, codes: torch.Tensor, scale: float) -> LowBit:
        return torch.Tensor._make_wrapper_subclass(cls, codes.shape, dtype=torch.float32)

    def __init__(self, codes: torch.Tensor, scale: float) -> None:
        self.codes, self.scale = codes, scale

    def __repr__(self, **_: object) -> str:
        return f"LowBit({self.codes}, {self.scale})"

    @classmethod
    def __torch_dispatch__(
        cls, function: Any, types: Any, args: Any = (), kwargs: Any = None
    ) -> Any:
        given = args[0]
        if function in (torch.ops.aten.detach.default, torch.ops.aten.view.default):
            return LowBit(function(given.codes, *args[1:]), given.scale)
        raise NotImplementedError(f"{function}")


def stepped(parameter: torch.Tensor) -> torch.optim.Optimizer:
    optimizer = torch.optim.AdamW([parameter], lr=0.1)
    parameter.grad = torch.ones_like(parameter)
    optimizer.step()
    return optimizer


def low_bit_state(wrap: str, bad_rank: int | None = None) -> dict[str, object]:
    """A model and an optimizer whose first moment is a LowBit, plain or in a DTensor."""
    model = nn.Linear(4, 4, bias=False)
    optimizer = stepped(model.weight)
    if bad_rank in (None, dist.get_rank() if dist.is_initialized() else 0):
        value: torch.Tensor = LowBit(torch.ones(4, 4, dtype=torch.uint8), 0.5)
        if wrap == "dtensor":
            value = DTensor.from_local(value, line(), [Shard(0)], run_check=False)
        if wrap == "parameter":
            value = nn.Parameter(value, requires_grad=False)
        optimizer.state[model.weight]["exp_avg"] = value
    return {"model": model, "optim": optimizer}


@pytest.mark.parametrize("wrap", ["plain", "parameter"])
def test_b47_an_unsupported_subclass_is_refused_at_the_first_save(
    tmp_path: Path, wrap: str
) -> None:
    url = tmp_path / "s"
    refuse_save(url, low_bit_state(wrap), "optim.exp_avg.weight", "LowBit", "has no stored form")
    refuse_save(url, {"m": [low_bit_state(wrap)["optim"].state_dict()]}, "m.0.state.0.exp_avg")
    refuse_save(url, {"r": ucpstore.PerRank({"w": LowBit(torch.ones(2), 1.0)})}, "r.w", "LowBit")
    assert written(url) == []


def refuse_low_bits(url: str, wrap: str, bad_rank: int | None) -> str:
    return attempt(lambda: ucpstore.save(url, low_bit_state(wrap, bad_rank), step=1))


@pytest.mark.parametrize(("wrap", "bad_rank"), [("dtensor", None), ("plain", 1)])
def test_b47_in_a_dtensor_and_on_one_rank(
    ranks: Ranks, tmp_path: Path, wrap: str, bad_rank: int | None
) -> None:
    found = ranks.run(2, refuse_low_bits, str(tmp_path / "s"), wrap, bad_rank)
    for text in found:
        assert text.startswith("UnsupportedError: ")
        assert "optim.exp_avg.weight: a tensor of type " in text
        assert f"rank {bad_rank or 0}" in text
        assert "LowBit keeps its values in its own way" in text
    assert written(tmp_path / "s") == []


def test_b47_an_unsupported_subclass_is_no_target(tmp_path: Path) -> None:
    model = nn.Linear(4, 4, bias=False)
    ucpstore.save(tmp_path, {"model": model, "optim": stepped(model.weight)}, step=1)
    codes = torch.ones(4, 4, dtype=torch.uint8)
    with pytest.raises(
        ucpstore.UnsupportedError, match=r"^model\.weight: a tensor of type .*LowBit"
    ):
        ucpstore.load(tmp_path, {"model": {"weight": LowBit(codes, 0.5)}})
    assert codes.eq(1).all()


# B50: more than 2 GiB.

GIB = 1024**3
OVER_INT32 = 2**31 + 17


def counted(count: int, dtype: torch.dtype) -> torch.Tensor:
    """Elements that are their index modulo 251."""
    return torch.arange(251).to(dtype).repeat(-(-count // 251))[:count]


def round_trip(url: Path, saved: torch.Tensor, **sizes: int) -> list[int]:
    """The bytes of each stored object. Nothing is left on the disk: pytest would keep it."""
    try:
        ucpstore.save(url, {"m": {"w": saved}}, step=1, options=ucpstore.Options(**sizes))
        target = torch.full_like(saved, 255)
        ucpstore.load(url, {"m": {"w": target}})
        kind = {1: torch.uint8, 4: torch.int32}[saved.itemsize]
        assert torch.equal(target.view(kind), saved.view(kind))
        return [path.stat().st_size for path in url.glob("steps/*/m/w/c.*")]
    finally:
        shutil.rmtree(url)


def test_b50_more_than_2_gib_of_bytes(tmp_path: Path) -> None:
    """Takes 5 s and 5 GiB of memory."""
    stored = round_trip(tmp_path, counted(OVER_INT32, torch.uint8))
    assert max(stored) < 17 * 1024**2
    assert sum(stored) > OVER_INT32


@pytest.mark.slow
def test_b50_4_5_gib_of_floats(tmp_path: Path) -> None:
    assert sum(round_trip(tmp_path, counted(9 * GIB // 8, torch.float32))) > 9 * GIB // 2


@pytest.mark.slow
@pytest.mark.parametrize("dtype", [torch.uint8, torch.float32], ids=str)
def test_b50_one_chunk_of_more_than_2_gib(tmp_path: Path, dtype: torch.dtype) -> None:
    saved = counted(OVER_INT32 // dtype.itemsize + 5, dtype)
    sizes = dict.fromkeys(("chunk_bytes", "target_bytes", "least_bytes"), 8 * GIB)
    # one chunk and its checksum, the index of one entry and its checksum
    assert round_trip(tmp_path, saved, **sizes) == [saved.nbytes + 4 + 16 + 4]

"""`cast` of a save: arrays stored in another dtype, bit for bit as torch converts."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest
import torch
import torch.distributed as dist
from cases.tools import attempt, bits, line, refuse_load, refuse_save, same, sharded
from ranks.harness import Ranks
from torch import nn
from torch.distributed.tensor import Replicate, Shard

import ucpstore
from ucpstore import MismatchError
from ucpstore.manage.open import Item
from ucpstore.options import Options

BF16, F32 = torch.bfloat16, torch.float32


def random(*shape: int, dtype: torch.dtype = F32) -> torch.Tensor:
    """Any bit pattern but NaN, of which conversions keep no more than that they are some."""
    raw = np.random.default_rng(sum(shape)).integers(0, 256, (*shape, dtype.itemsize), np.uint8)
    found = torch.from_numpy(raw).view(dtype).squeeze(-1)
    return found.nan_to_num(1.0) if dtype.is_floating_point else found


def stored(url: object, item: str = "m") -> dict[str, torch.Tensor]:
    """Everything of an item of the newest step, read without any target."""
    found = ucpstore.CheckpointStore(str(url)).open()[item]
    assert isinstance(found, Item)
    return found.read()


# ---- on ranks ------------------------------------------------------------------------------------


SHAPES = {"even": (600, 1024), "uneven": (513, 515), "columns": (64, 48), "whole": (7, 5)}


def save_ranks(url: str, codecs: dict[str, object]) -> list[str]:
    """Save DTensors split by rows and columns, and a replicated one; what the save changed."""
    mesh = line()
    places = {"columns": Shard(1), "whole": Replicate()}
    state = {n: sharded(random(*s), mesh, places.get(n, Shard(0))) for n, s in SHAPES.items()}
    state["kept"] = sharded(random(10, 6), mesh)
    before = {name: bits(tensor.to_local()) for name, tensor in state.items()}
    versions = {name: tensor.to_local()._version for name, tensor in state.items()}
    ucpstore.save(
        url,
        {"m": state},
        step=1,
        cast=[("m.kept", F32), ("m.*", BF16)],
        options=Options(codecs=codecs),
    )
    return [
        name
        for name, tensor in state.items()
        if bits(tensor.to_local()) != before[name]
        or tensor.dtype != F32
        or tensor.to_local()._version != versions[name]
    ]


def load_ranks(url: str) -> list[str]:
    """Load back as float32 in another arrangement: refused, then with `cast`; what differs."""
    mesh = line()
    target = {n: sharded(torch.zeros(*s), mesh, Shard(0)) for n, s in SHAPES.items()}
    target["kept"] = sharded(torch.zeros(10, 6), mesh)
    text = attempt(lambda: ucpstore.load(url, {"m": target}))
    assert "m.even: stored as bfloat16, the target is float32" in text
    ucpstore.load(url, {"m": target}, cast="m.*")
    expected = {n: random(*s).to(BF16).to(F32) for n, s in SHAPES.items()} | {"kept": random(10, 6)}
    return [n for n, t in target.items() if not same(t.full_tensor(), expected[n])]


@pytest.mark.parametrize("codecs", [{}, {"m.*": "blosc"}], ids=["packed", "compressed"])
@pytest.mark.parametrize("count", [2, 3])
def test_dtensors_are_stored_as_torch_converts_them(
    ranks: Ranks, tmp_path: Path, count: int, codecs: dict[str, object]
) -> None:
    url = str(tmp_path / "s")
    assert ranks.run(count, save_ranks, url, codecs) == [[]] * count
    found = stored(url)
    assert same(found.pop("kept"), random(10, 6))
    assert found.keys() == SHAPES.keys()
    for name, tensor in found.items():
        assert same(tensor, random(*SHAPES[name]).to(BF16)), name
    (document,) = Path(url).glob("steps/*/m/even/zarr.json")
    assert json.loads(document.read_bytes())["data_type"] == "bfloat16"
    assert ('"typesize":2' in document.read_text()) is bool(codecs)  # as stored, not as it was
    assert ranks.run(2, load_ranks, url) == [[], []]


def save_unlike(url: str, kind: str) -> str:
    """One save in which the ranks do not agree."""
    tensor = torch.full((4,), 1.0)
    cast = {"m.w": BF16}
    if kind == "values that are equal in bfloat16":
        tensor += 1e-4 * dist.get_rank()
        assert bits(tensor.to(BF16)) == bits(torch.ones(4, dtype=BF16))
    elif kind == "cast on one rank":
        cast = cast if dist.get_rank() else {}
    text = attempt(lambda: ucpstore.save(url, {"m": {"w": tensor}}, step=1, cast=cast))
    dist.barrier()
    return text


@pytest.mark.parametrize(
    ("kind", "words"),
    [
        ("values that are equal in bfloat16", ["m/w: ranks 0 and 1 hold different values"]),
        ("cast on one rank", ["m/w", "float32", "bfloat16"]),
    ],
)
def test_ranks_that_do_not_agree_are_refused(
    ranks: Ranks, tmp_path: Path, kind: str, words: list[str]
) -> None:
    """Replicas are compared as they are, not as they are stored: they ought to be one tensor."""
    for text in ranks.run(2, save_unlike, str(tmp_path / "s"), kind):
        assert [word for word in words if word not in text] == [], text
    assert not list(tmp_path.glob("s/steps/*-*"))


# ---- plain tensors -------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("source", "wanted"),
    [
        (F32, BF16),
        (F32, torch.float16),
        (F32, torch.float8_e4m3fn),
        (F32, torch.float64),
        (torch.float64, F32),
        (BF16, F32),
        (torch.int64, torch.int32),
        (torch.uint8, torch.int64),
        (torch.complex128, torch.complex64),
    ],
    ids=str,
)
def test_plain_tensors_of_every_kind(
    tmp_path: Path, source: torch.dtype, wanted: torch.dtype
) -> None:
    large, small = random(700, 800, dtype=source), random(5, 3, dtype=source)
    state = {"m": {"large": large, "view": large.t()[3:90:2, ::3], "small": small}}
    ucpstore.save(tmp_path, state, step=1, cast={"m.*": wanted})
    expected = {name: tensor.to(wanted) for name, tensor in state["m"].items()}
    found = stored(tmp_path)
    assert found.keys() == expected.keys()
    for name, tensor in found.items():
        assert same(tensor, expected[name]), name
    back = {name: torch.zeros_like(tensor) for name, tensor in state["m"].items()}
    refuse_load(tmp_path, {"m": back}, "m.small", str(source)[6:], str(wanted)[6:])
    ucpstore.load(tmp_path, {"m": back}, cast="m.*")
    for name, tensor in back.items():
        assert same(tensor, expected[name].to(source)), name


def test_modules_numpy_arrays_and_what_lies_in_the_tree(tmp_path: Path) -> None:
    module = nn.Linear(3, 2)
    module.register_buffer("scale", torch.tensor(1 / 3))
    array = np.full((2, 2), 1 / 3, np.float32)
    state = {"m": module, "n": {"a": array, "step": torch.tensor(1001.0), "x": 1 / 3}, "top": array}
    ucpstore.save(tmp_path, state, step=1, cast={"*": BF16})
    third = torch.tensor(1 / 3).to(BF16)
    found = stored(tmp_path)
    assert same(found["weight"], module.weight.detach().to(BF16))
    assert same(found["scale"], third)
    assert same(stored(tmp_path, "n")["a"], third.expand(2, 2))
    step = ucpstore.CheckpointStore(tmp_path).open(1)
    assert same(step.value("n")["step"], torch.tensor(1001.0))  # type: ignore[index, call-overload, arg-type]
    assert same(step["top"].read(), third.expand(2, 2))  # type: ignore[union-attr, arg-type]
    assert array.dtype == np.float32


def test_another_kind_is_refused_and_the_first_pattern_counts(tmp_path: Path) -> None:
    ids, mask = torch.tensor([257]), torch.tensor([True])
    weights = {"w": torch.ones(2), "c": torch.ones(2, dtype=torch.complex64)}
    refuse_save(
        tmp_path,
        {"m": weights},
        "m.w: cast['m.w'] asks for int8",
        "float32",
        cast={"m.w": torch.int8},
    )
    refuse_save(tmp_path, {"m": weights}, "m.c: cast['m.*']", "complex64", cast={"m.*": F32})
    state = {"m": {"w": torch.ones(2), "ids": ids, "mask": mask}}
    # A load could not make an int of it again.
    advice = "put 'm.ids': torch.int64 before this pattern"
    refuse_save(tmp_path, state, "m.ids: cast['m.*'] asks for bfloat16", advice, cast={"m.*": BF16})
    assert list(tmp_path.iterdir()) == []
    cast = {"m.ids": torch.int64, "m.m*": torch.bool, "m.*": BF16, "m.w": torch.float64}
    ucpstore.save(tmp_path, state, step=1, cast=cast)
    found = stored(tmp_path)
    assert same(found["ids"], ids)
    assert same(found["mask"], mask)
    assert same(found["w"], torch.ones(2, dtype=BF16))


@pytest.mark.parametrize(
    ("cast", "words"),
    [
        ("m.*", ["cast must be a dict from name patterns to dtypes"]),
        (BF16, ["cast must be a dict"]),
        ({3: BF16}, ["cast must be a dict", "3 is no name pattern"]),
        ([("m.*",)], ["cast must be a dict"]),
        ({"m.*": "bf16"}, ["cast", "bf16"]),
        ({"m.*": torch.complex32}, ["cast", "complex32"]),
        ({"m.*": torch.quint8}, ["cast", "quint8"]),
    ],
    ids=str,
)
def test_wrong_arguments_are_named(tmp_path: Path, cast: object, words: list[str]) -> None:
    refuse_save(tmp_path, {"m": {"w": torch.ones(2)}}, *words, cast=cast)
    assert list(tmp_path.iterdir()) == []


class Tied(nn.Module):
    """An embedding whose weight is the head's too."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(5, 4)
        self.head = nn.Linear(4, 5, bias=False)
        self.head.weight = self.embed.weight


def test_tied_parameters_stay_tied(tmp_path: Path) -> None:
    model = Tied()
    ucpstore.save(tmp_path, {"m": model}, step=1, cast={"m.*": BF16})
    (folder,) = tmp_path.glob("steps/*/m")
    assert [path.parent.name for path in folder.glob("*/zarr.json")] == ["embed.weight"]
    other = Tied()
    ucpstore.load(tmp_path, {"m": other}, cast="m.*")
    assert other.head.weight is other.embed.weight
    assert same(other.head.weight, model.embed.weight.detach().to(BF16).to(F32))
    # One array, which goes by its first name.
    ucpstore.save(tmp_path, {"m": model}, step=2, cast={"m.head.weight": BF16})
    assert {str(tensor.dtype) for tensor in stored(tmp_path).values()} == {"torch.float32"}


# ---- optimizers ----------------------------------------------------------------------------------


def trained(steps: int) -> tuple[nn.Module, torch.optim.AdamW]:
    torch.manual_seed(steps)
    model = nn.Sequential(nn.Linear(6, 5), nn.Linear(5, 2))
    optimizer = torch.optim.AdamW(model.parameters())
    for _ in range(steps):
        model(torch.randn(3, 6)).square().sum().backward()
        optimizer.step()
    return model, optimizer


@pytest.fixture
def moments(tmp_path: Path) -> tuple[Path, nn.Module, torch.optim.AdamW]:
    """A checkpoint after 1001 steps, a number that bfloat16 does not have, with all states cast."""
    model, optimizer = trained(2)
    for state in optimizer.state.values():
        state["step"].fill_(1001)
    cast = {"optim.exp_avg_sq.1.*": torch.float64, "optim.*": BF16}
    ucpstore.save(tmp_path, {"model": model, "optim": optimizer}, step=1, cast=cast)
    return tmp_path, model, optimizer


def test_moments_are_cast_and_steps_are_not(
    moments: tuple[Path, nn.Module, torch.optim.AdamW],
) -> None:
    folder, model, optimizer = moments
    found = stored(folder, "optim")
    assert len(found) == 8
    for name, parameter in model.named_parameters():
        state = optimizer.state[parameter]
        wanted = torch.float64 if name.startswith("1.") else BF16
        assert same(found[f"exp_avg/{name}"], state["exp_avg"].to(BF16))
        assert same(found[f"exp_avg_sq/{name}"], state["exp_avg_sq"].to(wanted))
        assert state["exp_avg"].dtype == F32
    assert {tensor.dtype for tensor in stored(folder, "model").values()} == {F32}


def test_moments_come_back_with_cast_only(
    moments: tuple[Path, nn.Module, torch.optim.AdamW],
) -> None:
    folder, model, optimizer = moments
    other, again = trained(1)
    target = {"model": other, "optim": again}
    refuse_load(
        folder, target, "optim.exp_avg.0.weight", "stored as bfloat16, the target is float32"
    )
    with pytest.raises(MismatchError, match=r"optim.exp_avg_sq.1.bias: stored as float64"):
        ucpstore.load(folder, target, cast="optim.exp_avg.*")
    ucpstore.load(folder, target, cast="optim.*")
    for mine, theirs in zip(other.parameters(), model.parameters(), strict=True):
        state, expected = again.state[mine], optimizer.state[theirs]
        assert same(state["exp_avg"], expected["exp_avg"].to(BF16).to(F32))
        assert same(state["step"], torch.tensor(1001.0))


@pytest.mark.parametrize("cast", [None, "optim.*"])
def test_an_optimizer_without_states_gets_usable_ones_with_cast(
    moments: tuple[Path, nn.Module, torch.optim.AdamW], cast: str | None
) -> None:
    folder, model, optimizer = moments
    other, again = trained(0)
    target = {"model": other, "optim": again}
    if cast is None:
        with pytest.warns(UserWarning, match=r"bfloat16, as stored, narrower"):
            ucpstore.load(folder, target)
    else:
        ucpstore.load(folder, target, cast=cast)
    for (name, mine), theirs in zip(other.named_parameters(), model.parameters(), strict=True):
        state, expected = again.state[mine], optimizer.state[theirs]
        low = expected["exp_avg"].to(BF16)
        assert same(state["exp_avg"], low if cast is None else low.to(F32))
        wide = torch.float64 if name.startswith("1.") else BF16 if cast is None else F32
        assert state["exp_avg_sq"].dtype == wide  # never narrowed
        assert same(state["step"], torch.tensor(1001.0))
    other(torch.ones(1, 6)).sum().backward()
    if cast is None:
        with pytest.raises(RuntimeError, match="BFloat16"):
            again.step()
    else:
        again.step()

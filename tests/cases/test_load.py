"""Field cases of loading: B11 to B19: strictness, shapes, dtypes, processes, devices, values."""

from __future__ import annotations

import os
import subprocess
import sys
from collections import OrderedDict
from pathlib import Path

import numpy as np
import pytest
import torch
import torch.distributed as dist
from cases.tools import attempt, bits, line, refuse_load, refuse_save, same, sharded, tensors
from cases.tools import whole as gathered
from ranks.harness import Ranks
from torch import nn
from torch.distributed.fsdp import fully_shard

import ucpstore

ABC = {"a": torch.tensor([1.0]), "b": torch.tensor([2.0]), "c": torch.tensor([3.0])}


def zeros(*names: str, value: float = 0.0) -> dict[str, torch.Tensor]:
    return {name: torch.full((1,), value) for name in names}


# B11: names.


def test_b11_strict_lists_all_names_at_once(tmp_path: Path) -> None:
    ucpstore.save(tmp_path, {"m": {**ABC, "e": torch.ones(1)}}, step=1)
    refuse_load(tmp_path, {"m": zeros("a", "b")}, "m.c", "m.e", "not in the target")
    refuse_load(tmp_path, {"m": zeros("a", "b", "c", "e", "d", "f")}, "m.d", "m.f")
    refuse_load(tmp_path, {"m": zeros("a", "d"), "n": zeros("x")}, "m.b", "m.c", "m.d", "m.e", "n")


def test_b11_without_strict_what_matches_is_loaded_and_the_rest_reported(tmp_path: Path) -> None:
    ucpstore.save(tmp_path, {"m": ABC}, step=1)
    target = zeros("a", "b", "d", value=-7.0)
    report = ucpstore.load(tmp_path, {"m": target}, strict=False)
    assert (report.missing, report.unexpected) == (("m.d",), ("m.c",))
    assert {name: value.item() for name, value in target.items()} == {"a": 1, "b": 2, "d": -7}
    assert bits(target["d"]) == bits(torch.tensor([-7.0]))


def test_b11_an_item_that_was_not_asked_for_is_not_unexpected(tmp_path: Path) -> None:
    ucpstore.save(tmp_path, {"m": ABC, "optim": {"x": torch.ones(2)}, "note": "text"}, step=1)
    target = zeros("a", "b", "c")
    report = ucpstore.load(tmp_path, {"m": target})
    assert (report.items, report.unexpected) == (("m",), ())
    assert sorted(report.skipped) == ["note", "optim"]
    assert all(same(target[name], value) for name, value in ABC.items())


def test_b11_names_of_modules_and_nested_values(tmp_path: Path) -> None:
    saved = {"model": nn.Linear(2, 2), "run": {"args": {"lr": 0.1, "tags": ["x"]}}}
    ucpstore.save(tmp_path, saved, step=1)
    target = {"model": nn.Linear(2, 2, bias=False), "run": {"args": {"lr": 0.0, "seed": 5}}}
    text = refuse_load(tmp_path, target, "model.bias", "run.args.tags", "run.args.seed")
    assert "3 differences" in text
    report = ucpstore.load(tmp_path, target, strict=False)
    assert report.missing == ("run.args.seed",)
    assert report.unexpected == ("model.bias", "run.args.tags")
    assert target["run"] == {"args": {"lr": 0.1, "seed": 5}}
    assert same(target["model"].weight, saved["model"].weight)


def one_rank_asks_for_more(url: str) -> tuple[str, str, list[float]]:
    """Both ranks hold `a`; rank 1 alone also asks for `d`, which nobody saved."""
    target = zeros("a", "b", "c") if dist.get_rank() == 0 else zeros("a", "b", "c", "d")
    strict = attempt(lambda: ucpstore.load(url, {"m": target}))
    untouched = [value.item() for value in target.values()]
    one_leaves_out = zeros("a", "b") if dist.get_rank() == 0 else zeros("b", "c")
    split = attempt(lambda: ucpstore.load(url, {"m": one_leaves_out}))
    return strict, split, untouched


def test_b11_ranks_refuse_together_and_may_share_out_the_names(
    ranks: Ranks, tmp_path: Path
) -> None:
    url = str(tmp_path / "s")
    ucpstore.save(url, {"m": ABC}, step=1)
    for strict, split, untouched in ranks.run(2, one_rank_asks_for_more, url):
        assert strict.startswith("MismatchError")
        assert "m.d" in strict
        assert "rank 1" in strict
        assert set(untouched) == {0.0}
        assert split == ""  # a and b on rank 0, b and c on rank 1: a place for every name


# B12: shapes.

SHAPES = [(4, 4), (16, 4), (4, 8), (32,), (8, 4, 1), (1, 4), (), (0, 4), (4, 0)]


@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("strict", [True, False])
def test_b12_another_shape_is_refused_with_both(
    tmp_path: Path, shape: tuple[int, ...], strict: bool
) -> None:
    saved = {"first": torch.ones(3), "w": torch.randn(8, 4), "z": torch.ones(2, 2)}
    ucpstore.save(tmp_path, {"m": saved}, step=1)
    target = {"first": torch.zeros(3), "w": torch.zeros(shape), "z": torch.zeros(2, 2)}
    text = refuse_load(tmp_path, {"m": target}, "m.w", "(8, 4)", str(shape), strict=strict)
    assert "first" not in text


def test_b12_all_wrong_shapes_are_listed_at_once(tmp_path: Path) -> None:
    model = nn.Sequential(nn.Linear(4, 8), nn.Linear(8, 3))
    ucpstore.save(tmp_path, {"model": model, "array": np.zeros((2, 2))}, step=1)
    other = nn.Sequential(nn.Linear(4, 9), nn.Linear(9, 3))
    target = {"model": other, "array": np.zeros(4)}
    refuse_load(tmp_path, target, "model.0.weight", "model.0.bias", "model.1.weight", "array")


def wrong_global_shape(url: str, rows: int) -> tuple[str, bool]:
    mesh = line()
    target = {"a": sharded(torch.zeros(8, 4), mesh), "w": sharded(torch.zeros(rows, 4), mesh)}
    text = attempt(lambda: ucpstore.load(url, {"m": target}))
    return text, any(bool(gathered(each).any()) for each in target.values())


def test_b12_the_global_shape_of_a_dtensor_counts_on_all_ranks(
    ranks: Ranks, tmp_path: Path
) -> None:
    url = str(tmp_path / "s")
    ucpstore.save(url, {"m": {"a": torch.ones(8, 4), "w": torch.ones(8, 4)}}, step=1)
    for text, changed in ranks.run(2, wrong_global_shape, url, 4):
        assert "m.w" in text
        assert "(8, 4)" in text
        assert "(4, 4)" in text
        assert not changed


# B13: dtypes.


@pytest.mark.parametrize(
    "dtype", [torch.bfloat16, torch.float16, torch.float64, torch.int64, torch.bool]
)
def test_b13_another_dtype_is_refused_with_both(tmp_path: Path, dtype: torch.dtype) -> None:
    ucpstore.save(tmp_path, {"m": {"w": torch.full((3,), 1 / 3)}}, step=1)
    target = {"m": {"w": torch.zeros(3, dtype=dtype)}}
    refuse_load(tmp_path, target, "m.w", "float32", str(dtype).removeprefix("torch."))
    refuse_load(tmp_path, target, "m.w", "float32", strict=False)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float64])
def test_b13_cast_converts_as_torch_does(tmp_path: Path, dtype: torch.dtype) -> None:
    values = torch.cat([torch.full((3,), 1 / 3), torch.tensor([-0.0, 65519.0, 1e-8, torch.inf])])
    zero_dim = torch.tensor(1 / 3)
    ucpstore.save(tmp_path, {"m": {"w": values, "s": zero_dim, "u": values}}, step=1)
    for cast in ("m.*", ["m.w", "m.s"]):
        target = {
            "w": torch.zeros(7, dtype=dtype),
            "s": torch.zeros((), dtype=dtype),
            "u": torch.zeros(7, dtype=dtype if cast == "m.*" else torch.float32),
        }
        ucpstore.load(tmp_path, {"m": target}, cast=cast)
        assert same(target["w"], values.to(dtype))
        assert same(target["s"], zero_dim.to(dtype))
        assert same(target["u"], values.to(target["u"].dtype))
    refuse_load(tmp_path, {"m": target}, "m.w", cast="m.s")


@pytest.mark.parametrize("dtype", [torch.int64, torch.uint8, torch.bool])
def test_b13_float_is_never_made_an_integer(tmp_path: Path, dtype: torch.dtype) -> None:
    ucpstore.save(tmp_path, {"m": {"w": torch.full((3,), 1 / 3), "s": torch.tensor(2.0)}}, step=1)
    target = {"w": torch.zeros(3, dtype=dtype), "s": torch.zeros((), dtype=dtype)}
    refuse_load(tmp_path, {"m": target}, "m.w", "m.s", "never", cast="*")


def cast_into_shards(url: str) -> torch.Tensor:
    target = sharded(torch.zeros(5, 3, dtype=torch.bfloat16), line())
    ucpstore.load(url, {"m": {"w": target}}, cast="*")
    return gathered(target)


def test_b13_cast_into_shards(ranks: Ranks, tmp_path: Path) -> None:
    values = torch.randn(5, 3)
    ucpstore.save(tmp_path / "s", {"m": {"w": values}}, step=1)
    for full in ranks.run(2, cast_into_shards, str(tmp_path / "s")):
        assert same(full, values.bfloat16())


def test_b13_float32_moments_of_bfloat16_weights_stay_float32(tmp_path: Path) -> None:
    def run(seed: int) -> tuple[nn.Module, torch.optim.Optimizer]:
        torch.manual_seed(seed)
        model = nn.Linear(3, 2).bfloat16()
        return model, torch.optim.AdamW(model.parameters())

    model, optimizer = run(1)
    for parameter in model.parameters():
        optimizer.state[parameter] = {
            "step": torch.tensor(2.0),
            "exp_avg": torch.full(parameter.shape, 1 / 3),
            "exp_avg_sq": torch.full(parameter.shape, 1 / 7),
        }
    ucpstore.save(tmp_path, {"model": model, "optim": optimizer}, step=1)
    other, again = run(2)
    ucpstore.load(tmp_path, {"model": other, "optim": again})
    for parameter, saved in zip(other.parameters(), model.parameters(), strict=True):
        for key, value in optimizer.state[saved].items():
            assert same(again.state[parameter][key], value), key


def test_b13_moments_of_another_dtype_are_refused_or_cast(tmp_path: Path) -> None:
    model, optimizer = adam("cpu", 2)
    ucpstore.save(tmp_path, {"model": model, "optim": optimizer}, step=1)
    other, again = adam("cpu", 1)
    for state in again.state.values():
        state["exp_avg"] = state["exp_avg"].bfloat16()
    target = {"model": other, "optim": again}
    refuse_load(tmp_path, target, "optim.exp_avg.weight", "optim.exp_avg.bias", "float32")
    ucpstore.load(tmp_path, target, cast="optim.exp_avg.*")
    for mine, theirs in zip(other.parameters(), model.parameters(), strict=True):
        expected = optimizer.state[theirs]
        assert same(again.state[mine]["exp_avg"], expected["exp_avg"].bfloat16())
        assert same(again.state[mine]["exp_avg_sq"], expected["exp_avg_sq"])
        assert same(again.state[mine]["step"], torch.tensor(2.0))


# B15: no fallback from a strict load.


def test_b15_a_strict_load_that_fails_is_not_tried_again(tmp_path: Path) -> None:
    torch.manual_seed(1)
    ucpstore.save(tmp_path, {"model": nn.Linear(3, 2, bias=False)}, step=1)
    model = nn.Linear(3, 2)
    refuse_load(tmp_path, {"model": model}, "model.bias", "not in the checkpoint")


# B16: a process on its own.

ALONE = """
import sys
import torch
import ucpstore

assert not torch.distributed.is_initialized()
url = sys.argv[1]
state = {"m": {"a": torch.zeros(6, 2), "b": torch.zeros(4)}}
print(ucpstore.load(url, state))
assert state["m"]["a"].tolist() == torch.arange(12.0).reshape(6, 2).tolist()
assert state["m"]["b"].tolist() == [0, 1, 2, 3]
ucpstore.save(url, state, step=2)
assert ucpstore.CheckpointStore(url).steps() == [1, 2]
assert not torch.distributed.is_initialized()
"""


def save_from_ranks(url: str) -> None:
    mesh = line()
    state = {
        "a": sharded(torch.arange(12.0).reshape(6, 2), mesh),
        "b": torch.arange(4.0),
    }
    ucpstore.save(url, {"m": state}, step=1)


def run_alone(program: str, url: str, **environment: str) -> str:
    kept = {name: value for name, value in os.environ.items() if name not in TORCHRUN}
    result = subprocess.run(
        [sys.executable, "-W", "error", "-c", program, url],
        env={**kept, **environment},
        capture_output=True,
        text=True,
        timeout=60,
        cwd=Path(__file__).parents[2],
        check=False,
    )
    assert result.returncode == 0, result.stderr
    return result.stdout


TORCHRUN = ("RANK", "LOCAL_RANK", "WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT")


@pytest.mark.parametrize("inside", [False, True], ids=["plain", "torchrun-environment"])
def test_b16_a_process_without_a_group_loads_and_saves(
    ranks: Ranks, tmp_path: Path, inside: bool
) -> None:
    url = str(tmp_path / "s")
    ranks.run(4, save_from_ranks, url)
    variables = {"WORLD_SIZE": "4", "RANK": "2", "LOCAL_RANK": "2"} if inside else {}
    assert "loaded step 1" in run_alone(ALONE, url, **variables)


def alone_in_a_group(url: str) -> list[float]:
    target = torch.zeros(4)
    if dist.get_rank() == 1:
        ucpstore.load(url, {"m": {"b": target}}, strict=False, collective=False)
    return target.tolist()


def test_b16_one_rank_of_a_group_loads_by_itself(ranks: Ranks, tmp_path: Path) -> None:
    url = str(tmp_path / "s")
    ranks.run(2, save_from_ranks, url)
    assert ranks.run(2, alone_in_a_group, url) == [[0, 0, 0, 0], [0, 1, 2, 3]]


# B17: the meta device.


def test_b17_a_target_on_the_meta_device_is_refused_by_name(tmp_path: Path) -> None:
    saved = nn.Sequential(nn.Linear(4, 8), nn.BatchNorm1d(8))
    ucpstore.save(tmp_path, {"model": saved, "note": 5}, step=1)
    with torch.device("meta"):
        model = nn.Sequential(nn.Linear(4, 8), nn.BatchNorm1d(8))
    names = [f"model.{name}" for name in saved.state_dict()]
    target = {"note": 0, "model": model}
    refuse_load(tmp_path, target, *names, "to_empty")
    assert target["note"] == 0
    model.to_empty(device="cpu")
    ucpstore.load(tmp_path, target)
    loaded = model.state_dict()
    assert [k for k, v in saved.state_dict().items() if not same(loaded[k], v)] == []


def sharded_on_meta(url: str) -> tuple[str, list[torch.Tensor]]:
    with torch.device("meta"):
        model = nn.Sequential(nn.Linear(4, 3), nn.Linear(3, 1))
    fully_shard(model, mesh=line())
    text = attempt(lambda: ucpstore.load(url, {"model": model}))
    model.to_empty(device="cpu")
    ucpstore.load(url, {"model": model})
    return text, [gathered(parameter) for parameter in model.parameters()]


def test_b17_a_sharded_model_on_the_meta_device(ranks: Ranks, tmp_path: Path) -> None:
    url = str(tmp_path / "s")
    saved = nn.Sequential(nn.Linear(4, 3), nn.Linear(3, 1))
    ucpstore.save(url, {"model": saved}, step=1)
    for text, loaded in ranks.run(2, sharded_on_meta, url):
        assert [name for name in saved.state_dict() if f"model.{name}" not in text] == []
        assert "to_empty" in text
        assert all(map(same, loaded, saved.parameters()))


def test_b17_one_meta_tensor_among_others_changes_nothing(tmp_path: Path) -> None:
    ucpstore.save(tmp_path, {"m": ABC}, step=1)
    target = {**zeros("a", "b"), "c": torch.empty(1, device="meta")}
    refuse_load(tmp_path, {"m": target}, "m.c", "meta")
    refuse_load(tmp_path, {"m": target}, "m.c", "meta", strict=False)


def test_b17_saving_from_the_meta_device_is_refused(tmp_path: Path) -> None:
    with torch.device("meta"):
        model = nn.Linear(2, 2)
    refuse_save(tmp_path, {"model": model}, "model.weight", "meta")
    refuse_save(tmp_path, {"model": {"inner": nn.LazyLinear(3)}}, "model.inner", "lazy")


# B18: where Adam's step lies.


def adam(device: str, steps: int, **options: bool) -> tuple[nn.Module, torch.optim.Optimizer]:
    torch.manual_seed(steps)
    model = nn.Linear(3, 2).to(device)
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.1, **options)
    train(model, optimizer, steps)
    return model, optimizer


def train(model: nn.Module, optimizer: torch.optim.Optimizer, steps: int) -> None:
    for _ in range(steps):
        device = next(model.parameters()).device
        model(torch.ones(2, 3, device=device)).square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()


KINDS = [{"fused": True}, {"fused": False}, {"foreach": True}, {"foreach": False}]


def step_moves(folder: Path, device: str, kinds: list[dict[str, bool]]) -> None:
    """Save with each kind after three steps, load into every kind, step once."""
    for number, saved_as in enumerate(kinds):
        url = folder / str(number)
        model, optimizer = adam(device, 3, **saved_as)
        ucpstore.save(url, {"model": model, "optim": optimizer}, step=3)
        for loaded_as in kinds:
            for trained in (0, 1):
                other, again = adam(device, trained, **loaded_as)
                ucpstore.load(url, {"model": other, "optim": again})
                for mine, theirs in zip(other.parameters(), model.parameters(), strict=True):
                    assert same(mine, theirs)
                    for key, value in optimizer.state[theirs].items():
                        assert same(again.state[mine][key], value), key
                assert again.param_groups[0]["fused"] == optimizer.param_groups[0]["fused"]
                train(other, again, 1)
                assert {state["step"].item() for state in again.state.values()} == {4.0}


def test_b18_step_survives_every_kind_of_adam_on_the_cpu(tmp_path: Path) -> None:
    step_moves(tmp_path, "cpu", KINDS)


@pytest.mark.gpu
def test_b18_step_lies_where_the_optimizer_wants_it(tmp_path: Path, accelerator: str) -> None:
    step_moves(tmp_path, accelerator, [*KINDS, {"capturable": True}])


NO_CUDA = """
import sys
import torch
import ucpstore

model = torch.nn.Linear(3, 2)
optimizer = torch.optim.AdamW(model.parameters(), lr=0.5)
target = {"model": model, "optim": optimizer, "where": None}
ucpstore.load(sys.argv[1], target)
assert target["where"] == torch.device("cuda", 3)
assert {state["step"].item() for state in optimizer.state.values()} == {3.0}
assert all(value.device.type == "cpu" for s in optimizer.state.values() for value in s.values())
assert not torch.cuda.is_initialized()
"""


def test_b18_a_checkpoint_that_names_cuda_loads_without_it(tmp_path: Path) -> None:
    model, optimizer = adam("cpu", 3, fused=True)
    state = {"model": model, "optim": optimizer, "where": torch.device("cuda", 3)}
    ucpstore.save(tmp_path, state, step=3)
    run_alone(NO_CUDA, str(tmp_path), CUDA_VISIBLE_DEVICES="")


@pytest.mark.gpu
def test_b18_a_checkpoint_of_a_gpu_loads_on_the_cpu(tmp_path: Path, accelerator: str) -> None:
    model, optimizer = adam(accelerator, 3, fused=True)
    where = torch.device("cuda", 3)
    ucpstore.save(tmp_path, {"model": model, "optim": optimizer, "where": where}, step=3)
    run_alone(NO_CUDA, str(tmp_path), CUDA_VISIBLE_DEVICES="")


# B19: Python values go into the very objects that were passed.


def test_b19_python_values_go_into_the_objects_passed(tmp_path: Path) -> None:
    def build(lr: float, betas: tuple[float, float], amsgrad: bool) -> torch.optim.Optimizer:
        return torch.optim.AdamW(model.parameters(), lr=lr, betas=betas, amsgrad=amsgrad)

    model = nn.Linear(2, 2)
    values = {"step": 17, "tag": "blue", "done": True, "ratio": 0.5, "none": None, "seq": [1, 2]}
    saved = {
        "model": model,
        "optim": build(0.123, (0.8, 0.95), True),
        "run": {**values, "inner": {"deep": (1, "x")}},
        "step": 17,
    }
    ucpstore.save(tmp_path, saved, step=17)
    optimizer = build(0.5, (0.9, 0.999), False)
    inner: dict[str, object] = {"deep": (0,)}
    sequence = [0]
    run = {"step": 0, "tag": "", "done": False, "ratio": 1.0, "none": 3, "seq": sequence}
    run["inner"] = inner
    target = {"model": model, "optim": optimizer, "run": run, "step": 0}
    group = optimizer.param_groups[0]
    ucpstore.load(tmp_path, target)
    assert target["run"] is run
    assert run["inner"] is inner
    assert run["seq"] is sequence
    assert run == saved["run"]
    assert [type(run[key]) for key in values] == [type(value) for value in values.values()]
    assert inner == {"deep": (1, "x")}
    assert target["step"] == 17
    assert optimizer.param_groups[0] is group
    assert (group["lr"], group["betas"], group["amsgrad"]) == (0.123, (0.8, 0.95), True)
    assert [type(group[key]) for key in ("lr", "betas", "amsgrad")] == [float, tuple, bool]


def test_b19_kinds_of_containers(tmp_path: Path) -> None:
    saved = {
        "ordered": OrderedDict([("b", 1), ("a", 2)]),
        "tuple": (1, [2, (3,)]),
        "mixed": [torch.ones(2), {"n": 5}, "text"],
        "nested": ({"w": torch.ones(3)}, 7),
        "int keys": {0: "zero", "0": "text zero"},
    }
    ucpstore.save(tmp_path, {"m": saved}, step=1)
    tensor, inner = torch.zeros(2), {"n": 0}
    weight = torch.zeros(3)
    mixed = [tensor, inner, ""]
    target = {
        "ordered": OrderedDict([("b", 0), ("a", 0)]),
        "tuple": (),
        "mixed": mixed,
        "nested": ({"w": weight}, 0),
        "int keys": {0: "", "0": ""},
    }
    ucpstore.load(tmp_path, {"m": target})
    assert list(target["ordered"].items()) == [("b", 1), ("a", 2)]
    assert target["tuple"] == (1, [2, (3,)])
    assert target["mixed"] is mixed
    assert mixed[0] is tensor
    assert mixed[1] is inner
    assert (tensor.tolist(), inner, mixed[2]) == ([1, 1], {"n": 5}, "text")
    assert target["nested"][0]["w"] is weight
    assert (weight.tolist(), target["nested"][1]) == ([1, 1, 1], 7)
    assert target["int keys"] == {0: "zero", "0": "text zero"}


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_b19_autograd_sees_that_a_tensor_was_loaded(tmp_path: Path, dtype: torch.dtype) -> None:
    ucpstore.save(tmp_path, {"m": {"w": torch.ones(3), "s": torch.tensor(1.0)}}, step=1)
    weight = torch.full((3,), 2.0, dtype=dtype, requires_grad=True)
    scale = torch.tensor(2.0, dtype=dtype, requires_grad=True)
    losses = (weight * weight).sum(), scale * scale
    with torch.inference_mode():
        frozen = torch.zeros(3)
    ucpstore.load(tmp_path, {"m": {"w": frozen}}, strict=False)
    assert frozen.tolist() == [1, 1, 1]
    ucpstore.load(tmp_path, {"m": {"w": weight, "s": scale}}, cast="*")
    assert (weight.tolist(), scale.item()) == ([1, 1, 1], 1)
    for loss in losses:
        with pytest.raises(RuntimeError, match="modified by an inplace operation"):
            loss.backward()


def test_b19_a_refused_load_changes_no_python_value(tmp_path: Path) -> None:
    ucpstore.save(tmp_path, {"run": {"step": 17, "w": torch.ones(2)}}, step=1)
    run = {"step": 0, "w": torch.zeros(3)}
    refuse_load(tmp_path, {"run": run}, "run.w")
    assert run["step"] == 0
    assert tensors(run)[0].tolist() == [0, 0, 0]

"""Layers and experts in tensors of their own that are stored as one array."""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from ranks.harness import Ranks
from spec.simulated import load, save
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import Shard, distribute_tensor

import ucpstore
from ucpstore import Flat, MismatchError, Spec, StateError
from ucpstore.spec import Part, padded, renamed, replicate, scaled, shard, stacked, tied

At = Mapping[str, int]
EXPERTS, OUT, IN = 4, 6, 2
STATES = {"exp_avg": 1, "exp_avg_sq": 2}


def values(salt: int) -> torch.Tensor:
    """All experts, (EXPERTS, OUT, IN), every element another number."""
    count = EXPERTS * OUT * IN
    return (torch.arange(count) + 1000.0 * salt).reshape(EXPERTS, OUT, IN)


def numbered(local: int) -> Callable[[str, At], tuple[str, int]]:
    """Experts are numbered anew on each rank, of which each has `local`."""

    def name(own: str, at: At) -> tuple[str, int]:
        found = re.fullmatch(r"model\.experts\.(\d+)\.w", own)
        assert found is not None
        return "model.experts.w", int(found[1]) + at.get("ep", 0) * local

    return name


class Experts(nn.Module):
    """Experts in parameters of their own, and a router that all ranks have."""

    def __init__(self, parts: torch.Tensor) -> None:
        super().__init__()
        self.router = nn.Parameter(torch.arange(3.0))
        self.experts = nn.ModuleList(nn.Module() for _ in parts)
        for expert, part in zip(self.experts, parts, strict=True):
            expert.w = nn.Parameter(part.clone())


class Stack(nn.Module):
    """The same experts in one parameter."""

    def __init__(self, data: torch.Tensor) -> None:
        super().__init__()
        self.router = nn.Parameter(torch.arange(3.0))
        self.experts = nn.Module()
        self.experts.w = nn.Parameter(data)


def cut(salt: int, ep: int, tp: int, rank: int) -> torch.Tensor:
    """What a rank of ep x tp has of all experts."""
    return values(salt).chunk(ep)[rank // tp].chunk(tp, 1)[rank % tp]


def separate(ep: int, tp: int, rank: int, *, fresh: bool = False) -> dict[str, object]:
    model = Experts(cut(0, ep, tp, rank) if not fresh else torch.zeros_like(cut(0, ep, tp, rank)))
    optim = torch.optim.AdamW(model.parameters(), lr=0.5 if fresh else 0.1)
    if not fresh:
        own = {key: torch.arange(3.0) for key in STATES}
        optim.state[model.router] = {"step": torch.tensor(7.0), **own}
        for number, expert in enumerate(model.experts):
            states = {key: cut(salt, ep, tp, rank)[number].clone() for key, salt in STATES.items()}
            optim.state[expert.w] = {"step": torch.tensor(7.0), **states}
    return {"model": model, "optim": optim}


def spec(ep: int, tp: int = 1) -> Spec:
    rules = {
        "model.router": replicate("ep", "tp"),
        "model.experts.*.w": [stacked(numbered(EXPERTS // ep)), shard(0, "ep"), shard(1, "tp")],
    }
    return Spec({"ep": ep, "tp": tp}, rules)


def check(state: Mapping[str, object], ep: int, tp: int, rank: int) -> None:
    model, optim = state["model"], state["optim"]
    assert isinstance(model, Experts)
    assert isinstance(optim, torch.optim.AdamW)
    assert optim.param_groups[0]["lr"] == 0.1
    for number, expert in enumerate(model.experts):
        assert torch.equal(expert.w, cut(0, ep, tp, rank)[number])
        own = optim.state[expert.w]
        assert own.keys() == {"step", *STATES}
        assert own["step"].item() == 7.0
        for key, salt in STATES.items():
            assert torch.equal(own[key], cut(salt, ep, tp, rank)[number])
    steps = [optim.state[expert.w]["step"] for expert in model.experts]
    assert len({id(step) for step in steps}) == len(steps)


def refused(action: Callable[[], object]) -> str:
    with pytest.raises((StateError, MismatchError)) as caught:
        action()
    return str(caught.value)


@pytest.mark.parametrize(("ep", "tp"), [(1, 1), (2, 1), (4, 1), (2, 2), (1, 3)])
def test_experts_are_one_array_and_load_on_any_other_axes(ep: int, tp: int) -> None:
    saved = save([separate(ep, tp, rank) for rank in range(ep * tp)], spec(ep, tp))
    assert torch.equal(saved.arrays["model/experts.w"], values(0))
    for key, salt in STATES.items():
        assert torch.equal(saved.arrays[f"optim/{key}/experts.w"], values(salt))
    assert len(saved.arrays) == 6
    for ep_to, tp_to in ((1, 1), (2, 1), (4, 1), (2, 3), (1, 2)):
        target = [separate(ep_to, tp_to, rank, fresh=True) for rank in range(ep_to * tp_to)]
        load(target, saved, spec(ep_to, tp_to))
        for rank, state in enumerate(target):
            check(state, ep_to, tp_to, rank)


def test_states_of_a_stack_that_are_made_are_wide_where_a_cast_allows_it() -> None:
    saving = separate(1, 1, 0)
    states = saving["optim"].state
    for state in states.values():
        state.update({key: state[key].bfloat16() for key in STATES})
    narrow = save([saving], spec(1))
    target = separate(1, 1, 0, fresh=True)
    with pytest.warns(UserWarning, match="narrower than their parameters"):
        load([target], narrow, spec(1))
    target = separate(1, 1, 0, fresh=True)
    load([target], narrow, spec(1), cast="optim.*")
    found = target["optim"].state
    for number, expert in enumerate(target["model"].experts):
        for key, salt in STATES.items():
            assert found[expert.w][key].dtype == torch.float32
            assert torch.equal(found[expert.w][key], values(salt)[number].bfloat16().float())


def test_a_stacked_module_loads_separate_experts_and_the_reverse() -> None:
    saved = save([separate(2, 1, rank) for rank in range(2)], spec(2))
    model = Stack(torch.zeros(EXPERTS, OUT, IN))
    optim = torch.optim.AdamW(model.parameters(), lr=0.5)
    load([{"model": model, "optim": optim}], saved, None)
    assert torch.equal(model.experts.w, values(0))
    own = optim.state[model.experts.w]
    assert own["step"].item() == 7.0
    for key, salt in STATES.items():
        assert torch.equal(own[key], values(salt))
    again = save([{"model": model, "optim": optim}], None)
    assert {path: bytes(t.numpy()) for path, t in again.arrays.items()} == {
        path: bytes(t.numpy()) for path, t in saved.arrays.items()
    }
    target = [separate(4, 1, rank, fresh=True) for rank in range(4)]
    load(target, again, spec(4))
    for rank, state in enumerate(target):
        check(state, 4, 1, rank)


# ---- layers over pipeline stages ----


def layers(numbers: list[int], shape: tuple[int, ...] = (3,)) -> dict[str, object]:
    model = nn.ModuleDict({f"l{n}": nn.Module() for n in numbers})
    for n in numbers:
        model[f"l{n}"].w = nn.Parameter(torch.full(shape, float(n)))
    return {"model": model}


def by_number(own: str, at: At) -> tuple[str, int]:
    return "model.layers.w", int(own.split(".")[1][1:])


def test_stages_with_uneven_and_interleaved_layers() -> None:
    for cut_by, numbers in (
        (shard(0, "pp", sizes=(1, 3)), ([0], [1, 2, 3])),
        (shard(0, "pp", sections=(2, 2)), ([0, 2], [3, 1])),
        (shard(0, "pp", sizes=(0, 4)), ([], [0, 1, 2, 3])),
    ):
        rules = Spec({"pp": 2}, {"model.*": [stacked(by_number), cut_by]}, unique=("pp",))
        saved = save([layers(each) for each in numbers], rules)
        assert saved.arrays["model/layers.w"].tolist() == [[float(n)] * 3 for n in range(4)]
        target = layers([1, 0, 3, 2])
        with torch.no_grad():
            for parameter in target["model"].parameters():  # type: ignore[attr-defined]
                parameter.zero_()
        load([target], saved, Spec({}, {"model.*": stacked(by_number)}))
        for n in range(4):
            assert target["model"][f"l{n}"].w.tolist() == [float(n)] * 3  # type: ignore[index]


def test_scaled_and_padded_layers() -> None:
    rule = [stacked(by_number), scaled("tp"), padded(1, 2)]
    saved = save([layers([0, 1])] * 2, Spec({"tp": 2}, {"model.*": rule}))
    assert saved.arrays["model/layers.w"].tolist() == [[0.0, 0.0], [2.0, 2.0]]
    target = layers([1, 0])
    load([target], saved, Spec({}, {"model.*": rule}))
    assert target["model"]["l1"].w.tolist() == [2.0, 2.0, 0.0]  # type: ignore[index]


def test_the_laptop_shows_and_proves_stacks() -> None:
    rules = spec(2, 2)
    shown = rules.explain({"model": {"router": (3,), "experts": [{"w": (3, 2)}] * 2}}, rank=3)
    lines = [line.split("  ") for line in shown.splitlines()[2:]]
    assert [[cell.strip() for cell in line if cell.strip()] for line in lines] == [
        ["model.experts.0.w", "'model.experts.*.w'", "(3, 2)", "model.experts.w", "(4, 6, 2)",
         "[2:3, 3:6, 0:2]"],
        ["model.experts.1.w", "'model.experts.*.w'", "(3, 2)", "model.experts.w", "(4, 6, 2)",
         "[3:4, 3:6, 0:2]"],
    ]  # fmt: skip
    state = {"model": {"router": (3,), "experts": [{"w": (3, 2)}] * 2}}
    rules.prove([state] * 4)
    text = refused(lambda: rules.prove([state] * 3 + [{"model": {"router": (3,)}}]))
    assert text.startswith("model.experts.w: rank 3 holds Box(offset=(2, 3, 0)")


# ---- what does not fit ----


def test_layers_that_are_not_those_of_the_rule() -> None:
    by_name = stacked(by_number)

    def of(numbers: list[int], rule: Part = by_name) -> str:
        return refused(lambda: save([layers(numbers)], Spec({}, {"model.*": rule})))

    assert of([0, 2]) == (
        "model.layers.w: rule 'model.*' gives this rank the layers 0, 1 of 2, but its tensors, "
        "model.l0.w the first, have the indexes 0, 2; correct the function of stacked, or what "
        "the rule says of dimension 0"
    )
    assert of([0, 1], stacked(lambda own, at: ("model.layers.w", 0))) == (
        "model.layers.w: the rules give both model.l0.w and model.l1.w the index 0; each layer of "
        "a stack has an index of its own"
    )
    assert of([0], stacked(lambda own, at: "model.layers.w")) == (  # type: ignore[arg-type, return-value]
        "model.l0.w: rule 'model.*': the function of stacked gave 'model.layers.w'; it must give "
        "the name of the stack and an index of at least 0, as ('model.layers.wq.weight', 3)"
    )
    state = layers([0, 1])
    state["model"]["l1"].w = nn.Parameter(torch.ones(4))  # type: ignore[index]
    rules = Spec({}, {"model.*": stacked(by_number)})
    assert refused(lambda: save([state], rules)) == (
        "model.layers.w: layers of a stack must be alike, but model.l0.w has shape (3,) and "
        "model.l1.w has (4,); give them stacks of their own"
    )
    state["model"]["l1"].w = nn.Parameter(torch.ones(3).half())  # type: ignore[index]
    assert "model.l0.w has dtype float32 and model.l1.w has float16" in refused(
        lambda: save([state], rules)
    )
    state["model"]["l1"].w = state["model"]["l0"].w  # type: ignore[index]
    assert refused(lambda: save([state], rules)).startswith(
        "model.l1.w is tied to model.l0.w, and a rule stacks one of them"
    )
    for other in (renamed(lambda own, at: own), tied("model.a")):
        assert "'model.*': it says stacked and " in refused(
            lambda other=other: Spec({}, {"model.*": [stacked(by_number), other]})
        )


def test_what_is_no_parameter_of_a_module_is_not_stacked() -> None:
    rules = Spec({}, {"model.*": stacked(by_number)})
    for value in ({"l0.w": torch.ones(3)}, Flat(torch.ones(3), {"l0.w": (3,)}, ())):
        text = refused(lambda value=value: save([{"model": value}], rules))
        assert "model.l0.w: rule 'model.*' stacks it, but only parameters and buffers" in text


def test_states_that_do_not_fit_one_array() -> None:
    def broken(change: Callable[[Experts, torch.optim.AdamW], object]) -> str:
        state = separate(1, 1, 0)
        change(state["model"], state["optim"])  # type: ignore[arg-type]
        return refused(lambda: save([state], spec(1)))

    def second(model: Experts) -> nn.Parameter:
        return model.experts[1].w  # type: ignore[return-value]

    assert broken(lambda m, o: o.state[second(m)].update(step=torch.tensor(9.0))) == (
        "optim.step.experts.w: a stack has one 'step', but model.experts.0.w has 7.0 and "
        "model.experts.1.w has 9.0; store layers that differ by themselves"
    )
    assert broken(lambda m, o: o.state.pop(second(m))) == (
        "optim: layers of the stack experts.w must have the same states, but model.experts.0.w has "
        "step, exp_avg, exp_avg_sq and model.experts.1.w has none; a layer that got no gradient "
        "has none: give it one of zeros, or take one step with all of them"
    )

    def keys(model: Experts, optim: torch.optim.AdamW) -> None:
        for expert in model.experts:
            optim.state[expert.w][7] = torch.tensor(1.0)  # type: ignore[index]

    assert "a state of model.experts.0.w under the key 7; names of states must" in broken(keys)
    assert "must have the shape of their parameters, (6, 2), or be 0-d" in broken(
        lambda m, o: o.state[second(m)].update(exp_avg=torch.ones(6))
    )
    assert "some layers of the stack experts.w are frozen and some are trained" in broken(
        lambda m, o: second(m).requires_grad_(False)
    )

    def two_groups(model: Experts, optim: torch.optim.AdamW) -> None:
        group = optim.param_groups[0]
        group["params"] = [each for each in group["params"] if each is not second(model)]
        optim.add_param_group({"params": [second(model)]})

    assert "of the stack experts.w, but lie in the groups 0 and 1" in broken(two_groups)


def test_names_that_one_side_lacks_are_told() -> None:
    saved = save([separate(1, 1, 0)], None)
    target = separate(1, 1, 0, fresh=True)
    text = refused(lambda: load([target], saved, spec(1)))
    assert "not in the checkpoint: model.experts.w, optim.experts.w" in text
    assert "not in the target: model.experts.0.w, model.experts.1.w" in text
    for expert in target["model"].experts:  # type: ignore[attr-defined]
        assert not expert.w.any()


# ---- real ranks ----


def train_and_save(url: str, ep: int) -> None:
    """Experts over `ep`, the rest of the axes replicates them; the router is the same on all."""
    ranks, size = dist.get_rank(), dist.get_world_size()
    state = separate(ep, 1, ranks % ep)
    rules = {
        "model.router": replicate("dp", "ep"),
        "model.experts.*.w": [stacked(numbered(EXPERTS // ep)), shard(0, "ep"), replicate("dp")],
    }
    ucpstore.save(url, state, step=1, spec=Spec({"dp": size // ep, "ep": ep}, rules))


def load_separate(url: str, ep: int) -> None:
    rank, size = dist.get_rank(), dist.get_world_size()
    state = separate(ep, 1, rank % ep, fresh=True)
    rules = {
        "model.router": replicate("dp", "ep"),
        "model.experts.*.w": [stacked(numbered(EXPERTS // ep)), shard(0, "ep")],
    }
    ucpstore.load(url, state, spec=Spec({"dp": size // ep, "ep": ep}, rules, replicate=("dp",)))
    check(state, ep, 1, rank % ep)


def through_dtensors(url: str, again: str) -> None:
    """One stacked DTensor over an expert axis, the router over all ranks, no rules."""
    mesh = init_device_mesh("cpu", (dist.get_world_size(),), mesh_dim_names=("ep",))
    model = Stack(torch.zeros(EXPERTS, OUT, IN))
    model.experts.w = nn.Parameter(distribute_tensor(model.experts.w.detach(), mesh, [Shard(0)]))
    optim = torch.optim.AdamW(model.parameters(), lr=0.5)
    ucpstore.load(url, {"model": model, "optim": optim})
    rank, size = dist.get_rank(), dist.get_world_size()
    assert torch.equal(model.experts.w._local_tensor, values(0).chunk(size)[rank])
    for key, salt in STATES.items():
        local = optim.state[model.experts.w][key]._local_tensor
        assert torch.equal(local, values(salt).chunk(size)[rank])
    ucpstore.save(again, {"model": model, "optim": optim}, step=2)


@pytest.mark.parametrize(("ranks_from", "ep_from"), [(4, 2), (2, 2)])
def test_separate_experts_to_one_dtensor_and_back(
    ranks: Ranks, tmp_path: Path, ranks_from: int, ep_from: int
) -> None:
    one, two = str(tmp_path / "one"), str(tmp_path / "two")
    ranks.run(ranks_from, train_and_save, one, ep_from)
    stored = ucpstore.CheckpointStore(one).open(1)["model"]["experts.w"]
    assert torch.equal(torch.as_tensor(stored[:]), values(0))
    ranks.run(2, through_dtensors, one, two)
    ranks.run(4, load_separate, two, 2)
    ranks.run(4, load_separate, one, 4)

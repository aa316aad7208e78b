"""All kinds of values under a specification, saved and loaded in memory by simulated ranks."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence

import numpy as np
import pytest
import torch
from describe.engine import join, read
from spec.simulated import load, save
from torch import nn

from ucpstore import Flat, FlatOptimizer, MismatchError, Spec, StateError, UnsupportedError
from ucpstore.describe import describe, match
from ucpstore.spec import padded, renamed, replicate, scaled, shard, tied, unique

At = Mapping[str, int]
TP = {"tp": 2}


def refused(action: Callable[[], object]) -> str:
    with pytest.raises((StateError, UnsupportedError, MismatchError)) as caught:
        action()
    return str(caught.value)


def module(**tensors: torch.Tensor) -> nn.Module:
    """A module of these parameters, and of these buffers where they are no floats."""
    made = nn.Module()
    for name, tensor in tensors.items():
        if tensor.is_floating_point():
            made.register_parameter(name, nn.Parameter(tensor.clone()))
        else:
            made.register_buffer(name, tensor.clone())
    return made


def zeroed(value: object) -> object:
    """The same structure with other values."""
    if isinstance(value, dict):
        return {key: zeroed(item) for key, item in value.items()}
    if isinstance(value, torch.Tensor):
        return torch.full_like(value, 99)
    if isinstance(value, np.ndarray):
        return np.full_like(value, 99)
    if isinstance(value, nn.Module):
        return module(**{name: torch.full_like(t, 99) for name, t in value.state_dict().items()})
    return value


def round_trip(states: Sequence[dict[str, object]], spec: Spec) -> dict[str, torch.Tensor]:
    """The stored arrays; every rank got its own values back."""
    checkpoint = save(states, spec)
    made = [zeroed(state) for state in states]
    load(made, checkpoint, spec)  # type: ignore[arg-type]
    for own, found in zip(states, made, strict=True):
        same(own, found)
    return dict(checkpoint.arrays)


def same(left: object, right: object) -> None:
    if isinstance(left, dict):
        assert isinstance(right, dict)
        for key in left:
            same(left[key], right[key])
    elif isinstance(left, nn.Module):
        same(left.state_dict(), right.state_dict())  # type: ignore[attr-defined]
    elif isinstance(left, torch.Tensor):
        assert torch.equal(left, right)  # type: ignore[arg-type]
    elif isinstance(left, np.ndarray):
        assert np.array_equal(left, right)  # type: ignore[arg-type]
    else:
        assert left == right


def test_modules_in_dicts_buffers_and_scalars_of_modules() -> None:
    rules = {
        "jobs.a.w": shard(0, "tp"),
        "jobs.a.scale": replicate("tp"),
        "jobs.a.ids": [shard(0, "tp"), padded(0, 5)],
        "ema.w": shard(0, "tp"),
        "ema.scale": replicate("tp"),
        "ema.ids": shard(0, "tp"),
    }

    def parts(rank: int, factor: float, *, pad: bool) -> dict[str, torch.Tensor]:
        ids = torch.tensor([1, 2, 3, 4, 5, 0 if pad else 6])
        return {
            "w": torch.arange(12.0).reshape(4, 3).chunk(2)[rank] * factor,
            "scale": torch.tensor(factor),
            "ids": ids.chunk(2)[rank],
        }

    states = [
        {
            "jobs": {"a": module(**parts(rank, 2.0, pad=True)), "count": 3},
            "ema": module(**parts(rank, 3.0, pad=False)),
        }
        for rank in range(2)
    ]
    arrays = round_trip(states, Spec(TP, rules))
    assert sorted(arrays) == [
        *("ema/ids", "ema/scale", "ema/w"),
        *("jobs/a/ids", "jobs/a/scale", "jobs/a/w"),
    ]
    assert torch.equal(arrays["jobs/a/w"], torch.arange(12.0).reshape(4, 3) * 2)
    assert torch.equal(arrays["ema/w"], torch.arange(12.0).reshape(4, 3) * 3)
    assert arrays["jobs/a/ids"].tolist() == [1, 2, 3, 4, 5]
    assert arrays["ema/ids"].tolist() == [1, 2, 3, 4, 5, 6]
    assert arrays["jobs/a/scale"].tolist() == 2.0


def test_plain_tensors_and_numpy_arrays_go_by_their_place() -> None:
    whole = torch.arange(12.0).reshape(6, 2)
    states = [
        {
            "d": {"t": [whole.chunk(2)[rank].clone()], "step": torch.tensor(3.0)},
            "n": whole.chunk(2)[rank].numpy().copy(),
        }
        for rank in range(2)
    ]
    spec = Spec(TP, {"d.t.0": [shard(0, "tp"), padded(0, 6)], "n": shard(0, "tp")})
    arrays = round_trip(
        [{"d": {"t": s["d"]["t"][0]}, "n": s["n"]} for s in states],
        Spec(TP, {"d.t": shard(0, "tp"), "n": shard(0, "tp")}),
    )  # type: ignore[index]
    assert torch.equal(arrays["d/t"], whole)
    assert torch.equal(arrays["n"], whole)
    assert torch.equal(save(states, spec).arrays["d/t/0"], whole)


def adafactor(rank: int, *, fill: float | None = None) -> dict[str, object]:
    """A parameter cut by rows, and what an optimizer keeps of its rows, its columns and itself."""
    whole = torch.arange(24.0).reshape(6, 4)
    model = module(w=whole.chunk(2)[rank])
    optimizer = torch.optim.SGD(model.parameters(), lr=0.5)
    states = {
        "row": whole.sum(1).chunk(2)[rank].clone(),
        "column": whole.sum(0),
        "exp_avg": whole.chunk(2)[rank] * 2,
        "step": torch.tensor(5.0),
    }
    if fill is not None:
        states = {key: torch.full_like(value, fill) for key, value in states.items()}
    optimizer.state[model.w] = states
    return {"model": model, "optim": optimizer}


def test_states_of_another_shape_have_rules_of_their_own() -> None:
    spec = Spec(
        TP,
        {
            "model.w": shard(0, "tp"),
            "optim.row.*": shard(0, "tp"),
            "optim.column.*": replicate("tp"),
        },
    )
    checkpoint = save([adafactor(rank) for rank in range(2)], spec)
    whole = torch.arange(24.0).reshape(6, 4)
    assert torch.equal(checkpoint.arrays["optim/row/w"], whole.sum(1))
    assert torch.equal(checkpoint.arrays["optim/column/w"], whole.sum(0))
    assert torch.equal(checkpoint.arrays["optim/exp_avg/w"], whole * 2)
    target = [adafactor(rank, fill=-1.0) for rank in range(2)]
    load(target, checkpoint, spec)
    for rank, found in enumerate(target):
        model, optimizer = found["model"], found["optim"]
        expected = adafactor(rank)["optim"].state.values()  # type: ignore[attr-defined]
        same(optimizer.state[model.w], next(iter(expected)))  # type: ignore[attr-defined]
    without = Spec(TP, {"model.w": shard(0, "tp")})
    assert "optim.row.w: none of the 1 rules" in refused(
        lambda: save([adafactor(rank) for rank in range(2)], without)
    )


def tied_stage(rank: int) -> dict[str, object]:
    """The embedding on the first stage, the head on the last, and states of both."""
    model = module(**{("embed", "head")[rank]: torch.arange(6.0).reshape(3, 2)})
    optimizer = torch.optim.SGD(model.parameters(), lr=0.5)
    (parameter,) = model.parameters()
    optimizer.state[parameter] = {"exp_avg": torch.ones(3, 2), "row": torch.ones(3)}
    return {"m": model, "optim": optimizer}


def test_states_of_tied_parameters_are_tied_too() -> None:
    rules = {"m.head": tied("m.embed"), "m.embed": [], "optim.row.embed": []}
    spec = Spec({"pp": 2}, rules, unique=("pp",))
    arrays = save([tied_stage(0), tied_stage(1)], spec).arrays
    assert sorted(arrays) == ["m/embed", "optim/exp_avg/embed", "optim/row/embed"]


def packed(rank: int, fill: int | None = None) -> dict[str, object]:
    """Four-bit values in pairs, cut by rows, and moments of the shape that they stand for."""
    values = torch.arange(32, dtype=torch.uint8).reshape(8, 4)
    moments = torch.arange(64.0).reshape(8, 8)
    if fill is not None:
        values, moments = torch.full_like(values, fill), torch.full_like(moments, fill)
    return {"m": {"w": values.chunk(2)[rank].clone(), "avg": moments.chunk(2)[rank].clone()}}


def test_each_array_has_a_shape_of_its_own() -> None:
    arrays = round_trip([packed(0), packed(1)], Spec(TP, {"m.*": shard(0, "tp")}))
    assert (arrays["m/w"].shape, arrays["m/avg"].shape) == ((8, 4), (8, 8))


# ---- names ----


def renumbered(name: str, at: At) -> str:
    return name.replace(".0.", f".{at['pp']}.")


def test_a_state_dict_has_no_names_to_change() -> None:
    model = nn.Sequential(nn.Linear(2, 2, bias=False))
    spec = Spec({"pp": 2}, {"model.*": renamed(renumbered)}, unique=("pp",))
    states = [{"model": model.state_dict()} for _ in range(2)]
    assert refused(lambda: save(states, spec)) == (
        "model.0.weight: a rule gives it the name 'model.1.weight', but only parameters and "
        "buffers of modules are renamed or tied; put the module into the state instead of its "
        "state_dict(), or use the name as key"
    )
    arrays = save([{"model": model}] * 2, spec).arrays
    assert sorted(arrays) == ["model/0.weight", "model/1.weight"]


def test_two_stages_with_one_name_are_refused_though_their_values_are_equal() -> None:
    model = nn.Sequential(nn.Linear(2, 2, bias=False))
    for state in ({"model": model}, {"model": model.state_dict()}):
        text = refused(
            lambda state=state: save([state] * 2, Spec({"pp": 2}, {"model.*": unique("pp")}))
        )
        assert text == (
            "model/0.weight: rank 0 holds it alone with pp=0, and rank 1 with pp=1; two tensors "
            "need two names, renamed(...), and one that several ranks share is tied(...) or "
            "replicated"
        )


def test_names_that_meet_or_leave_their_module_are_refused() -> None:
    model = nn.ParameterDict({"a": torch.ones(2), "b": torch.ones(2)})

    def spec(name: str) -> Spec:
        return Spec({"pp": 1}, {"model.*": renamed(lambda own, at: name)})

    assert refused(lambda: save([{"model": model}], spec("model.c"))) == (
        "model.b and model.a: rules give both the name model.c; give each a name of its own"
    )
    text = refused(lambda: save([{"model": model}], spec("other.c")))
    assert text == (
        "model.a: a rule gives it the name 'other.c', but full names of what lies in model must "
        "begin with 'model.'"
    )
    saved = save([{"model": model}], None)
    assert "the name model.c" in refused(lambda: load([{"model": model}], saved, spec("model.c")))


def test_a_head_that_comes_before_its_embedding_is_one_array() -> None:
    rules = {"m.head": tied("m.embed"), "m.embed": []}
    shared = torch.arange(6.0)
    first = nn.Module()
    first.head = nn.Parameter(shared.clone())
    first.embed = first.head
    arrays = save([{"m": first}], Spec({"pp": 1}, rules)).arrays
    assert list(arrays) == ["m/embed"]
    stages = [{"m": module(embed=shared)}, {"m": module(head=shared)}]
    spec = Spec({"pp": 2}, rules, unique=("pp",))
    checkpoint = save(stages, spec)
    assert list(checkpoint.arrays) == ["m/embed"]
    again = nn.Module()
    again.head = nn.Parameter(torch.zeros(6))
    again.embed = again.head
    load([{"m": again}], checkpoint, Spec({"pp": 1}, rules))
    assert torch.equal(again.embed.detach(), shared)


def test_a_tie_to_a_name_that_nobody_has_is_refused() -> None:
    spec = Spec({"pp": 2}, {"m.head": tied("m.emb"), "m.embed": []}, unique=("pp",))
    stages = [{"m": module(embed=torch.ones(4))}, {"m": module(head=torch.ones(4))}]
    assert refused(lambda: save(stages, spec)) == (
        "m/emb: a rule ties a tensor of rank 1 to it, but no rank has a tensor of this name; "
        "correct the name that tied(...) gives"
    )


# ---- values ----


def test_padding_of_scaled_tensors_is_zero_after_a_load() -> None:
    spec = Spec({"tp": 2, "cp": 2}, {"m.b": [shard(0, "tp"), padded(0, 3), scaled("cp")]})
    parts = [torch.tensor([1.0, 2.0]), torch.tensor([3.0, 7.0])]
    states = [{"m": module(b=parts[rank // 2])} for rank in range(4)]
    checkpoint = save(states, spec)
    assert checkpoint.arrays["m/b"].tolist() == [2.0, 4.0, 6.0]
    target = [{"m": module(b=torch.full((2,), -1.0))} for _ in range(4)]
    load(target, checkpoint, spec)
    found = [state["m"].b.tolist() for state in target]
    assert found == [[1.0, 2.0], [1.0, 2.0], [3.0, 0.0], [3.0, 0.0]]


def test_a_part_that_is_padding_alone_becomes_zero() -> None:
    saved = save([{"m": {"e": torch.arange(1.0, 4.0)}}], None)
    spec = Spec({"tp": 4}, {"m.e": [shard(0, "tp"), padded(0, 3)]})
    target = [{"m": {"e": torch.full((2,), -1.0)}} for _ in range(4)]
    load(target, saved, spec)
    assert [state["m"]["e"].tolist() for state in target] == [[1, 2], [3, 0], [0, 0], [0, 0]]


def test_scaled_is_exact_for_powers_of_two_and_says_so_for_whole_numbers() -> None:
    third = torch.tensor([0.1, 1 / 3, 7.0])
    for count in (2, 4, 8):
        spec = Spec({"tp": count}, {"m.b": scaled("tp")})
        arrays = save([{"m": {"b": third / count}}] * count, spec).arrays
        assert torch.equal(arrays["m/b"], third)
    spec = Spec(TP, {"m.ids": scaled("tp")})
    assert refused(lambda: save([{"m": {"ids": torch.arange(3)}}] * 2, spec)) == (
        "m.ids: rule 'm.ids': scaled is for floats of 16 bits and more, "
        "but the tensor has dtype int64"
    )


# ---- loads ----


def test_a_wrong_shape_is_refused_with_the_local_one() -> None:
    saved = save([{"m": {"e": torch.ones(7, 2)}}], None)
    spec = Spec(TP, {"m.e": shard(0, "tp")})
    target = {"m": {"e": torch.zeros(4, 2)}}
    text = refused(lambda: load([target] * 2, saved, spec))
    assert (
        "m.e: stored with shape (7, 2), the target has shape (8, 2) ((4, 2) on this rank)" in text
    )
    assert torch.equal(target["m"]["e"], torch.zeros(4, 2))


def test_strict_counts_names_after_renaming() -> None:
    stages = [{"m": nn.Sequential(nn.Linear(2, 2, bias=False))} for _ in range(2)]
    spec = Spec({"pp": 2}, {"m.*": renamed(renumbered)}, unique=("pp",))
    checkpoint = save(stages, spec)
    third = Spec({"pp": 3}, {"m.*": renamed(renumbered)}, unique=("pp",))
    target = [{"m": nn.Sequential(nn.Linear(2, 2, bias=False))} for _ in range(3)]
    before = target[2]["m"][0].weight.detach().clone()
    assert "not in the checkpoint: m.2.weight" in refused(lambda: load(target, checkpoint, third))
    with pytest.warns(UserWarning, match=r"m\.2\.weight"):
        load(target, checkpoint, third, strict=False)
    for rank in range(2):
        assert torch.equal(target[rank]["m"][0].weight, stages[rank]["m"][0].weight)
    assert torch.equal(target[2]["m"][0].weight, before)


class Single(nn.Module):
    def __init__(self, value: float) -> None:
        super().__init__()
        self.w = nn.Parameter(torch.tensor(value))


def test_a_0d_value_of_a_dict_is_divided_where_a_rule_scales_it() -> None:
    rules = Spec({"tp": 2}, {"m.w": scaled("tp")})
    for target, value in (
        ({"m": Single(0.0)}, lambda state: state["m"].w),
        (
            {"m": {"w": Flat(torch.zeros(1), (), (), is_state=False)}},
            lambda state: state["m"]["w"].tensor,
        ),
    ):
        checkpoint = join([describe({"m": {"w": torch.tensor(4.0)}}, group_ranks={0: 0})])
        group = {0: 0, 1: 1}
        for rank in group:
            found = match(
                target, checkpoint.tree, checkpoint.infos, group_ranks=group, rank=rank, spec=rules
            )
            read(found, checkpoint)
            assert value(target).item() == 2.0


def test_float8_is_not_calculated_with() -> None:
    rules = Spec({"tp": 2}, {"m.w": scaled("tp")})
    weight = torch.ones(2).to(torch.float8_e4m3fn)
    with pytest.raises(UnsupportedError, match="scaled is for floats of 16 bits"):
        describe({"m": {"w": weight}}, group_ranks={0: 0, 1: 1}, rank=0, spec=rules)


def test_padding_of_rows_is_zero_after_a_load() -> None:
    def states(value: float) -> list[dict[str, object]]:
        made = []
        for _ in range(4):
            net = nn.Module()
            net.w = nn.Parameter(torch.full((4, 2), value, dtype=torch.bfloat16))
            row = nn.Parameter(torch.full((5,), value))
            adam = torch.optim.AdamW([row])
            moments = {key: torch.full((5,), value) for key in ("exp_avg", "exp_avg_sq")}
            adam.state[row] = {"step": torch.tensor(1.0), **moments}
            flat = Flat(row, {"w": (4, 2)}, "dp")
            made.append({"model": net, "optim": FlatOptimizer(adam, [flat])})
        return made

    # rank 2 * dp + tp: the block of tp 1 has one real row, which a part of 5 ends behind
    spec = Spec({"dp": 2, "tp": 2}, {"model.w": [shard(0, "tp"), padded(0, 5), replicate("dp")]})
    target = states(9.0)
    load(target, save(states(3.0), spec), spec)
    real = [[3] * 5, [3, 3, 0, 0, 0], [3] * 3 + [9, 9], [0] * 3 + [9, 9]]
    for state, expected in zip(target, real, strict=True):
        (row,) = state["optim"].optimizer.param_groups[0]["params"]
        assert row.tolist() == expected
        assert state["optim"].optimizer.state[row]["exp_avg"].tolist() == expected

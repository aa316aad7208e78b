"""Values that a rule changes on their way: divided, padded and averaged ones."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import pytest
import torch
from describe.engine import join, read
from spec.simulated import load, save
from torch import nn

from ucpstore import Flat, MismatchError, Spec, UnsupportedError
from ucpstore.describe import describe, match
from ucpstore.spec import average, padded, replicate, scaled, shard

TWO = {"tp": 2}


class One(nn.Module):
    def __init__(self, w: torch.Tensor) -> None:
        super().__init__()
        self.w = nn.Parameter(w)


def ones(count: int, *values: float, dtype: torch.dtype = torch.float32) -> list[dict[str, One]]:
    return [{"m": One(torch.tensor(values, dtype=dtype))} for _ in range(count)]


def cast_save(states: Sequence[object], spec: Spec, dtype: str):
    group = {rank: rank for rank in range(len(states))}
    cast = [("m.*", dtype)]
    return join(
        [
            describe(state, group_ranks=group, rank=rank, spec=spec, cast=cast)
            for rank, state in enumerate(states)
        ]
    )


# ---- scaled ----


def test_a_scaled_value_is_not_rounded_in_the_smaller_dtype() -> None:
    four = Spec({"tp": 4}, {"m.*": scaled("tp")})
    own = ones(4, 30000.0, 1.5, dtype=torch.float16)
    assert cast_save(own, four, "float32").arrays["m/w"].tolist() == [120000.0, 6.0]

    stored = save(ones(1, 120000.0, 6.0), None)
    target = ones(4, 1.0, 1.0, dtype=torch.float16)
    for rank, state in enumerate(target):
        found = match(
            state,
            stored.tree,
            stored.infos,
            cast="*",
            group_ranks={r: r for r in range(4)},
            rank=rank,
            spec=four,
        )
        read(found, stored)
        assert state["m"].w.tolist() == [30000.0, 1.5]


def test_padding_of_a_scaled_row_is_zero_and_what_lies_behind_keeps_its_bits() -> None:
    spec = Spec({"tp": 4, "dp": 1}, {"model.w": [padded(0, 2), scaled("tp")]})

    def row(value: float) -> list[dict[str, Flat]]:
        part = [torch.full((4,), value, dtype=torch.float16) for _ in range(4)]
        return [{"o": Flat(each, {"w": (3,)}, "dp", is_state=False)} for each in part]

    stored = save(row(2.0), spec)
    assert stored.arrays["o/w"].tolist() == [8.0, 8.0]
    target = row(60000.0)
    load(target, stored, spec)
    assert [state["o"].tensor.tolist() for state in target] == [[2.0, 2.0, 0.0, 60000.0]] * 4


def tied_items(rules: object, *values: torch.Tensor) -> tuple[Spec, list[dict[str, One]]]:
    modules = [One(each.clone()) for each in values]
    return Spec(TWO, {"*.w": rules}), [{"a": each, "b": each} for each in modules]


@pytest.mark.parametrize(
    ("rules", "values", "stored"),
    [
        (scaled("tp"), ([1.0, 3.0], [1.0, 3.0]), [2.0, 6.0]),
        ([shard(0, "tp"), padded(0, 3)], ([1.0, 2.0], [3.0, 0.0]), [1.0, 2.0, 3.0]),
    ],
)
def test_what_is_tied_over_items_is_compared_without_padding(
    rules, values, stored, monkeypatch: pytest.MonkeyPatch
) -> None:
    spec, states = tied_items(rules, *map(torch.tensor, values))
    checkpoint = save(states, spec)
    assert checkpoint.arrays["a/w"].tolist() == checkpoint.arrays["b/w"].tolist() == stored
    _, target = tied_items(rules, torch.zeros(2), torch.zeros(2))
    empty_like = torch.empty_like
    monkeypatch.setattr(torch, "empty_like", lambda *a, **k: empty_like(*a, **k).fill_(7))
    load(target, checkpoint, spec)
    assert tuple(state["a"].w.tolist() for state in target) == values
    checkpoint.arrays["b/w"][0] = 5.0
    with pytest.raises(MismatchError, match=r"a\.w and b\.w: tied .*different values"):
        load(target, checkpoint, spec)


@pytest.mark.parametrize(
    ("rules", "values"),
    [
        (scaled("tp"), ([1.0, 2.0], [1.0, 2.0])),
        ([shard(0, "tp"), padded(0, 3)], ([1.0, 2.0], [3.0, 0.0])),
    ],
)
def test_scaled_and_padded_targets_may_be_made_in_inference_mode(rules, values) -> None:
    spec = Spec(TWO, {"m.*": rules})
    stored = save([{"m": One(torch.tensor(each))} for each in values], spec)
    for rank in range(2):
        with torch.inference_mode():
            state = {"m": One(torch.full((2,), 9.0))}
        found = match(
            state, stored.tree, stored.infos, group_ranks={0: 0, 1: 1}, rank=rank, spec=spec
        )
        finish = found.finish
        with torch.inference_mode():
            read(replace(found, finish=lambda: None), stored)
        finish()
        assert state["m"].w.tolist() == values[rank]


def asgd(value: float, *, fresh: bool = False) -> dict[str, object]:
    module = One(torch.full((2,), value))
    optimizer = torch.optim.ASGD(module.parameters(), t0=0)
    if not fresh:
        optimizer.state[module.w] = {
            "step": torch.tensor(1.0),
            "ax": torch.full((2,), value),
            "master_w": torch.full((2,), value),
            "grad_avg": torch.full((2,), value),
        }
    return {"m": module, "o": optimizer}


@pytest.mark.parametrize("fresh", [False, True])
def test_copies_of_a_scaled_parameter_are_scaled_and_other_states_are_not(fresh: bool) -> None:
    spec = Spec(TWO, {"m.w": scaled("tp")})
    checkpoint = save([asgd(1.5), asgd(1.5)], spec)
    assert {name: values.tolist() for name, values in checkpoint.arrays.items()} == {
        "m/w": [3.0, 3.0],
        "o/ax/w": [3.0, 3.0],
        "o/master_w/w": [3.0, 3.0],
        "o/grad_avg/w": [1.5, 1.5],
    }
    three = Spec({"tp": 3}, {"m.w": scaled("tp")})
    target = [asgd(9.0, fresh=fresh) for _ in range(3)]
    load(target, checkpoint, three)
    for state in target:
        found = next(iter(state["o"].state.values()))
        assert state["m"].w.tolist() == found["ax"].tolist() == [1.0, 1.0]
        assert found["master_w"].tolist() == [1.0, 1.0]
        assert found["grad_avg"].tolist() == [1.5, 1.5]


@pytest.mark.parametrize("fresh", [False, True])
def test_0d_copies_of_a_scaled_parameter_are_scaled_too(fresh: bool) -> None:
    def job(value: float, fresh: bool = False) -> dict[str, object]:
        module = One(torch.tensor(value))
        optimizer = torch.optim.ASGD(module.parameters())
        if not fresh:
            optimizer.state[module.w] = {"ax": torch.tensor(value), "eta": torch.tensor(value)}
        return {"m": module, "o": optimizer}

    checkpoint = save([job(1.5), job(1.5)], Spec(TWO, {"m.w": scaled("tp")}))
    target = [job(9.0, fresh)]
    load(target, checkpoint, None)
    (found,) = target[0]["o"].state.values()
    assert (found["ax"].item(), found["eta"].item()) == (3.0, 1.5)
    target = [job(9.0, fresh) for _ in range(2)]
    load(target, checkpoint, Spec(TWO, {"m.w": scaled("tp")}))
    (found,) = target[1]["o"].state.values()
    assert (found["ax"].item(), found["eta"].item()) == (1.5, 1.5)


# ---- average ----


def test_an_average_is_not_made_of_rounded_values() -> None:
    spec = Spec({"dp": 2}, {"m.*": average("dp")})
    with pytest.raises(UnsupportedError) as caught:
        cast_save(ones(2, 1.0), spec, "bfloat16")
    assert str(caught.value) == (
        "m.w: a rule averages it, and cast stores it as bfloat16, but it is float32: the ranks' "
        "values would be rounded before their mean is made; put 'm.w': torch.float32 before the "
        "pattern that matches it, the first counts"
    )
    with pytest.raises(UnsupportedError, match="stores it as bfloat16, but it is float16"):
        cast_save(ones(2, 1.0, dtype=torch.float16), spec, "bfloat16")
    wider = cast_save(ones(2, 1.0, dtype=torch.float16), spec, "float32")
    assert wider.arrays["m/w"].dtype == torch.float32


def drifted(rank: int) -> dict[str, object]:
    module = One(torch.tensor(1.0 + rank))
    optimizer = torch.optim.Adam(module.parameters())
    optimizer.state[module.w] = {"step": torch.tensor(4.0), "exp_avg": torch.tensor(2.0 + rank)}
    return {"m": module, "o": optimizer}


def test_0d_moments_of_averaged_parameters_are_arrays() -> None:
    spec = Spec({"dp": 2}, {"m.*": average("dp")})
    group = {0: 0, 1: 1}
    states = [describe(drifted(r), group_ranks=group, rank=r, spec=spec) for r in group]
    means = {each.spec.path: each.spec.mean for each in states[0].arrays}
    assert means == {"m/w": True, "o/exp_avg/w": True}
    assert states[0].tree == states[1].tree, "steps are values, and equal"
    checkpoint = join(states)
    for fresh in (False, True):
        target = drifted(7)
        if fresh:
            target["o"].state.clear()
        load([target], checkpoint, None)
        (found,) = target["o"].state.values()
        assert (found["step"].item(), found["exp_avg"].item()) == (4.0, 3.0)


# ---- states with rules of their own ----


def buffered(*, fresh: bool, local: int = 4) -> dict[str, object]:
    module = One(torch.zeros(2))
    optimizer = torch.optim.SGD(module.parameters(), lr=0.5, momentum=0.9)
    if not fresh:
        optimizer.state[module.w] = {"buf": torch.arange(float(local))}
    return {"m": module, "o": optimizer}


def test_a_state_with_a_rule_of_its_own_is_not_cut_as_its_parameter() -> None:
    spec = Spec(TWO, {"m.w": shard(0, "tp"), "o.buf.w": replicate("tp")})
    checkpoint = save([buffered(fresh=False)] * 2, spec)
    assert checkpoint.arrays["o/buf/w"].tolist() == [0.0, 1.0, 2.0, 3.0]
    with pytest.raises(MismatchError) as caught:
        load([buffered(fresh=True)] * 2, checkpoint, spec)
    assert (
        "o.buf.w: the target's optimizer has no such state yet, and the one that was saved has the "
        "shape (4,) of its parameter, of which this rank has (2,); so it may lie as the parameter "
        "does, or by rule 'o.buf.w' of its own."
    ) in str(caught.value)
    target = [buffered(fresh=False) for _ in range(2)]
    for state in target:
        next(iter(state["o"].state.values()))["buf"].zero_()
    load(target, checkpoint, spec)
    for state in target:
        (found,) = state["o"].state.values()
        assert found["buf"].tolist() == [0.0, 1.0, 2.0, 3.0]


@pytest.mark.parametrize("own", [{}, {"o.buf.*": shard(-1, "tp")}])
def test_a_state_that_can_only_lie_as_its_parameter_is_made_so(own) -> None:
    spec = Spec(TWO, {"m.w": shard(0, "tp"), **own})
    checkpoint = save([buffered(fresh=False, local=2)] * 2, spec)
    target = [buffered(fresh=True) for _ in range(2)]
    load(target, checkpoint, spec)
    for state in target:
        (found,) = state["o"].state.values()
        assert found["buf"].tolist() == [0.0, 1.0]

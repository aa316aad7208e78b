"""Optimizers of rows: masters and moments under the tensors' names, from any row to any other."""

from __future__ import annotations

import itertools
import math
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from describe.engine import Checkpoint, join, load, read, save
from ranks.harness import Ranks
from torch import nn

import ucpstore
from ucpstore import Flat, FlatOptimizer
from ucpstore.describe import describe, match
from ucpstore.errors import MismatchError, StateError

SHAPES = {"a": (1000,), "b": (37, 3), "c": (2, 5), "d": ()}
STATES = {"exp_avg": 1, "exp_avg_sq": 2}
GROUPS = (("a", "c"), ("d", "b"))
"""Names of each group in the order of its row."""


def values(name: str, salt: int) -> torch.Tensor:
    """Values that differ everywhere, of which none survives bfloat16 unchanged."""
    first = 10_000 * salt + 2_000 * [*SHAPES].index(name)
    count = math.prod(SHAPES[name])
    return (torch.arange(first, first + count) + 0.123).to(torch.float32).reshape(SHAPES[name])


class Net(nn.Module):
    def __init__(self, dtype: torch.dtype, salt: int | None) -> None:
        super().__init__()
        for name, shape in SHAPES.items():
            data = torch.zeros(shape) if salt is None else values(name, salt)
            setattr(self, name, nn.Parameter(data.to(dtype)))


def row_of(names: tuple[str, ...], salt: int, parts: int, at: int) -> torch.Tensor:
    """One part of a row, -7 where it is padding."""
    whole = torch.cat([values(name, salt).reshape(-1) for name in names])
    part = -(-whole.numel() // parts)
    padded = torch.full((part * parts,), -7.0)
    padded[: whole.numel()] = whole
    return padded[part * at : part * (at + 1)].clone()


def real(names: tuple[str, ...], parts: int, at: int) -> torch.Tensor:
    """Which elements of a part are no padding."""
    return row_of(names, 0, parts, at) != -7.0


def rows(
    parts: int, at: int, salt: int | None, dtype: torch.dtype = torch.bfloat16, step: float = 5.0
) -> dict[str, object]:
    """A job of rows: the masters are `values(name, 0)`, states as STATES; fresh for salt None."""
    net = Net(dtype, 0 if salt is not None else None)
    parameters = [
        nn.Parameter(
            row_of(names, 0, parts, at)
            if salt is not None
            else torch.zeros_like(row_of(names, 0, parts, at))
        )
        for names in GROUPS
    ]
    adam = torch.optim.AdamW(
        [{"params": [p], "lr": 0.1 * (n + 1)} for n, p in enumerate(parameters)]
    )
    if salt is not None:
        for names, parameter in zip(GROUPS, parameters, strict=True):
            state = {key: row_of(names, s, parts, at) for key, s in STATES.items()}
            adam.state[parameter] = {"step": torch.tensor(step), **state}
    flats = [
        Flat(parameter, {name: SHAPES[name] for name in names})
        for names, parameter in zip(GROUPS, parameters, strict=True)
    ]
    return {"model": net, "optim": FlatOptimizer(adam, flats)}


def plain(dtype: torch.dtype, salt: int | None) -> dict[str, object]:
    net = Net(dtype, 0 if salt is not None else None)
    adam = torch.optim.AdamW(
        [
            {"params": [getattr(net, name) for name in names], "lr": 0.1 * (n + 1)}
            for n, names in enumerate(GROUPS)
        ]
    )
    if salt is not None:
        for name in SHAPES:
            state = {key: values(name, s) for key, s in STATES.items()}
            adam.state[getattr(net, name)] = {"step": torch.tensor(5.0), **state}
    return {"model": net, "optim": adam}


def check_rows(state: dict[str, object], parts: int, at: int, dtype: torch.dtype) -> None:
    optimizer = state["optim"].optimizer
    for n, (names, group) in enumerate(zip(GROUPS, optimizer.param_groups, strict=True)):
        (parameter,) = group["params"]
        kept = real(names, parts, at)
        assert torch.equal(parameter[kept], row_of(names, 0, parts, at)[kept]), names
        own = optimizer.state[parameter]
        assert set(own) == {"step", *STATES}
        assert own["step"].item() == 5.0
        assert group["lr"] == 0.1 * (n + 1)
        for key, salt in STATES.items():
            assert own[key].dtype == torch.float32
            assert torch.equal(own[key][kept], row_of(names, salt, parts, at)[kept]), (key, names)
            assert not own[key][~kept].any()
    for name in SHAPES:
        assert torch.equal(getattr(state["model"], name), values(name, 0).to(dtype)), name


def check_plain(state: dict[str, object]) -> None:
    for name in SHAPES:
        parameter = getattr(state["model"], name)
        assert torch.equal(parameter, values(name, 0)), name
        own = state["optim"].state[parameter]
        assert own["step"].item() == 5.0
        for key, salt in STATES.items():
            assert torch.equal(own[key], values(name, salt)), (key, name)
    assert [group["lr"] for group in state["optim"].param_groups] == [0.1, 0.2]


def saved_by(parts: int, dtype: torch.dtype = torch.bfloat16) -> Checkpoint:
    """What the ranks of a job of rows save, each described by itself."""
    group = {rank: rank for rank in range(parts)}
    return join(
        [
            describe(rows(parts, rank, 1, dtype), group_ranks=group, rank=rank)
            for rank in range(parts)
        ]
    )


def load_as(state: dict[str, object], saved: Checkpoint, parts: int, at: int, **more) -> None:
    group = {rank: rank for rank in range(parts)}
    read(match(state, saved.tree, saved.infos, group_ranks=group, rank=at, **more), saved)


@pytest.mark.parametrize("source", [1, 2, 3, 16])
def test_b30_rows_load_on_any_number_of_ranks(source: int) -> None:
    saved = saved_by(source)
    for target in (1, 5, 24, 32):
        for at in (0, target // 2, target - 1):
            state = rows(target, at, None)
            load_as(state, saved, target, at)
            check_rows(state, target, at, torch.bfloat16)


def test_rows_are_stored_as_whole_tensors_under_their_names() -> None:
    saved = saved_by(3)
    for name in SHAPES:
        assert torch.equal(saved.arrays[f"model/{name}"], values(name, 0).bfloat16())
        assert torch.equal(saved.arrays[f"optim/master/{name}"], values(name, 0))
        for key, salt in STATES.items():
            assert torch.equal(saved.arrays[f"optim/{key}/{name}"], values(name, salt))
    assert len(saved.arrays) == 4 * len(SHAPES)


def test_a_master_of_the_parameters_dtype_is_not_stored_twice() -> None:
    saved = saved_by(2, torch.float32)
    assert not [path for path in saved.arrays if "master" in path]
    state = rows(3, 1, None, torch.float32)
    load_as(state, saved, 3, 1)
    check_rows(state, 3, 1, torch.float32)


def test_plain_parameters_are_read_from_their_masters() -> None:
    state = plain(torch.float32, None)
    load(state, saved_by(3))
    check_plain(state)


def test_plain_parameters_without_the_optimizer_are_read_from_the_model() -> None:
    state = {"model": Net(torch.bfloat16, None)}
    load(state, saved_by(3))
    assert torch.equal(state["model"].a, values("a", 0).bfloat16())


def test_rows_and_their_parameters_are_read_from_a_plain_job() -> None:
    saved = save(plain(torch.float32, 1))
    for dtype in (torch.float32, torch.bfloat16):
        for at in range(3):
            state = rows(3, at, None, dtype)
            load_as(state, saved, 3, at)
            check_rows(state, 3, at, dtype)


def test_masters_without_a_place_are_refused_and_left_out_if_not_strict() -> None:
    saved = saved_by(2)
    state = plain(torch.bfloat16, None)
    with pytest.raises(MismatchError, match=r"not in the target: optim\.master\.a") as error:
        load(state, saved)
    assert "saved with a master of float32, for which the target has no place" in str(error.value)
    assert not state["model"].a.any()
    load(state, saved, strict=False)
    assert torch.equal(state["model"].a, values("a", 0).bfloat16())
    assert torch.equal(state["optim"].state[state["model"].b]["exp_avg"], values("b", 1))


def test_masters_are_filled_from_parameters_that_have_none() -> None:
    saved = save(plain(torch.bfloat16, 1))
    state = rows(2, 1, None)
    load_as(state, saved, 2, 1)
    (parameter,) = state["optim"].optimizer.param_groups[0]["params"]
    expected = row_of(GROUPS[0], 0, 2, 1).bfloat16().float()
    kept = real(GROUPS[0], 2, 1)
    assert torch.equal(parameter[kept], expected[kept])


def test_one_row_cannot_hold_two_steps() -> None:
    state = plain(torch.float32, 1)
    state["optim"].state[state["model"].c]["step"] = torch.tensor(9.0)
    saved = save(state)
    target = rows(1, 0, None, torch.float32)
    with pytest.raises(MismatchError, match=r"a and c lie in one parameter") as error:
        load(target, saved)
    assert "one 'step', but they were saved with 5.0 and 9.0" in str(error.value)


def test_b22_frozen_parameters() -> None:
    state = plain(torch.float32, 1)
    state["model"].c.requires_grad = False
    del state["optim"].state[state["model"].c]
    saved = save(state)
    target = rows(1, 0, None, torch.float32)
    with pytest.raises(MismatchError, match=r"not in the checkpoint: optim\.c"):
        load(target, saved)
    # A row of what is trained only, as DeepSpeed makes it
    net = Net(torch.float32, None)
    net.c.requires_grad = False
    parameter = nn.Parameter(torch.zeros(1000 + 111 + 1))
    adam = torch.optim.AdamW([parameter])
    row = Flat(parameter, {name: SHAPES[name] for name in ("a", "b", "d")})
    load({"model": net, "optim": FlatOptimizer(adam, [row])}, save(_one_group(frozen="c")))
    assert torch.equal(net.c, values("c", 0))
    assert torch.equal(adam.state[parameter]["exp_avg"][:1000], values("a", 1))
    assert torch.equal(parameter[1000:1111].reshape(37, 3), values("b", 0))
    back = _one_group(frozen="c", salt=None)
    load(back, save({"model": net, "optim": FlatOptimizer(adam, [row])}))
    assert torch.equal(back["optim"].state[back["model"].b]["exp_avg_sq"], values("b", 2))


def _one_group(frozen: str, salt: int | None = 1) -> dict[str, object]:
    net = Net(torch.float32, salt and 0)
    getattr(net, frozen).requires_grad = False
    adam = torch.optim.AdamW(net.parameters())
    for name in SHAPES if salt else ():
        if name != frozen:
            state = {key: values(name, s) for key, s in STATES.items()}
            adam.state[getattr(net, name)] = {"step": torch.tensor(5.0), **state}
    return {"model": net, "optim": adam}


def test_what_is_wrong_with_rows_that_were_not_saved_is_told_beside_the_rest() -> None:
    saved = save({"model": Net(torch.float32, 0)})
    adam = torch.optim.AdamW([nn.Parameter(torch.zeros(5))])
    target = {"model": Net(torch.float32, None), "optim": FlatOptimizer(adam, []), "more": 1}
    with pytest.raises(MismatchError, match=r"not in the checkpoint: optim, more") as error:
        load(target, saved)
    assert "optim: parameter 0 of the optimizer, of shape (5,), has no Flat" in str(error.value)


def refused(adam: torch.optim.Optimizer, *flats: Flat) -> str:
    with pytest.raises(StateError) as error:
        save({"model": Net(torch.float32, 0), "optim": FlatOptimizer(adam, flats)})
    return str(error.value)


def test_flats_that_do_not_tell_what_lies_in_a_parameter_are_refused() -> None:
    one, two = nn.Parameter(torch.zeros(1000)), nn.Parameter(torch.zeros(10))
    adam = torch.optim.AdamW([one, two])
    a, c = Flat(one, {"a": (1000,)}), Flat(two, {"c": (2, 5)})
    assert "parameter 1 of the optimizer, of shape (10,), has no Flat" in refused(adam, a)
    loose = Flat(torch.zeros(10), {"c": (2, 5)})
    assert "10 elements here> with c lies in no parameter" in refused(adam, a, loose)
    again = Flat(one.detach()[:10], {"c": (2, 5)})
    assert "two Flats overlap in parameter 0" in refused(adam, a, c, again)
    twice = Flat(two, {"a": (10,)})
    assert "optim: a is in two places of the optimizer" in refused(adam, a, twice)
    adam.state[two] = {"row": torch.zeros(3)}
    assert "the state 'row' of a parameter that is a row of several tensors has shape (3,)" in (
        refused(adam, a, c)
    )


def test_parts_of_one_parameter_each_with_rows_of_their_own() -> None:
    """As ZeRO-3 has it: every tensor is padded and cut by itself."""

    def made(parts: int, at: int, salt: int | None) -> dict[str, object]:
        net = Net(torch.bfloat16, salt)
        cut = [row_of((name,), 0, parts, at) for name in SHAPES]
        whole = nn.Parameter(torch.cat(cut) if salt == 0 else torch.zeros_like(torch.cat(cut)))
        adam = torch.optim.AdamW([whole])
        if salt == 0:
            state = {
                key: torch.cat([row_of((name,), s, parts, at) for name in SHAPES])
                for key, s in STATES.items()
            }
            adam.state[whole] = {"step": torch.tensor(5.0), **state}
        starts = itertools.accumulate([0, *map(len, cut)])
        flats = [
            Flat(whole.detach()[start : start + len(each)], {name: SHAPES[name]})
            for name, each, start in zip(SHAPES, cut, starts, strict=False)
        ]
        return {"model": net, "optim": FlatOptimizer(adam, flats)}

    group = {rank: rank for rank in range(3)}
    saved = join([describe(made(3, rank, 0), group_ranks=group, rank=rank) for rank in range(3)])
    for name in SHAPES:
        assert torch.equal(saved.arrays[f"optim/master/{name}"], values(name, 0))
        assert torch.equal(saved.arrays[f"optim/exp_avg/{name}"], values(name, 1))
    for at in range(4):
        state = made(4, at, None)
        load_as(state, saved, 4, at)
        (whole,) = state["optim"].optimizer.param_groups[0]["params"]
        kept = torch.cat([real((name,), 4, at) for name in SHAPES])
        for tensor, salt in ((whole, 0), (state["optim"].optimizer.state[whole]["exp_avg"], 1)):
            expected = torch.cat([row_of((name,), salt, 4, at) for name in SHAPES])
            assert torch.equal(tensor[kept], expected[kept])


def save_rows(url: str) -> None:
    ucpstore.save(url, rows(dist.get_world_size(), dist.get_rank(), 1), step=1)


def load_rows(url: str) -> None:
    state = rows(dist.get_world_size(), dist.get_rank(), None)
    ucpstore.load(url, state)
    check_rows(state, dist.get_world_size(), dist.get_rank(), torch.bfloat16)


def load_plain(url: str) -> None:
    state = plain(torch.float32, None)
    ucpstore.load(url, state)
    check_plain(state)


def save_plain(url: str) -> None:
    ucpstore.save(url, plain(torch.float32, 1), step=1)


def test_real_ranks(ranks: Ranks, tmp_path: Path) -> None:
    ranks.run(3, save_rows, str(tmp_path / "rows"))
    ranks.run(2, save_plain, str(tmp_path / "plain"))
    for count in (1, 2, 4):
        ranks.run(count, load_rows, str(tmp_path / "rows"))
        ranks.run(count, load_plain, str(tmp_path / "rows"))
        ranks.run(count, load_rows, str(tmp_path / "plain"))

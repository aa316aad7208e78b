"""From what parameters and masters are read, for every pair of dtypes."""

from __future__ import annotations

import pytest
import torch
from describe.engine import Checkpoint, load, save
from torch import nn

from ucpstore import Flat, FlatOptimizer
from ucpstore.errors import MismatchError

VALUE = 1.2987654
"""Another float16 once it has been a bfloat16."""


class One(nn.Module):
    def __init__(self, dtype: torch.dtype, value: float) -> None:
        super().__init__()
        self.w = nn.Parameter(torch.full((2, 3), value, dtype=dtype))


def job(dtype: torch.dtype, master: torch.dtype | None, value: float) -> dict[str, object]:
    """A module, and an optimizer of its parameter or of a row of masters beside it."""
    model = One(dtype, value)
    if master is None:
        return {"model": model, "optim": torch.optim.SGD(model.parameters(), lr=0.1)}
    row = nn.Parameter(torch.full((6,), value, dtype=master))
    flat = Flat(row.detach(), {"w": (2, 3)})
    return {"model": model, "optim": FlatOptimizer(torch.optim.SGD([row], lr=0.1), [flat])}


def rows() -> Checkpoint:
    return save(job(torch.bfloat16, torch.float32, VALUE))


def one(state: dict[str, object]) -> float:
    (value,) = set(state["model"].w.flatten().tolist())
    return value


def row(state: dict[str, object]) -> float:
    ((parameter,),) = [group["params"] for group in state["optim"].optimizer.param_groups]
    (value,) = set(parameter.tolist())
    return value


def rounded(*dtypes: torch.dtype) -> float:
    value = torch.tensor(VALUE)
    for dtype in dtypes:
        value = value.to(dtype)
    return value.item()


def test_a_parameter_of_the_dtype_in_which_it_was_saved_is_read_from_itself() -> None:
    saved = rows()
    saved.arrays["model/w"].fill_(7.0)
    state = job(torch.bfloat16, torch.float32, 0.0)
    load(state, saved)
    assert (one(state), row(state)) == (7.0, rounded(torch.float32))


def test_a_parameter_of_the_masters_dtype_is_read_from_the_master() -> None:
    state = job(torch.float32, None, 0.0)
    load(state, rows())
    assert one(state) == rounded(torch.float32)


def test_a_parameter_of_a_third_dtype_is_its_masters_rounding() -> None:
    """Not that of the saved parameter, which has fewer digits."""
    state = job(torch.float16, torch.float32, 0.0)
    load(state, rows())
    assert one(state) == rounded(torch.float16) != rounded(torch.bfloat16, torch.float16)
    assert row(state) == rounded(torch.float32)


def test_a_parameter_of_a_third_dtype_without_a_master_is_refused() -> None:
    state = job(torch.float16, None, 0.0)
    with pytest.raises(MismatchError) as error:
        load(state, rows())
    assert "model.w: stored as bfloat16, the target is float16" in str(error.value)
    assert one(state) == 0.0


def test_the_parameter_is_read_from_the_master_in_lists_and_tuples_too() -> None:
    for kind in (list, tuple):
        saved = job(torch.bfloat16, torch.float32, VALUE)
        model = saved["model"]
        optimizer = saved["optim"].optimizer
        flat = Flat(saved["optim"].flats[0].tensor, {"w": (2, 3)}, of="nets.1")
        nets = kind([nn.Linear(1, 1), model])
        stored = save({"nets": nets, "optim": FlatOptimizer(optimizer, [flat])})
        target = job(torch.float32, None, 0.0)
        nets = kind([nn.Linear(1, 1), target["model"]])
        load({"nets": nets, "optim": target["optim"]}, stored)
        assert one(target) == rounded(torch.float32)


class Two(nn.Module):
    def __init__(self, first: float, second: float) -> None:
        super().__init__()
        self.a = nn.Parameter(torch.full((3,), first, dtype=torch.bfloat16))
        self.b = nn.Parameter(torch.full((2,), second, dtype=torch.bfloat16))


def two(first: float, second: float, *names: str) -> tuple[dict[str, object], nn.Parameter]:
    """A module of two tensors and a row of those named, with momentum as large as the masters."""
    model = Two(first, second)
    shapes = {name: tuple(getattr(model, name).shape) for name in names}
    row = nn.Parameter(torch.cat([getattr(model, name).detach().float() for name in names]))
    optimizer = torch.optim.SGD([row], lr=0.1, momentum=0.5)
    optimizer.state[row]["momentum_buffer"] = row.detach().clone()
    flat = Flat(row.detach(), shapes)
    return {"model": model, "optim": FlatOptimizer(optimizer, [flat])}, row


def test_a_row_follows_what_was_saved_without_states() -> None:
    """Otherwise the next step would bring its old values back."""
    saved = save(two(1.0, 2.0, "a")[0])
    state, row = two(3.0, 4.0, "a", "b")
    with pytest.raises(MismatchError, match=r"(?m)not in the checkpoint: optim\.b$") as error:
        load(state, saved)
    assert "1 difference" in str(error.value)
    assert row.tolist() == [3, 3, 3, 4, 4]
    target = load(state, saved, strict=False)
    assert target.missing == ("optim.b",)
    assert row.tolist() == [1, 1, 1, 2, 2]
    momentum = state["optim"].optimizer.state[row]["momentum_buffer"]
    assert momentum.tolist() == [1, 1, 1, 4, 4]


@pytest.mark.parametrize("nested", [False, True])
def test_a_row_follows_a_model_that_was_saved_without_an_optimizer(nested: bool) -> None:
    saved = {"model": Two(1.0, 2.0)}
    state, row = two(3.0, 4.0, "a", "b")
    optimizer = state["optim"].optimizer
    if nested:
        flat = Flat(row.detach(), {"a": (3,), "b": (2,)}, of="all.model")
        state = {"all": {**state, "optim": FlatOptimizer(optimizer, [flat])}}
        saved = {"all": saved}
    with pytest.raises(MismatchError, match=r"(?m)not in the checkpoint: .*optim$"):
        load(state, save(saved))
    assert row.tolist() == [3, 3, 3, 4, 4]
    target = load(state, save(saved), strict=False)
    assert target.missing == ("all.optim" if nested else "optim",)
    assert row.tolist() == [1, 1, 1, 2, 2]
    assert optimizer.state[row]["momentum_buffer"].tolist() == [3, 3, 3, 4, 4]


def test_a_row_of_names_that_are_all_new_keeps_its_states() -> None:
    saved = save(two(1.0, 2.0, "a")[0])
    state, row = two(3.0, 4.0, "b")
    target = load(state, saved, strict=False)
    assert (target.missing, target.unexpected) == (("optim.b",), ("optim.a",))
    assert row.tolist() == [2, 2]
    assert state["optim"].optimizer.state[row]["momentum_buffer"].tolist() == [4, 4]

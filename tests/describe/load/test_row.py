"""Optimizers of rows: states that are not there, of other kinds, shapes and places."""

from __future__ import annotations

import pytest
import torch
from describe.engine import join, load, save
from describe.nets import SHAPES, Shaped
from torch import nn

from ucpstore import Flat, FlatOptimizer, Spec
from ucpstore.describe import describe
from ucpstore.errors import MismatchError, StateError
from ucpstore.spec import scaled


def plain(*values: float) -> dict[str, object]:
    """A module, and an optimizer whose momentum is ten times the parameter."""
    net = Shaped(SHAPES, *values)
    sgd = torch.optim.SGD(net.parameters(), lr=0.1, momentum=0.5)
    for parameter in net.parameters():
        sgd.state[parameter]["momentum_buffer"] = parameter.detach() * 10
    return {"model": net, "optim": sgd}


def rows(**buffers: torch.Tensor) -> tuple[dict[str, object], dict[str, nn.Parameter]]:
    """Zeros, each tensor with a row of its own, whose momentum is given."""
    parameters = {name: nn.Parameter(torch.zeros(*shape)) for name, shape in SHAPES.items()}
    sgd = torch.optim.SGD(parameters.values(), lr=0.1, momentum=0.5)
    for name, buffer in buffers.items():
        sgd.state[parameters[name]]["momentum_buffer"] = buffer
    flats = [Flat(p, {name: SHAPES[name]}) for name, p in parameters.items()]
    return {"model": Shaped(SHAPES, 0, 0), "optim": FlatOptimizer(sgd, flats)}, parameters


def momenta(state: dict[str, object], parameters: dict[str, nn.Parameter]) -> list[list[float]]:
    states = state["optim"].optimizer.state
    return [states[each]["momentum_buffer"].tolist() for each in parameters.values()]


def test_a_state_that_one_name_of_a_row_lacks_is_missing() -> None:
    saved = plain(1, 2)
    del saved["optim"].state[saved["model"].b]
    row = nn.Parameter(torch.zeros(5))
    sgd = torch.optim.SGD([row], lr=0.1, momentum=0.5)
    optimizer = FlatOptimizer(sgd, [Flat(row, SHAPES)])
    state = {"model": Shaped(SHAPES, 0, 0), "optim": optimizer}
    with pytest.raises(
        MismatchError, match=r"(?m)not in the checkpoint: optim.momentum_buffer\.b$"
    ):
        load(state, save(saved))
    assert load(state, save(saved), strict=False).missing == ("optim.momentum_buffer.b",)
    assert sgd.state[row]["momentum_buffer"].tolist() == [10, 10, 10, 0, 0]


def test_that_a_parameter_was_frozen_is_no_state() -> None:
    saved = plain(1, 2)
    saved["model"].b.requires_grad = False  # after it was trained
    state, parameters = rows()
    load(state, save(saved))
    assert [[*state["optim"].optimizer.state[each]] for each in parameters.values()] == [
        ["momentum_buffer"]
    ] * 2
    assert momenta(state, parameters) == [[10, 10, 10], [20, 20]]


def test_memory_that_two_states_share_or_that_has_another_shape_is_not_used() -> None:
    shared = torch.zeros(3)
    for b in (shared, torch.zeros(1)):
        state, parameters = rows(a=shared, b=b)
        load(state, save(plain(1, 2)))
        assert momenta(state, parameters) == [[10, 10, 10], [20, 20]]
    both = nn.Parameter(torch.zeros(3)), nn.Parameter(torch.zeros(3))
    shapes = {"a": (3,), "b": (3,)}
    sgd = torch.optim.SGD(both, lr=0.1, momentum=0.5)
    for each in both:
        sgd.state[each]["momentum_buffer"] = shared
    source = Shaped(shapes, 1, 2)
    own = torch.optim.SGD(source.parameters(), lr=0.1, momentum=0.5)
    for each in source.parameters():
        own.state[each]["momentum_buffer"] = each.detach() * 10
    flats = [Flat(each, {name: (3,)}) for name, each in zip(shapes, both, strict=True)]
    target = {"model": Shaped(shapes, 0, 0), "optim": FlatOptimizer(sgd, flats)}
    load(target, save({"model": source, "optim": own}))
    assert [sgd.state[each]["momentum_buffer"][0].item() for each in both] == [10, 20]


def test_a_state_that_is_made_has_the_stored_dtype() -> None:
    saved = plain(1, 2)
    for state in saved["optim"].state.values():
        state["momentum_buffer"] = state["momentum_buffer"].double()
    state, parameters = rows()
    load(state, save(saved))
    states = state["optim"].optimizer.state
    assert {states[p]["momentum_buffer"].dtype for p in parameters.values()} == {torch.float64}


def test_a_state_that_is_made_is_as_wide_as_its_row_where_a_cast_allows_it() -> None:
    saved = plain(1, 2)
    states = saved["optim"].state
    for state in states.values():
        state["momentum_buffer"] = state["momentum_buffer"].bfloat16()
    narrow = save(saved)
    with pytest.warns(UserWarning, match=r"2 of those it gets are of torch\.bfloat16.*cast=\['opt"):
        load(rows()[0], narrow)

    state, parameters = rows()
    load(state, narrow, cast="optim.*")
    made = [state["optim"].optimizer.state[p]["momentum_buffer"] for p in parameters.values()]
    assert [each.dtype for each in made] == [torch.float32] * 2
    assert momenta(state, parameters) == [[10, 10, 10], [20, 20]]


def test_a_row_that_is_made_is_as_wide_as_its_widest_name() -> None:
    saved = plain(1, 2)
    own = saved["optim"].state[saved["model"].b]
    own["momentum_buffer"] = own["momentum_buffer"].double()
    row = nn.Parameter(torch.zeros(5))
    sgd = torch.optim.SGD([row], lr=0.1, momentum=0.5)
    state = {"model": Shaped(SHAPES, 0, 0), "optim": FlatOptimizer(sgd, [Flat(row, SHAPES)])}
    with pytest.raises(MismatchError, match=r"optim.momentum_buffer\.a: stored as float32"):
        load(state, save(saved))
    load(state, save(saved), cast="optim.momentum_buffer.a")
    assert sgd.state[row]["momentum_buffer"].dtype == torch.float64
    assert sgd.state[row]["momentum_buffer"].tolist() == [10, 10, 10, 20, 20]


def test_the_step_of_a_row_of_0d_tensors_is_one_value() -> None:
    net = Shaped({"d": ()}, 3)
    adam = torch.optim.Adam(net.parameters())
    moments = {key: torch.tensor(0.5) for key in ("exp_avg", "exp_avg_sq")}
    adam.state[net.d] = {"step": torch.tensor(7.0), **moments}
    row = nn.Parameter(torch.zeros(1))
    fresh = torch.optim.Adam([row])
    flat = Flat(row, {"d": ()})
    load(
        {"model": Shaped({"d": ()}, 0), "optim": FlatOptimizer(fresh, [flat])},
        save({"model": net, "optim": adam}),
    )
    assert fresh.state[row]["step"].shape == ()
    assert fresh.state[row]["step"].item() == 7
    assert [fresh.state[row][key].tolist() for key in moments] == [[0.5], [0.5]]
    assert row.tolist() == [3]


def test_rows_without_a_module_are_stored_as_masters_and_come_back() -> None:
    row = nn.Parameter(torch.tensor([1.0, 1, 1, 2, 2]))
    saved = save({"optim": FlatOptimizer(torch.optim.SGD([row], lr=0.1), [Flat(row, SHAPES)])})
    assert {*saved.arrays} == {"optim/master/a", "optim/master/b"}
    other = nn.Parameter(torch.zeros(5))
    flat = Flat(other, SHAPES)
    load({"optim": FlatOptimizer(torch.optim.SGD([other], lr=0.1), [flat])}, saved)
    assert other.tolist() == [1, 1, 1, 2, 2]


def test_a_state_of_a_row_may_not_be_called_as_masters_are() -> None:
    state, parameters = rows(a=torch.zeros(3), b=torch.zeros(2))
    state["optim"].optimizer.state[parameters["a"]]["master"] = torch.tensor(1.0)
    with pytest.raises(StateError, match=r"the state 'master' of a parameter that is a row"):
        save(state)


def test_a_rule_that_scales_a_tensor_scales_its_master_and_not_its_momentum() -> None:
    spec = Spec({"tp": 2}, {"model.a": scaled("tp")})

    def described(rank: int) -> object:
        row = nn.Parameter(torch.full((3,), 1.5).double())
        sgd = torch.optim.SGD([row], lr=0.1, momentum=0.5)
        sgd.state[row]["momentum_buffer"] = torch.full((3,), 7.0)
        optimizer = FlatOptimizer(sgd, [Flat(row, {"a": (3,)}, ())])
        state = {"model": Shaped({"a": (3,)}, 1), "optim": optimizer}
        return describe(state, group_ranks={0: 0, 1: 1}, rank=rank, spec=spec)

    saved = join([described(0), described(1)])
    found = {path: array[0].item() for path, array in saved.arrays.items()}
    assert found == {"model/a": 2, "optim/master/a": 3, "optim/momentum_buffer/a": 7}


def with_own_master(dtype: torch.dtype) -> tuple[dict[str, object], torch.Tensor]:
    """A plain job whose optimizer keeps masters itself, as some do."""
    net = Shaped({"a": (3,)}, 0).to(dtype)
    sgd = torch.optim.SGD(net.parameters(), lr=0.1)
    master = torch.zeros(3)
    sgd.state[net.a]["master"] = master
    return {"model": net, "optim": sgd}, master


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32], ids=str)
def test_an_optimizer_that_keeps_masters_itself_gets_those_of_rows(dtype: torch.dtype) -> None:
    row = nn.Parameter(torch.full((3,), 1.2987654))
    optimizer = FlatOptimizer(torch.optim.SGD([row], lr=0.1), [Flat(row, {"a": (3,)})])
    net = Shaped({"a": (3,)}, 5).bfloat16()
    state, master = with_own_master(dtype)
    load(state, save({"model": net, "optim": optimizer}), cast="model.a")
    assert torch.equal(master, row)
    # not from the master, of which the target has a copy to itself
    assert state["model"].a.tolist() == [5, 5, 5]


def test_what_a_module_was_saved_as_need_not_be_there() -> None:
    saved = plain(1, 2)
    other = {"other": saved["model"], "optim": saved["optim"]}
    with pytest.raises(MismatchError, match=r"(?m)not in the checkpoint: model$"):
        load(plain(0, 0), save(other))
    nets = {"nets": [saved["model"]], "optim": saved["optim"]}
    target = plain(0, 0)
    more = {"nets": [nn.Linear(1, 1), target["model"]], "optim": target["optim"]}
    with pytest.raises(MismatchError, match="nets: saved with 1 elements, the target has 2"):
        load(more, save(nets))


def test_states_of_what_a_row_took_the_place_of_are_not_kept() -> None:
    net = Shaped(SHAPES, 1, 2)
    adagrad = torch.optim.Adagrad(net.parameters(), lr=0.1)  # makes its states now
    row = nn.Parameter(torch.ones(5))
    adagrad.param_groups[0]["params"] = [row]
    adagrad.state[row] = {"step": torch.tensor(1.0), "sum": torch.ones(5)}
    saved = save({"model": net, "optim": FlatOptimizer(adagrad, [Flat(row, SHAPES)])})
    assert {path for path in saved.arrays if path.startswith("optim/sum")} == {
        "optim/sum/a",
        "optim/sum/b",
    }
    adagrad.state[nn.Parameter(torch.ones(7))] = {"sum": torch.ones(7)}
    with pytest.raises(StateError, match=r"of shape \(7,\) that is in none of its groups"):
        save({"model": net, "optim": FlatOptimizer(adagrad, [Flat(row, SHAPES)])})

"""Names of the tensors that lie in rows."""

from __future__ import annotations

import pytest
import torch
from describe.engine import save
from describe.nets import SHAPES, Shaped
from torch import nn

from ucpstore import Flat, FlatOptimizer
from ucpstore.errors import StateError


@pytest.mark.parametrize(
    ("shapes", "text"),
    [
        (
            {"model.a": (3,), "b": (2,)},
            "optim: a Flat names 'model.a', but the module 'model' of the state has no such "
            "parameter; it has a, b, ... Names are the module's own, without its key",
        ),
        (
            {"a": (1, 3), "b": (2,)},
            "optim: a Flat names 'a' with shape (1, 3), but it has shape (3,) in the module "
            "'model' of the state",
        ),
    ],
)
def test_rows_name_what_the_module_has(shapes: dict[str, tuple[int, ...]], text: str) -> None:
    row = nn.Parameter(torch.zeros(5))
    sgd = torch.optim.SGD([row], lr=0.1)
    state = {"model": Shaped(SHAPES, 0, 0), "optim": FlatOptimizer(sgd, [Flat(row, shapes)])}
    with pytest.raises(StateError) as caught:
        save(state)
    assert str(caught.value) == text


def test_rows_may_name_a_tied_parameter_by_any_of_its_names() -> None:
    net = Shaped({"a": (3,), "b": (3,)}, 1, 2)
    net.b = net.a
    row = nn.Parameter(torch.ones(3))
    sgd = torch.optim.SGD([row], lr=0.1)
    saved = save({"model": net, "optim": FlatOptimizer(sgd, [Flat(row, {"b": (3,)})])})
    assert "optim" in str(saved.tree)


def test_tensors_of_one_name_in_two_modules_are_told_by_the_modules() -> None:
    shapes = {"a": (3,)}
    row = nn.Parameter(torch.tensor([1.0, 1, 1, 2, 2, 2]))
    flats = [Flat(row.detach()[at : at + 3], shapes, of=of) for at, of in ((0, "one"), (3, "two"))]
    optimizer = FlatOptimizer(torch.optim.SGD([row], lr=0.1, momentum=0.5), flats)
    optimizer.optimizer.state[row]["momentum_buffer"] = row.detach() * 10
    saved = save({"one": Shaped(shapes, 1), "two": Shaped(shapes, 2), "optim": optimizer})
    found = {path: array[0].item() for path, array in saved.arrays.items() if "optim" in path}
    assert found == {"optim/momentum_buffer/one.a": 10, "optim/momentum_buffer/two.a": 20}

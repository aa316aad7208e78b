"""Axes: which rank lies where."""

from __future__ import annotations

import itertools
import pickle

import numpy as np
import pytest
import torch

from ucpstore import StateError
from ucpstore.spec import Axes


def test_ranks_are_in_row_major_order_of_the_coordinates() -> None:
    axes = Axes({"pp": 2, "dp": 3, "tp": 4})
    places = itertools.product(range(2), range(3), range(4))
    for rank, (pp, dp, tp) in enumerate(places):
        assert axes.coordinates(rank) == {"pp": pp, "dp": dp, "tp": tp}
    assert str(axes) == "pp=2 x dp=3 x tp=4"
    assert axes.size(("pp", "tp")) == 8
    assert axes.size(("ep",)) == 1


def test_ranks_may_be_given_in_any_order() -> None:
    axes = Axes({"dp": 2, "tp": 2}, [3, 1, 0, 2])
    assert axes.coordinates(3) == {"dp": 0, "tp": 0}
    assert axes.coordinates(2) == {"dp": 1, "tp": 1}
    assert axes.mesh([("tp",), ("dp",)], {}) == ((2, 2), (3, 0, 1, 2))


@pytest.mark.parametrize("fixed", [{}, {"pp": 1}, {"pp": 0, "tp": 3}])
@pytest.mark.parametrize("order", [["pp", "dp", "tp"], ["tp", "pp", "dp"], ["dp", "tp", "pp"]])
def test_meshes_are_what_torch_gives_by_permuting_and_indexing(
    order: list[str], fixed: dict[str, int]
) -> None:
    sizes = {"pp": 2, "dp": 3, "tp": 4}
    ranks = torch.arange(24).reshape(2, 3, 4)
    for axis, at in fixed.items():
        ranks = ranks.narrow(list(sizes).index(axis), at, 1)
    expected = ranks.permute([list(sizes).index(axis) for axis in order])
    groups = [(axis,) for axis in order if axis not in fixed]
    extents, members = Axes(sizes).mesh(groups, fixed)
    assert extents == tuple(sizes[axis] for (axis,) in groups)
    assert members == tuple(expected.flatten().tolist())


def test_axes_of_a_group_count_as_one_and_unknown_ones_have_size_1() -> None:
    axes = Axes({"dp": 2, "tp": 2})
    assert axes.mesh([("tp", "dp"), ("ep",)], {"cp": 0}) == ((4, 1), (0, 2, 1, 3))
    assert Axes({}).mesh([()], {}) == ((1,), (0,))
    assert str(Axes({})) == "(none)"


def test_axes_can_be_sent_to_other_processes() -> None:
    axes = Axes({"dp": 2, "tp": 2})
    axes.mesh([("tp",)], {"dp": 1})
    again = pickle.loads(pickle.dumps(axes))  # noqa: S301  # our own
    assert again.mesh([("tp",)], {"dp": 1}) == ((2,), (2, 3))


@pytest.mark.parametrize(
    ("sizes", "ranks", "words"),
    [
        ({"tp": 0}, None, "got 'tp': 0"),
        ({"tp": 2.0}, None, "got 'tp': 2.0"),
        ({"tp": np.int64(2)}, None, "axes must be names with sizes of at least 1"),
        ({"": 2}, None, "got '': 2"),
        ({1: 2}, None, "got 1: 2"),
        ({"tp": 2}, [0], "the axes tp=2 have 2 places, but 1 ranks are given, 1 of them different"),
        ({"tp": 2}, [0, 0], "2 ranks are given, 1 of them different; give one rank for each place"),
        ({"tp": 2}, [0.0, 1.0], "ranks must be whole numbers, but they are [0.0, 1.0]"),
    ],
)
def test_axes_that_make_no_sense_are_refused(sizes: dict, ranks: list | None, words: str) -> None:
    with pytest.raises(StateError) as caught:
        Axes(sizes, ranks)
    assert words in str(caught.value)


def test_a_rank_that_is_on_no_axis_is_refused() -> None:
    with pytest.raises(StateError) as caught:
        Axes({"dp": 2, "tp": 2}).coordinates(4)
    assert str(caught.value) == (
        "rank 4 has no place on the axes dp=2 x tp=2 of the specification, which are for 4 ranks; "
        "the sizes must be those of the job that saves or loads"
    )

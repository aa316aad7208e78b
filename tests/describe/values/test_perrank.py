"""Values that differ between ranks."""

from __future__ import annotations

import pytest
import torch
from describe.engine import join, load, save
from torch import nn
from torch.distributed.device_mesh import DeviceMesh

from ucpstore.describe import describe, match
from ucpstore.errors import MismatchError, StateError, UnsupportedError
from ucpstore.perrank import PerRank
from ucpstore.spec import Spec

TWO = {0: 0, 1: 1}


def _load(state, checkpoint, rank, ranks=TWO, **options):
    from describe.engine import read

    target = match(
        state, checkpoint.tree, checkpoint.infos, group_ranks=ranks, rank=rank, **options
    )
    read(target, checkpoint)
    return target


def _saved(make, ranks=TWO, **options):
    return join([describe(make(rank), group_ranks=ranks, rank=rank, **options) for rank in ranks])


class Loader:
    def __init__(self, position: int) -> None:
        self.position = position

    def state_dict(self) -> dict[str, object]:
        return {"position": self.position, "seen": torch.arange(self.position)}

    def load_state_dict(self, state: dict[str, object]) -> None:
        self.position = state["position"]
        self.seen = state["seen"]


def test_each_rank_gets_its_own_back():
    checkpoint = _saved(lambda rank: {"x": PerRank({"n": rank, "s": "ab" * rank})})
    assert list(checkpoint.arrays) == ["x/packed"]
    for rank in (0, 1):
        inner: dict[str, object] = {"n": -1}
        state = {"x": PerRank(inner)}
        _load(state, checkpoint, rank)
        assert state["x"].value is inner
        assert inner == {"n": rank, "s": "ab" * rank}


def test_values_are_set_and_long_ones_lie_alone():
    checkpoint = _saved(lambda rank: {"x": PerRank(b"z" * (100_000 * rank))})
    assert sorted(checkpoint.arrays) == ["x/1", "x/packed"]
    for rank in (0, 1):
        state = {"x": PerRank(None)}
        _load(state, checkpoint, rank)
        assert state["x"].value == b"z" * (100_000 * rank)


def test_patterns_make_values_per_rank():
    checkpoint = _saved(lambda rank: {"loader": Loader(rank + 3), "n": 1}, per_rank="loader")
    target = Loader(0)
    _load({"loader": target, "n": 0}, checkpoint, 1)
    assert target.position == 4
    assert target.seen.tolist() == [0, 1, 2, 3]


def test_patterns_below_an_object():
    checkpoint = _saved(lambda rank: {"loader": Loader(rank + 3)}, per_rank=["loader.*"])
    assert sorted(checkpoint.arrays) == ["loader/position/packed", "loader/seen/packed"]
    target = Loader(0)
    _load({"loader": target}, checkpoint, 1)
    assert (target.position, target.seen.tolist()) == (4, [0, 1, 2, 3])


def test_generators_are_per_rank_by_themselves():
    def seeded(rank: int) -> dict[str, object]:
        return {"rng": torch.Generator().manual_seed(rank)}

    checkpoint = _saved(seeded)
    target = torch.Generator()
    state = {"rng": target}
    _load(state, checkpoint, 1)
    assert state["rng"] is target
    expected = torch.Generator().manual_seed(1)
    assert torch.equal(torch.rand(3, generator=target), torch.rand(3, generator=expected))


def test_an_axis_shares_values_between_ranks():
    ranks = {rank: rank for rank in range(4)}
    checkpoint = _saved(lambda rank: {"x": PerRank(rank // 2, axis=("dp", rank // 2, 2))}, ranks)
    assert checkpoint.tree["dict"][0][1] == {"per_rank": {"path": "x", "axis": "dp", "count": 2}}
    state = {"x": PerRank(None, axis=("dp", 1, 2))}
    _load(state, checkpoint, 0)
    assert state["x"].value == 1


def test_a_mesh_is_an_axis(fake_ranks):
    fake_ranks(3, 4)
    mesh = DeviceMesh("cpu", torch.arange(4).reshape(2, 2), mesh_dim_names=("dp", "tp"))
    ranks = {rank: rank for rank in range(4)}
    document = describe({"x": PerRank(1, axis=mesh["dp"])}, group_ranks=ranks).per_rank[0]
    assert (document.path, document.axis, document.index, document.count) == ("x", "dp", 1, 2)
    with pytest.raises(StateError, match=r"^x: the axis of a PerRank must be a mesh of one dim"):
        describe({"x": PerRank(1, axis=mesh)}, group_ranks=ranks)


def test_b40_another_count_is_refused_or_reported():
    checkpoint = _saved(lambda rank: {"loader": PerRank(rank)})
    three = {0: 0, 1: 1, 2: 2}
    state = {"loader": PerRank(-1)}
    with pytest.raises(MismatchError) as caught:
        _load(state, checkpoint, 0, three)
    assert str(caught.value).startswith(
        "the target does not fit the checkpoint (1 difference); nothing was changed\n"
        "  loader: a value per rank, saved for 2 along the axis 'rank'; the target has 3 along "
        "'rank'. "
    )
    assert "\n" not in str(caught.value).partition("changed\n")[2]
    done = _load(state, checkpoint, 0, three, strict=False)
    assert done.missing == ("loader",)
    assert state["loader"].value == -1
    with pytest.raises(MismatchError, match=r"axis 'rank'; the target has 2 along 'dp'"):
        _load({"loader": PerRank(-1, axis=("dp", 0, 2))}, checkpoint, 0)


def test_b40_a_function_makes_the_values_of_another_count():
    long = {1: b"z" * 100_000}
    checkpoint = _saved(lambda rank: {"x": PerRank({"n": [rank], "b": long.get(rank, b"")})})
    assert sorted(checkpoint.arrays) == ["x/1", "x/packed"]
    asked: list[object] = []

    def deal(values, index, count):
        asked.append((values, index, count))
        return {"n": [each["n"][0] for each in values][index::count], "b": values[-1]["b"]}

    for rank, expected in enumerate(([0], [1], [])):
        state = {"x": PerRank({"n": [-1], "b": b""}, reshape=deal)}
        inner = state["x"].value
        _load(state, checkpoint, rank, {0: 0, 1: 1, 2: 2})
        assert asked.pop() == ([{"n": [0], "b": b""}, {"n": [1], "b": long[1]}], rank, 3)
        assert state["x"].value is inner
        assert inner == {"n": expected, "b": long[1]}
    state = {"x": PerRank({}, reshape=deal)}
    _load(state, checkpoint, 1)
    assert not asked, "under the same axis and count each index has its own"
    assert state["x"].value["n"] == [1]


def test_a_function_gets_and_gives_states_of_objects_and_generators():
    def make(rank):
        loader = Loader(rank + 3)
        return {"l": PerRank(loader), "g": PerRank(torch.Generator().manual_seed(rank))}

    checkpoint = _saved(make)
    target = Loader(0)
    generator = torch.Generator()

    def furthest(values, index, count):
        return max(values, key=lambda each: each["position"])

    def of_rank_1(values, index, count):
        return values[1]

    state = {"l": PerRank(target, reshape=furthest), "g": PerRank(generator, reshape=of_rank_1)}
    load(state, checkpoint)
    assert (target.position, target.seen.tolist()) == (4, [0, 1, 2, 3])
    drawn = torch.rand(3, generator=generator)
    assert torch.equal(drawn, torch.rand(3, generator=torch.Generator().manual_seed(1)))


def test_what_a_function_raises_names_the_value():
    checkpoint = _saved(lambda rank: {"x": PerRank(rank)})

    def fail(values, index, count):
        raise ValueError("cannot deal")

    with pytest.raises(StateError, match=r"^x: it refused its saved state: ValueError: cannot"):
        load({"x": PerRank(0, reshape=fail)}, checkpoint)


def test_the_axis_may_be_one_of_the_specification():
    spec = Spec({"dp": 2, "tp": 2}, {})
    ranks = {rank: rank for rank in range(4)}
    for rank in ranks:
        state = {"x": PerRank(rank // 2, axis="dp"), "y": PerRank(0, axis="pp")}
        found = describe(state, group_ranks=ranks, rank=rank, spec=spec).per_rank
        assert [(each.axis, each.index, each.count) for each in found] == [
            ("dp", rank // 2, 2),
            ("pp", 0, 1),
        ]


def test_shared_and_per_rank_values_are_not_swapped():
    with pytest.raises(MismatchError, match=r"x: the target differs by rank, but the value 1"):
        load({"x": PerRank(0)}, save({"x": 1}))
    state = {"x": 0}
    load(state, save({"x": PerRank(5)}))
    assert state == {"x": 5}


def test_what_cannot_be_per_rank_is_refused():
    net = nn.Linear(1, 1)
    for value, text in (
        (net, r"^x: a Linear cannot be part"),
        ({"a": [torch.optim.SGD(net.parameters())]}, r"^x\.a\.0: a SGD cannot be part"),
        (PerRank(1), r"^x: PerRank inside"),
        ({"a": lambda: 1}, r"^x\.a: functions"),
    ):
        with pytest.raises(UnsupportedError, match=text):
            save({"x": PerRank(value)})
    with pytest.raises(StateError, match=r"^x: the axis of a PerRank is 'dp', but there is no sp"):
        save({"x": PerRank(1, axis="dp")})
    with pytest.raises(StateError, match=r"^x: the reshape of a PerRank must be a function"):
        save({"x": PerRank(1, reshape=3)})  # type: ignore[arg-type]
    for axis in (("dp", 2, 2), ("dp", True, 2), (1, 0, 1)):
        with pytest.raises(StateError, match=r"^x: the axis of a PerRank must be None"):
            save({"x": PerRank(1, axis=axis)})


def test_per_rank_values_inside_of_tuples():
    checkpoint = save({"t": (torch.ones(1), (1, 2))}, per_rank="t.1")
    state = {"t": (torch.zeros(1), (0, 0))}
    weight = state["t"][0]
    load(state, checkpoint)
    assert state["t"] == (weight, (1, 2))
    assert weight.item() == 1.0


def test_a_generator_takes_a_state_and_nothing_else() -> None:
    saved = save({"g": torch.Generator().manual_seed(3)})
    target = PerRank(torch.Generator(), ("b", 0, 2), reshape=lambda values, index, count: values)
    with pytest.raises(StateError, match=r"g: it refused .*TypeError: a torch\.Generator takes"):
        load({"g": target}, saved)

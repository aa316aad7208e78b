"""Rows of flattened tensors, cut over data parallel ranks, alone and in tensor parallel blocks."""

from __future__ import annotations

import itertools
import math
from pathlib import Path

import numpy as np
import pytest
import torch
import torch.distributed as dist
from ranks.harness import Ranks
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Shard, distribute_tensor

import ucpstore
from ucpstore import Flat, Spec
from ucpstore.spec import replicate, scaled, shard

SHAPES = {"a": (37, 3), "b": (1000,), "c": (5, 4, 6), "d": (), "e": (700, 600), "f": (2, 0)}
FUSED = (400, 200, 100)
"""Sections of `e`."""


def whole(salt: int) -> dict[str, torch.Tensor]:
    made, start = {}, salt * 10_000_000
    for name, shape in SHAPES.items():
        count = math.prod(shape)
        made[name] = torch.arange(start, start + count, dtype=torch.float64).reshape(shape)
        start += count
    return made


def block(name: str, tensor: torch.Tensor, tp: int, at: int) -> torch.Tensor:
    """What a tensor parallel rank has: columns of `c`, fused rows of `e`, all of the others."""
    if name == "c":
        return tensor.chunk(tp, 1)[at]
    if name == "e":
        return torch.cat([section.chunk(tp)[at] for section in tensor.split(FUSED)])
    return tensor


def place(sizes: dict[str, int], rank: int) -> dict[str, int]:
    at = list(itertools.product(*map(range, sizes.values())))[rank]
    return dict(zip(sizes, at, strict=True))


def flat(sizes: dict[str, int], salt: int | None, over: tuple[str, ...]) -> tuple[Flat, Spec]:
    """This rank's part of the row of all blocks with gaps between them; -1 where `salt` is None."""
    at = place(sizes, dist.get_rank())
    blocks = {n: block(n, t, sizes["tp"], at["tp"]) for n, t in whole(salt or 0).items()}
    offsets, row = {}, []
    position = 0
    for name, each in blocks.items():
        offsets[name] = position
        row.append(torch.cat([each.reshape(-1), torch.full((3,), -7.0, dtype=torch.float64)]))
        position += row[-1].numel()
    parts = math.prod(sizes[axis] for axis in over)
    padded = torch.full((-(-position // parts) * parts,), -7.0, dtype=torch.float64)
    padded[:position] = torch.cat(row)
    coordinate = 0
    for axis in over:
        coordinate = coordinate * sizes[axis] + at[axis]
    part = padded.chunk(parts)[coordinate].clone()
    if salt is None:
        part[part != -7.0] = -1.0
    spec = Spec(
        sizes,
        {
            "model.c": [shard(1, "tp"), replicate("dp")],
            "model.e": [replicate("dp"), shard(0, "tp", sections=FUSED)],
            "model.[abdf]": replicate("tp", "dp"),
        },
        replicate=[axis for axis in sizes if axis not in ("tp", "dp")],
    )
    shapes = {name: tuple(each.shape) for name, each in blocks.items()}
    return Flat(part, shapes, over, offsets=offsets), spec


def save(url: str, sizes: dict[str, int], over: tuple[str, ...]) -> None:
    row, spec = flat(sizes, 1, over)
    ucpstore.save(url, {"optim": {"exp_avg": row, "step": 3}}, step=1, spec=spec)


def load(url: str, sizes: dict[str, int], over: tuple[str, ...]) -> bool:
    target, spec = flat(sizes, None, over)
    target.tensor[target.tensor != -7.0] = -1.0
    ucpstore.load(url, {"optim": {"exp_avg": target, "step": 0}}, spec=spec)
    expected, _ = flat(sizes, 1, over)
    return torch.equal(target.tensor, expected.tensor)


CASES = [
    ({"dp": 1, "tp": 1}, ("dp",)),
    ({"dp": 3, "tp": 1}, ("dp",)),
    ({"dp": 2, "tp": 2}, ("dp",)),
    ({"tp": 2, "dp": 2}, ("dp",)),
    ({"dp": 2, "sp": 2, "tp": 1}, ("dp", "sp")),
    ({"dp": 2, "sp": 2, "tp": 1}, ("dp",)),
    ({"dp": 1, "tp": 4}, ("dp",)),
]


@pytest.mark.parametrize("source", CASES, ids=str)
def test_any_row_loads_what_any_other_saved(ranks: Ranks, tmp_path: Path, source) -> None:
    url = str(tmp_path / "s")
    ranks.run(math.prod(source[0].values()), save, url, *source)
    for target in CASES:
        assert all(ranks.run(math.prod(target[0].values()), load, url, *target)), target
    stored = ucpstore.CheckpointStore(url).open()["optim"]
    for name, expected in whole(1).items():
        assert torch.equal(stored[f"exp_avg/{name}"].read(), expected), name


def save_whole_load_flat(url: str) -> list[bool]:
    """A dict of plain tensors and DTensors into rows, and rows into such a dict."""
    mesh = init_device_mesh("cpu", (dist.get_world_size(),))
    tensors: dict[str, torch.Tensor] = dict(whole(1))
    tensors["e"] = distribute_tensor(tensors["e"], mesh, [Shard(1)])
    ucpstore.save(url, {"optim": {"exp_avg": tensors}}, step=1)
    sizes = {"dp": dist.get_world_size(), "tp": 1}
    target, _ = flat(sizes, None, ("dp",))
    target.over = mesh
    ucpstore.load(url, {"optim": {"exp_avg": target}})
    expected, _ = flat(sizes, 1, ("dp",))
    target.over = None
    ucpstore.save(url, {"optim": {"exp_avg": target}}, step=2)
    back = {
        name: torch.full_like(each, -1.0) if each.numel() else each
        for name, each in tensors.items()
    }
    ucpstore.load(url, {"optim": {"exp_avg": back}}, step=2)
    same = [torch.equal(target.tensor, expected.tensor)]
    for name, each in back.items():
        left, right = (t.to_local() if isinstance(t, DTensor) else t for t in (each, tensors[name]))
        same.append(torch.equal(left, right))
    return same


def test_a_row_and_a_dict_of_whole_tensors_are_one(ranks: Ranks, tmp_path: Path) -> None:
    for same in ranks.run(3, save_whole_load_flat, str(tmp_path / "s")):
        assert same == [True] * 7


def refusals(url: str) -> list[str]:
    """What is wrong with rows, each tried on every rank."""
    ones, found = torch.ones(10), []
    mesh = init_device_mesh("cpu", (2,))
    for made in (
        Flat(ones, {"a": (7, 3)}),
        Flat(ones.reshape(2, 5), {"a": (7, 2)}),
        Flat(ones[::2], {"a": (10,)}),
        Flat(ones, {"a": (10,), "b": (10,)}, offsets={"a": 0, "b": 9}),
        Flat(ones, {"a": (10,), "b": (10,)}, offsets={"a": 0}),
        Flat(ones, {"a": (20,)}, "dp"),
        Flat(distribute_tensor(ones, mesh, [Shard(0)]), {"a": (20,)}),
        Flat(torch.ones(10 + dist.get_rank()), {"a": (20,)}),
    ):
        try:
            ucpstore.save(url, {"o": {"m": made}}, step=1)
        except ucpstore.StateError as error:
            found.append(str(error))
    return found


def test_rows_that_do_not_fit_are_refused_before_anything_is_written(
    ranks: Ranks, tmp_path: Path
) -> None:
    url = tmp_path / "never"
    for found in ranks.run(2, refusals, str(url)):
        for text, wanted in zip(
            found,
            (
                "o.m: lengths do not add up: 2 parts of 10 elements hold 20, but model.a of shape",
                "must be contiguous and have 1 dimension, but it has shape (2, 5)",
                "shape (5,) and strides (2,)",
                "b of shape (10,) begins at 9, but what lies before it ends at 10",
                "the offsets of a Flat must name the same tensors as its shapes, but b",
                "cut over 'dp', but there is no specification",
                "the tensor of a Flat is a DTensor",
                "o/m/a",
            ),
            strict=True,
        ):
            assert wanted in text
    assert not url.exists()


def load_missing(url: str) -> str:
    row, _ = flat({"dp": 2, "tp": 1}, None, ("dp",))
    row.over, row.offsets, row.shapes["g"] = None, None, (2, 2)
    before = row.tensor.clone()
    try:
        ucpstore.load(url, {"optim": {"exp_avg": row}})
    except ucpstore.MismatchError as error:
        assert torch.equal(row.tensor, before)
        return str(error)
    return "loaded"


def test_a_tensor_of_a_row_that_was_not_saved_is_missing(ranks: Ranks, tmp_path: Path) -> None:
    url = str(tmp_path / "s")
    ranks.run(2, save, url, {"dp": 2, "tp": 1}, ("dp",))
    for told in ranks.run(2, load_missing, url):
        assert "optim.exp_avg.g" in told


def load_twice_into_one(url: str) -> str:
    row, spec = flat({"dp": 2, "tp": 1}, None, ("dp",))
    ucpstore.save(url, {"o": {"a": row, "b": row}}, step=1, spec=spec)
    try:
        ucpstore.load(url, {"o": {"a": row, "b": row}}, spec=spec)
    except ucpstore.MismatchError as error:
        return str(error)
    return "loaded"


def test_two_rows_in_the_same_memory_are_refused(ranks: Ranks, tmp_path: Path) -> None:
    for told in ranks.run(2, load_twice_into_one, str(tmp_path / "s")):
        assert "o.b and o.a: the same memory in the target" in told


def scaled_rows(url: str) -> dict[str, object]:
    """Two tensor parallel ranks that each have a bias, divided by two, in a row of their own."""
    spec = Spec({"tp": 2}, {"model.bias": scaled("tp"), "model.w": shard(0, "tp")})
    bias, w = torch.tensor([1.5, -2.0]), torch.arange(3.0) + 3 * dist.get_rank()
    found: dict[str, object] = {}
    for is_state in (None, False, True):
        part = torch.cat([bias, torch.tensor([-7.0]), w])
        offsets = {"bias": 0, "w": 3}
        shapes = {"bias": (2,), "w": (3,)}
        row = Flat(part, shapes, (), offsets=offsets, is_state=is_state)
        place = f"{url}-{is_state}"
        try:
            ucpstore.save(place, {"o": {"x": row}}, step=1, spec=spec)
        except ucpstore.StateError as error:
            found[str(is_state)] = str(error)
            continue
        expected = part.clone()
        part.fill_(-7.0)
        ucpstore.load(place, {"o": {"x": row}}, spec=spec)
        stored = ucpstore.CheckpointStore(place).open()["o"]["x/bias"].read().tolist()
        found[str(is_state)] = (torch.equal(part, expected), stored)
        dist.barrier()
    return found


def test_a_scaled_tensor_is_scaled_in_a_row_of_parameters_only(
    ranks: Ranks, tmp_path: Path
) -> None:
    for found in ranks.run(2, scaled_rows, str(tmp_path / "s")):
        assert "model.bias: rule 'model.bias' scales parameters and their masters" in str(
            found["None"]
        )
        assert found["False"] == (True, [3.0, -4.0])
        assert found["True"] == (True, [1.5, -2.0])


def tied_pair() -> torch.nn.ModuleDict:
    pair = torch.nn.ModuleDict({n: torch.nn.Linear(3, 5, bias=False) for n in ("embed", "head")})
    pair["head"].weight = pair["embed"].weight
    return pair


def test_a_row_has_a_tied_tensor_once(tmp_path: Path) -> None:
    url, saved = str(tmp_path / "s"), tied_pair()
    ucpstore.save(url, {"model": saved}, step=1)
    row = Flat(torch.zeros(15), {"embed.weight": (5, 3)})
    ucpstore.load(url, {"model": row})
    assert torch.equal(row.tensor, saved["embed"].weight.detach().flatten())

    ucpstore.save(url, {"model": row}, step=2)
    back = tied_pair()
    ucpstore.load(url, {"model": back}, step=2)
    assert torch.equal(back["head"].weight, saved["embed"].weight)


def test_what_is_tied_to_nothing_that_was_saved_is_missing(tmp_path: Path) -> None:
    url, target = str(tmp_path / "s"), tied_pair()
    ucpstore.save(url, {"model": Flat(torch.ones(15), {"embed.weight": (5, 3)})}, step=1)
    target["head"].weight = torch.nn.Parameter(torch.zeros(5, 3))
    with pytest.raises(ucpstore.MismatchError, match=r"not in the checkpoint: model\.head\.weight"):
        ucpstore.load(url, {"model": target})


def over_a_mesh(url: str) -> str:
    mesh = init_device_mesh("cpu", (2,), mesh_dim_names=("dp",))
    rules = Spec(mesh, {"model.w": replicate("dp")})
    try:
        ucpstore.save(url, {"o": Flat(torch.ones(2), {"w": (4,)}, mesh["dp"])}, step=1, spec=rules)
    except ucpstore.StateError as error:
        return str(error)
    return "saved"


def test_a_mesh_beside_a_specification_is_refused(ranks: Ranks, tmp_path: Path) -> None:
    for told in ranks.run(2, over_a_mesh, str(tmp_path / "s")):
        assert "o: the Flat is cut over a DeviceMesh, but its tensors go by the rules" in told


def test_targets_whose_values_are_not_those_in_memory_are_refused(tmp_path: Path) -> None:
    row = torch.tensor([1 + 2j, 3 + 4j])
    ucpstore.save(tmp_path, {"o": Flat(row, (2,)), "x": torch.tensor(2.0)}, step=1)
    target = torch.zeros(2, dtype=torch.complex64).conj()
    with pytest.raises(ucpstore.UnsupportedError, match=r"o: a view with a pending conjugation"):
        ucpstore.load(tmp_path, {"o": Flat(target, (2,))})
    with pytest.raises(ucpstore.UnsupportedError, match=r"x: a view with a pending conjugation"):
        ucpstore.load(tmp_path, {"x": torch.tensor(5 + 7j).conj().imag})


def test_another_default_device_changes_nothing(tmp_path: Path) -> None:
    ucpstore.save(tmp_path, {"a": torch.arange(3.0)}, step=1)
    target = torch.zeros(3, dtype=torch.float64)
    with torch.device("meta"):
        ucpstore.load(tmp_path, {"a": target}, cast="*")
    assert target.tolist() == [0.0, 1.0, 2.0]


ONES = torch.ones(4)


@pytest.mark.parametrize(
    ("given", "text"),
    [
        (lambda: Flat(np.ones(4), (4,)), "Flat: tensor must be a torch.Tensor of one dim"),
        (
            lambda: Flat(ONES, 4),
            "Flat: shapes must be a dict of names and shapes",
        ),
        (lambda: Flat(ONES, {"w": 4}), "but it is {'w': 4}"),
        (lambda: Flat(ONES, {"w": (2.0,)}), "but it is {'w': (2.0,)}"),
        (lambda: Flat(ONES, {"w": (-2,)}), "but it is {'w': (-2,)}"),
        (lambda: Flat(ONES, {1: (4,)}), "but it is {1: (4,)}"),
        (lambda: Flat(ONES, {"w": (2,)}, offsets={"w": 1.0}), "Flat: offsets must be a di"),
        (lambda: Flat(ONES, {"w": (2,)}, offsets=[1]), "whole numbers of elements, but it is [1]"),
        (lambda: Flat(ONES, (4,), 3), "Flat: over must be the name of an axis, a list of"),
        (lambda: Flat(ONES, (4,), ["dp", 3]), "a DeviceMesh or None, but it is ['dp', 3]"),
        (lambda: Flat(ONES, (4,), of=3), "Flat: of must be the place of a module"),
        (lambda: Flat(ONES, (4,), is_state="yes"), "Flat: is_state must be True, False or"),
        (
            lambda: ucpstore.FlatOptimizer(torch.optim.SGD([ONES]), Flat(ONES, (4,))),
            "must be a list of ucpstore.Flat, but they are a Flat; pass [flat]",
        ),
    ],
)
def test_wrong_types_are_told_where_they_are_given(given, text) -> None:
    with pytest.raises(ucpstore.StateError) as caught:
        given()
    assert text in str(caught.value)


def test_shapes_and_offsets_may_be_of_any_whole_numbers() -> None:
    row = Flat(ONES, {"w": torch.Size([2])}, [], offsets={"w": np.int64(1)})
    assert (row.shapes, row.offsets) == ({"w": (2,)}, {"w": 1})

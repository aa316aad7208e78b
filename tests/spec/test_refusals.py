"""Bad specifications on real ranks: refused on all of them, and nothing is written or changed."""

from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path

import torch
import torch.distributed as dist
from cases.tools import attempt, sharded
from ranks.harness import Ranks
from torch import nn
from torch.distributed.device_mesh import init_device_mesh

import ucpstore
from ucpstore.spec import padded, renamed, replicate, shard, tied, unique


def objects(folder: str) -> list[str]:
    return sorted(str(path) for path in Path(folder).rglob("*") if path.is_file())


def module(rows: int = 4) -> nn.Module:
    made = nn.Module()
    made.w = nn.Parameter(torch.ones(rows, 2))
    return made


def spec(rule: object, *, tp: int = 2, name: str = "m.w") -> ucpstore.Spec:
    return ucpstore.Spec({"tp": tp}, {name: rule})  # type: ignore[dict-item]


def last(action: Callable[[], object], other: Callable[[], object]) -> Callable[[], object]:
    """One thing on the last rank, another one on those before it."""
    return action if dist.get_rank() == dist.get_world_size() - 1 else other


KINDS: dict[str, tuple[Callable[[], tuple[object, ucpstore.Spec]], list[str]]] = {
    "too many ranks": (
        lambda: (module(), spec(shard(0, "tp"), tp=4)),
        ["the axes tp=4 of the specification are for 4 ranks", "has 2, [0, 1]"],
    ),
    "too few ranks": (
        lambda: (module(), spec(shard(0, "tp"), tp=1)),
        ["the axes tp=1 of the specification are for 1 ranks"],
    ),
    "on one rank alone": (
        lambda: (module(), last(lambda: spec(shard(2, "tp")), lambda: spec(shard(0, "tp")))()),
        ["m.w: rule 'm.w': it names dimension 2, but the tensor has shape (4, 2)", "rank 1"],
    ),
    "no rule": (
        lambda: (module(), spec(shard(0, "tp"), name="m.v")),
        ["m.w: none of the 1 rules of the specification matches"],
    ),
    "unequal parts": (
        lambda: (module(last(lambda: 3, lambda: 4)()), spec(shard(0, "tp"))),
        ["m/w: ranks disagree about its shape: rank 0 has (8, 2), rank 1 has (6, 2)", "sizes="],
    ),
    "parts that do not add up": (
        lambda: (module(), spec(shard(0, "tp", sizes=(4, 5)))),
        ["rule 'm.w': of 9 elements of dimension 0 coordinate 1 of tp=2 should hold 5", "has 4"],
    ),
    "too much is real": (
        lambda: (module(), spec([shard(0, "tp"), padded(0, 9)])),
        ["rule 'm.w': padded(0, 9) says that 9 elements are real", "has 8 on all ranks"],
    ),
    "a stage's name on two stages": (
        lambda: (module(), spec(unique("tp"))),
        ["m/w: rank 0 holds it alone with tp=0, and rank 1 with tp=1"],
    ),
    "a tie to nobody": (
        lambda: (module(), spec([tied("m.v"), replicate("tp")])),
        ["m/v: a rule ties a tensor of rank 0 to it, but no rank has a tensor of this name"],
    ),
    "a rule that cuts a DTensor": (
        lambda: (
            {"w": sharded(torch.ones(4), init_device_mesh("cpu", (2,)))},
            spec(shard(0, "tp")),
        ),
        ["m.w: a rule says shard, but the tensor is a DTensor"],
    ),
    "different cuts": (
        lambda: (
            module(),
            last(lambda: spec(replicate("tp")), lambda: spec(shard(0, "tp", size=8)))(),
        ),
        ["m/w: ranks disagree about its shape"],
    ),
    "replicas that differ": (
        lambda: (
            {"w": torch.full((4,), float(dist.get_rank()))},
            spec(replicate("tp")),
        ),
        ["m/w: ranks 0 and 1 hold different values"],
    ),
}


def save_badly(folder: str) -> dict[str, tuple[str, list[str]]]:
    found = {}
    for number, (kind, (build, _)) in enumerate(KINDS.items()):
        url = f"{folder}/{number}"
        value, how = build()
        text = attempt(lambda: ucpstore.save(url, {"m": value}, step=1, spec=how))  # noqa: B023
        dist.barrier()
        found[kind] = (text, objects(url))
        dist.barrier()
    return found


def test_saves_are_refused_on_all_ranks_and_write_nothing(ranks: Ranks, tmp_path: Path) -> None:
    for found in ranks.run(2, save_badly, str(tmp_path)):
        assert list(found) == list(KINDS)
        for kind, (text, written) in found.items():
            assert [word for word in KINDS[kind][1] if word not in text] == [], (kind, text)
            assert written == [], kind


def load_badly(url: str) -> dict[str, tuple[str, bool]]:
    """Each leaves the target as it was."""
    cases = {
        "axes": spec(shard(0, "tp"), tp=4),
        "one rank": last(
            lambda: spec(shard(5, "tp")), lambda: spec([shard(0, "tp"), padded(0, 7)])
        )(),
        "no padding": spec(shard(0, "tp")),
        "none": None,
    }
    found = {}
    for name, how in cases.items():
        target = module()
        text = attempt(lambda: ucpstore.load(url, {"m": target}, spec=how))  # noqa: B023
        found[name] = (text, bool((target.w == 1).all()))
        dist.barrier()
    return found


def test_loads_are_refused_on_all_ranks_and_change_nothing(ranks: Ranks, tmp_path: Path) -> None:
    url = str(tmp_path / "s")
    ucpstore.save(url, {"m": {"w": torch.zeros(7, 2)}}, step=1)
    for found in ranks.run(2, load_badly, url):
        assert "the axes tp=4 of the specification are for 4 ranks" in found["axes"][0]
        assert "m.w: rule 'm.w': it names dimension 5" in found["one rank"][0]
        for text in (found["no padding"][0], found["none"][0]):
            assert "m.w: stored with shape (7, 2), the target has shape" in text
        assert "has shape (8, 2) ((4, 2) on this rank)" in found["no padding"][0]
        assert [kept for _, kept in found.values()] == [True] * 4


def in_groups(folder: str) -> tuple[list[float], str]:
    """Two jobs of two ranks in one world, each with a mesh and a store of its own."""
    world = init_device_mesh("cpu", (2, 2), mesh_dim_names=("job", "tp"))
    job, tp = divmod(dist.get_rank(), 2)
    mesh, group = world["tp"], world["tp"].get_group()
    url = f"{folder}/{job}"
    whole = torch.arange(6.0) + 10 * job
    rules = {"m.w": [shard(0, "tp"), padded(0, 5)]}
    own = whole.chunk(2)[tp].clone()
    by_mesh = ucpstore.Spec(mesh, rules)
    ucpstore.save(url, {"m": {"w": own}}, step=1, spec=by_mesh, process_group=group)
    target = torch.zeros(3)
    by_sizes = ucpstore.Spec({"tp": 2}, rules)
    ucpstore.load(url, {"m": {"w": target}}, spec=by_sizes, process_group=group)
    other = ucpstore.Spec(world, {"m.w": [shard(0, "tp"), replicate("job")]})
    text = attempt(
        lambda: ucpstore.save(url, {"m": {"w": own}}, step=2, spec=other, process_group=group)
    )
    return target.tolist(), text


def test_meshes_and_axes_count_within_the_process_group(ranks: Ranks, tmp_path: Path) -> None:
    found = ranks.run(4, in_groups, str(tmp_path))
    assert [values for values, _ in found] == [[0, 1, 2], [3, 4, 0], [10, 11, 12], [13, 14, 0]]
    for rank, (_, text) in enumerate(found):
        own = "[0, 1]" if rank < 2 else "[2, 3]"
        assert (
            f"are for 4 ranks [0, 1, 2, 3], but the process group of the call has 2, {own}" in text
        )
    for job in ("0", "1"):
        assert ucpstore.CheckpointStore(tmp_path / job).steps() == [1]
        stored = ucpstore.CheckpointStore(tmp_path / job).open()["m"]["w"].read()
        assert stored.tolist() == [n + 10 * int(job) for n in range(5)]


def stages(url: str, strict: bool) -> tuple[list[float], list[str], list[str], str]:
    """Two stages load what two stages saved, one of them with a layer more than it had."""
    rank = dist.get_rank()

    def name(own: str, at: object) -> str:
        return own.replace("m.", f"m.{rank}.", 1)

    how = ucpstore.Spec({"pp": 2}, {"m.*": renamed(name)}, unique=("pp",))
    saved = nn.ParameterDict({"a": torch.full((2,), float(rank)), "b": torch.ones(2)})
    options = ucpstore.Options(codecs={"m.1.*": "zstd"})
    cast = {"m.*": torch.bfloat16}
    ucpstore.save(url, {"m": saved}, step=1, spec=how, options=options, cast=cast)
    target = nn.ParameterDict({"a": torch.full((2,), 9.0)})
    if rank == 1:
        target["c"] = torch.full((2,), 9.0)
    missing: list[str] = []
    unexpected: list[str] = []

    def load() -> None:
        report = ucpstore.load(url, {"m": target}, spec=how, strict=strict, cast="m.*")
        missing.extend(report.missing)
        unexpected.extend(report.unexpected)

    text = attempt(load)
    return target["a"].tolist(), missing, unexpected, text


def test_stages_load_strictly_or_what_both_have(ranks: Ranks, tmp_path: Path) -> None:
    for values, missing, unexpected, text in ranks.run(2, stages, str(tmp_path / "a"), True):
        assert values == [9.0, 9.0]
        assert (missing, unexpected) == ([], [])
        assert "m.1.c" in text
    found = ranks.run(2, stages, str(tmp_path / "b"), False)
    assert [values for values, *_ in found] == [[0.0, 0.0], [1.0, 1.0]]
    assert found[1][1] == ["m.1.c"]
    for _, _, unexpected, text in found:
        assert sorted(unexpected) == ["m.0.b", "m.1.b"]
        assert text == ""
    step = ucpstore.CheckpointStore(tmp_path / "b").open()
    model = step["m"]
    assert sorted(model) == ["0.a", "0.b", "1.a", "1.b"]
    assert {name: array.dtype for name, array in model.items()} == dict.fromkeys(
        model, torch.bfloat16
    )
    codecs = {
        name: "zstd" in (tmp_path / "b" / step.path / model[name].path / "zarr.json").read_text()
        for name in model
    }
    assert codecs == {"0.a": False, "0.b": False, "1.a": True, "1.b": True}


def test_a_process_of_its_own_is_one_rank(tmp_path: Path) -> None:
    assert "WORLD_SIZE" not in os.environ
    url = str(tmp_path / "s")
    text = attempt(
        lambda: ucpstore.save(url, {"m": module()}, step=1, spec=spec(shard(0, "tp"), tp=2))
    )
    assert "are for 2 ranks [0, 1], but the process group of the call has 1, [0]" in text
    assert objects(url) == []
    one = spec([shard(0, "tp"), padded(0, 3)], tp=1)
    ucpstore.save(url, {"m": module()}, step=1, spec=one)
    assert ucpstore.CheckpointStore(url).open()["m"]["w"].shape == (3, 2)

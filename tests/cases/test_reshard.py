"""Field cases of resharding: B27, B32, B33, B35 to B38, B48: fused, padded and replicated tensors,
sub-meshes, parts that do not tile, shapes that differ.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from cases.tools import attempt, bits, line, same, sharded, stored_bytes
from cases.tools import whole as gathered
from ranks.harness import Ranks
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.tensor import DTensor, Partial, Replicate, Shard

import ucpstore
from ucpstore.spec import padded, replicate, scaled, shard


def square(*names: str) -> DeviceMesh:
    return init_device_mesh("cpu", (2, 2), mesh_dim_names=names)


def on_ranks(ranks: Ranks, size: int, job: Callable[..., object], *args: object) -> list[object]:
    """A job of real ranks; one rank is this process."""
    return [job(*args)] if size == 1 else ranks.run(size, job, *args)


def place() -> tuple[int, int]:
    """This rank and the number of ranks."""
    return (dist.get_rank(), dist.get_world_size()) if dist.is_initialized() else (0, 1)


# B27: fused tensors whose blocks are each cut on their own.

FUSED = {
    "gate_up": (torch.arange(16 * 8.0).reshape(16, 8), (8, 8), 1),
    "qkv": (torch.arange(40 * 3.0).reshape(40, 3), (8 * 2, 8 * 2, 4 * 2), 1),
    "few heads": (torch.arange(24 * 3.0).reshape(24, 3), (8 * 2, 2 * 2, 2 * 2), 2),
}


def fused_parts(names: list[str]) -> dict[str, torch.Tensor]:
    """This rank's part of each, by hand: its rows of every block, one behind the other."""
    rank, size = place()
    return {
        name: torch.cat([block.chunk(size)[rank] for block in whole.split(sections)])
        for name, (whole, sections, _) in FUSED.items()
        if name in names
    }


def fused_spec() -> ucpstore.Spec:
    rules = {
        f"m.{name}": shard(0, "tp", sections=sections, unit=unit)
        for name, (_, sections, unit) in FUSED.items()
    }
    return ucpstore.Spec({"tp": place()[1]}, rules)


def save_fused(url: str, names: list[str]) -> None:
    ucpstore.save(url, {"m": fused_parts(names)}, step=1, spec=fused_spec())


def load_fused(url: str, names: list[str]) -> list[str]:
    expected = fused_parts(names)
    target = {name: torch.zeros_like(value) for name, value in expected.items()}
    ucpstore.load(url, {"m": target}, spec=fused_spec())
    return [name for name in names if not same(target[name], expected[name])]


def test_b27_fused_blocks_have_one_order_whatever_the_ranks(ranks: Ranks, tmp_path: Path) -> None:
    for source, sizes, names in (
        (4, (1, 2, 8, 4), ["gate_up", "qkv"]),
        (2, (1, 2), ["gate_up", "qkv", "few heads"]),
    ):
        url = str(tmp_path / str(source))
        ranks.run(source, save_fused, url, names)
        stored = ucpstore.CheckpointStore(url).open()["m"]
        for name in names:
            assert same(stored[name].read(), FUSED[name][0])
        for size in sizes:
            assert on_ranks(ranks, size, load_fused, url, names) == [[]] * size


def cut_heads(url: str) -> str:
    """Four ranks share two heads of keys and values."""
    own = {"m": {"few heads": torch.zeros(6, 3)}}
    return attempt(lambda: ucpstore.save(url, own, step=1, spec=fused_spec()))


def test_b27_fewer_heads_than_ranks_are_refused(ranks: Ranks, tmp_path: Path) -> None:
    for text in ranks.run(4, cut_heads, str(tmp_path / "s")):
        assert "m.few heads: rule 'm.few heads': a section of 4 elements" in text
        assert "tp=4 in whole units of 2" in text
        assert "keep query, key and value in tensors of their own" in text
    assert not (tmp_path / "s").exists()


def save_undeclared(url: str) -> None:
    own = fused_parts(["gate_up"])["gate_up"]
    tensor = DTensor.from_local(own, line(), [Shard(0)], run_check=False)
    ucpstore.save(url, {"m": {"gate_up": tensor}}, step=1)


def test_b27_without_a_rule_the_parts_lie_one_behind_the_other(
    ranks: Ranks, tmp_path: Path
) -> None:
    url = str(tmp_path / "s")
    ranks.run(4, save_undeclared, url)
    gate, up = FUSED["gate_up"][0].chunk(2)
    parts = [part for rank in range(4) for part in (gate.chunk(4)[rank], up.chunk(4)[rank])]
    target = torch.zeros(16, 8)
    ucpstore.load(url, {"m": {"gate_up": target}})
    assert same(target, torch.cat(parts))


# B32: what tensor parallel ranks hold whole.

HIDDEN, WIDE, WORDS = 4, 8, 12


def block(factor: float, *, state: bool) -> dict[str, torch.Tensor]:
    """This rank's part of a block: a bias that is added on every rank is held divided."""
    rank, size = place()
    count = torch.arange(1.0, WIDE * HIDDEN * 3 + 1) * factor
    return {
        "norm": count[:HIDDEN].clone(),
        "column": count[: WIDE * HIDDEN].reshape(WIDE, HIDDEN).chunk(size)[rank].clone(),
        "column_bias": count[:WIDE].chunk(size)[rank].clone(),
        "row": count[: HIDDEN * WIDE].reshape(HIDDEN, WIDE).chunk(size, 1)[rank].clone(),
        "row_bias": count[:HIDDEN].clone(),
        "divided_bias": count[:HIDDEN] / (1 if state else size),
        "vocabulary": count[: WORDS * HIDDEN].reshape(WORDS, HIDDEN).chunk(size)[rank].clone(),
    }


def block_job(fill: float | None) -> dict[str, object]:
    model = torch.nn.ParameterDict(block(1.0, state=False))
    optimizer = torch.optim.AdamW(model.parameters())
    moments = block(2.0, state=True)
    for name, parameter in model.items():
        optimizer.state[parameter] = {
            "step": torch.tensor(3.0),
            "exp_avg": moments[name],
            "exp_avg_sq": moments[name] * 2,
        }
    if fill is not None:
        with torch.no_grad():
            for parameter in model.values():
                parameter.fill_(fill)
        optimizer.state.clear()
    return {"model": model, "optim": optimizer}


def block_spec() -> ucpstore.Spec:
    rows, whole = shard(0, "tp"), replicate("tp")
    rules = {
        "norm": whole,
        "column": rows,
        "column_bias": rows,
        "row": shard(1, "tp"),
        "row_bias": whole,
        "divided_bias": scaled("tp"),
        "vocabulary": rows,
    }
    named = {f"model.{name}": rule for name, rule in rules.items()}
    return ucpstore.Spec({"tp": place()[1]}, named)


def save_block(url: str) -> None:
    ucpstore.save(url, block_job(None), step=1, spec=block_spec())


def load_block(url: str, again: str) -> list[str]:
    target, expected = block_job(-1.0), block_job(None)
    ucpstore.load(url, target, spec=block_spec())
    ucpstore.save(again, target, step=1, spec=block_spec())
    wrong = []
    for name, parameter in target["model"].items():
        wanted = expected["model"][name]
        states = [
            job["optim"].state[each] for job, each in ((target, parameter), (expected, wanted))
        ]
        wrong += [name] * (not same(parameter, wanted))
        wrong += [f"{key} {name}" for key in states[1] if not same(states[0][key], states[1][key])]
    return wrong


def test_b32_replicated_parameters_stay_as_they_are(ranks: Ranks, tmp_path: Path) -> None:
    url = str(tmp_path / "2")
    ranks.run(2, save_block, url)
    for size in (1, 4):
        again = str(tmp_path / str(size))
        assert on_ranks(ranks, size, load_block, url, again) == [[]] * size
        url = again
    step = ucpstore.CheckpointStore(url).open()
    whole = block(1.0, state=False)
    assert {name: array.shape for name, array in step["model"].items()} == {
        name: tuple(value.shape) for name, value in whole.items()
    }
    for name in whole:
        assert same(step["model"][name].read(), whole[name])
        assert same(step["optim"][f"exp_avg/{name}"].read(), block(2.0, state=True)[name])


# B33: vocabularies that are padded until they can be cut.


def words(vocabulary: int) -> tuple[torch.Tensor, torch.Tensor]:
    """This rank's rows of the padded table, and what is to be there after a load: zeros behind."""
    rank, size = place()
    rows = -(-vocabulary // size) * size
    table = torch.arange(1.0, vocabulary * 4 + 1).reshape(vocabulary, 4)
    behind = torch.full((rows - vocabulary, 4), 77.0)
    saved = torch.cat([table, behind]).chunk(size)[rank].clone()
    return saved, torch.cat([table, behind * 0]).chunk(size)[rank].clone()


def words_spec(vocabulary: int, *, declared: bool = True) -> ucpstore.Spec:
    rule = [shard(0, "tp"), *([padded(0, vocabulary)] if declared else [])]
    return ucpstore.Spec({"tp": place()[1]}, {"m.w": rule})


def save_words(url: str, vocabulary: int) -> None:
    own, _ = words(vocabulary)
    ucpstore.save(url, {"m": {"w": own}}, step=1, spec=words_spec(vocabulary))


def load_words(url: str, vocabulary: int) -> bool:
    own, expected = words(vocabulary)
    target = torch.full_like(own, 55.0)
    ucpstore.load(url, {"m": {"w": target}}, spec=words_spec(vocabulary))
    return same(target, expected)


@pytest.mark.parametrize("vocabulary", [7, 65535])
def test_b33_padding_is_not_stored_and_is_zero_after_a_load(
    ranks: Ranks, tmp_path: Path, vocabulary: int
) -> None:
    for source in (2, 4, 1, 3):
        url = str(tmp_path / str(source))
        on_ranks(ranks, source, save_words, url, vocabulary)
        stored = ucpstore.CheckpointStore(url).open()["m"]["w"]
        assert stored.shape == (vocabulary, 4)
        for size in (1, 2, 3, 4):
            assert on_ranks(ranks, size, load_words, url, vocabulary) == [True] * size


def load_undeclared(url: str) -> tuple[str, float]:
    own, _ = words(7)
    text = attempt(
        lambda: ucpstore.load(url, {"m": {"w": own}}, spec=words_spec(7, declared=False))
    )
    return text, float(own.sum() - words(7)[0].sum())


def test_b33_padding_that_is_not_declared_is_refused(ranks: Ranks, tmp_path: Path) -> None:
    url = str(tmp_path / "s")
    save_words(url, 7)
    for text, changed in ranks.run(2, load_undeclared, url):
        assert "m.w: stored with shape (7, 4), the target has shape (8, 4)" in text
        assert changed == 0.0


# B35: experts on one sub-mesh, dense parameters on another.


def experts(mesh: DeviceMesh, factor: float) -> dict[str, torch.Tensor]:
    """What each of the kinds of parameters of a mixture of experts looks like on (ep=2, dp=2)."""
    expert = torch.arange(4 * 6 * 2.0).reshape(4, 6, 2) * factor
    dense = torch.arange(7 * 3.0).reshape(7, 3) * -factor
    both = torch.arange(5 * 8.0).reshape(5, 8) * factor
    return {
        "expert": sharded(expert, mesh["ep"], Shard(0)),
        "expert by rows": sharded(expert, mesh, Shard(0), Shard(1)),
        "dense": sharded(dense, mesh["dp"], Shard(0)),
        "dense on all": sharded(dense, mesh, Shard(0), Shard(0)),
        "crossed": sharded(both, mesh, Shard(1), Shard(0)),
        "one element": sharded(torch.tensor([factor]), mesh["dp"], Shard(0)),
        "flattened": sharded(dense, mesh["ep", "dp"]._flatten("all"), Shard(0)),
        "permuted": sharded(both, DeviceMesh("cpu", [[0, 2], [1, 3]]), Shard(0), Shard(1)),
        "backwards": sharded(dense, DeviceMesh("cpu", [3, 2, 1, 0]), Shard(0)),
        "plain": dense * 2,
    }


def experts_round_trip(url: str) -> tuple[list[str], list[str]]:
    mesh = square("ep", "dp")
    saved = experts(mesh, 1.0)
    before = {name: local(value).clone() for name, value in saved.items()}
    ucpstore.save(url, {"m": saved}, step=1)
    target = experts(mesh, 0.0)
    ucpstore.load(url, {"m": target})
    changed = [name for name, value in saved.items() if not same(local(value), before[name])]
    return changed, [name for name in saved if not same(local(target[name]), before[name])]


def local(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.to_local() if isinstance(tensor, DTensor) else tensor


def test_b35_each_rank_gets_its_own_expert_back(ranks: Ranks, tmp_path: Path) -> None:
    url = str(tmp_path / "s")
    assert ranks.run(4, experts_round_trip, url) == [([], [])] * 4
    target = {
        "expert": torch.zeros(4, 6, 2),
        "expert by rows": torch.zeros(4, 6, 2),
        "dense": torch.zeros(7, 3),
        "dense on all": torch.zeros(7, 3),
        "crossed": torch.zeros(5, 8),
        "one element": torch.zeros(1),
        "flattened": torch.zeros(7, 3),
        "permuted": torch.zeros(5, 8),
        "backwards": torch.zeros(7, 3),
        "plain": torch.zeros(7, 3),
    }
    ucpstore.load(url, {"m": target})
    for name in ("expert", "expert by rows"):
        assert same(target[name], torch.arange(48.0).reshape(4, 6, 2))
    for name in ("dense", "dense on all", "flattened", "backwards"):
        assert same(target[name], torch.arange(21.0).reshape(7, 3) * -1.0)
    for name in ("crossed", "permuted"):
        assert same(target[name], torch.arange(40.0).reshape(5, 8))
    assert same(target["one element"], torch.tensor([1.0]))


def own_group_each(folder: str) -> tuple[bytes, list[int]]:
    """Two jobs of two ranks that share a world, each with a process group and a store of its own.

    Global ranks 2 and 3 are ranks 0 and 1 of the second.
    """
    mesh = square("job", "dp")
    job = dist.get_rank() // 2
    url = f"{folder}/{job}"
    values = torch.arange(5.0) + 100 * job
    group = mesh["dp"].get_group()
    ucpstore.save(url, {"m": {"w": sharded(values, mesh["dp"])}}, step=1, process_group=group)
    target = sharded(torch.zeros(5), mesh["dp"])
    ucpstore.load(url, {"m": {"w": target}}, process_group=group)
    return bits(gathered(target)), list(local(target).shape)


def test_b35_meshes_count_in_ranks_of_the_process_group(ranks: Ranks, tmp_path: Path) -> None:
    results = ranks.run(4, own_group_each, str(tmp_path))
    expected = [bits(torch.arange(5.0) + 100 * job) for job in (0, 0, 1, 1)]
    assert [values for values, _ in results] == expected
    assert [shape for _, shape in results] == [[3], [2], [3], [2]]


def two_of_four(url: str, everyone: bool) -> tuple[list[float], int]:
    """Tensors on meshes of ranks 1 and 3 alone; the others have them without a part, or not."""
    mesh = DeviceMesh("cpu", [1, 3])
    inside = dist.get_rank() in (1, 3)

    def build(factor: float) -> dict[str, torch.Tensor]:
        values = torch.arange(5.0) * factor
        own = values[:3] if dist.get_rank() == 1 else values[3:]
        part = own if inside else torch.zeros(0)
        whole = {"shape": torch.Size((5,)), "stride": (1,)}
        tensor = DTensor.from_local(part, mesh, [Shard(0)], run_check=False, **whole)
        everywhere = {"all": torch.ones(2) * factor}
        return {"w": tensor, **everywhere} if inside or everyone else everywhere

    ucpstore.save(url, {"m": build(1.0)}, step=1)
    target = build(0.0)
    ucpstore.load(url, {"m": target})
    return local(target["w"]).tolist() if inside else [], int(target["all"].sum())


@pytest.mark.parametrize("everyone", [False, True])
def test_b35_a_mesh_of_some_ranks(ranks: Ranks, tmp_path: Path, everyone: bool) -> None:
    url = str(tmp_path / "s")
    parts = [[], [0, 1, 2], [], [3, 4]]
    assert ranks.run(4, two_of_four, url, everyone) == [(part, 2) for part in parts]
    target = {"w": torch.zeros(5), "all": torch.zeros(2)}
    ucpstore.load(url, {"m": target})
    assert same(target["w"], torch.arange(5.0))


def mesh_outside(url: str) -> str:
    """The tensor is spread over all ranks, but only the first two save."""
    mesh = square("job", "dp")
    tensor = sharded(torch.arange(8.0), line())
    group = mesh["dp"].get_group()
    text = ""
    if dist.get_rank() < 2:
        text = attempt(
            lambda: ucpstore.save(url, {"m": {"w": tensor}}, step=1, process_group=group)
        )
    dist.barrier()
    return text


def test_b35_a_mesh_that_reaches_out_of_the_process_group_is_refused(
    ranks: Ranks, tmp_path: Path
) -> None:
    texts = ranks.run(4, mesh_outside, str(tmp_path / "s"))
    for text in texts[:2]:
        assert "m.w" in text
        assert "[2, 3]" in text
    assert ucpstore.CheckpointStore(tmp_path / "s").steps() == []


# B36: replicated axes.


def hybrid(values: torch.Tensor) -> dict[str, DTensor]:
    mesh = square("replica", "shard")
    return {
        "rows": sharded(values, mesh, Replicate(), Shard(0)),
        "columns": sharded(values, mesh, Shard(1), Replicate()),
        "whole": sharded(values, mesh, Replicate(), Replicate()),
    }


def save_hybrid(url: str, values: torch.Tensor) -> int:
    report = ucpstore.save(url, {"m": hybrid(values)}, step=1).result()
    return report.bytes


def load_hybrid(url: str, values: torch.Tensor) -> list[str]:
    mesh = line()
    target = {name: sharded(torch.zeros_like(values), mesh) for name in ("rows", "columns")}
    target["whole"] = sharded(torch.zeros_like(values), mesh, Replicate())
    ucpstore.load(url, {"m": target})
    return [name for name, value in target.items() if not same(gathered(value), values)]


@pytest.mark.parametrize("shape", [(6, 4), (600, 1000)])
def test_b36_replicas_are_stored_once_and_spread(
    ranks: Ranks, tmp_path: Path, shape: tuple[int, int]
) -> None:
    url, values = str(tmp_path / "s"), torch.randn(shape)
    written = ranks.run(4, save_hybrid, url, values)
    copies = 3 * values.nbytes
    assert copies <= sum(written) < copies * 1.1 + 200
    assert stored_bytes(url) < copies * 1.1 + 20_000
    assert sum(1 for size in written if size) > 1
    for size in (2, 3):
        assert ranks.run(size, load_hybrid, url, values) == [[]] * size
    alone = {name: torch.zeros_like(values) for name in ("rows", "columns", "whole")}
    ucpstore.load(url, {"m": alone})
    assert all(same(value, values) for value in alone.values())


def save_unequal(folder: str, name: str, rank: int) -> dict[str, str]:
    """One rank's copy is off by one ulp in one element."""
    tensors = hybrid(torch.ones(6, 4))
    if dist.get_rank() == rank:
        part = tensors[name].to_local()
        part[-1, -1] = torch.nextafter(part[-1, -1], torch.tensor(2.0))
    found = {}
    for check in ("always", "never"):
        url = f"{folder}/{check}"
        found[check] = attempt(
            lambda url=url, check=check: ucpstore.save(
                url, {"m": tensors}, step=1, check_replicas=check
            )
        )
    return found


@pytest.mark.parametrize("name", ["rows", "columns", "whole"])
def test_b36_replicas_that_differ_by_one_ulp_are_refused_on_request(
    ranks: Ranks, tmp_path: Path, name: str
) -> None:
    for found in ranks.run(4, save_unequal, str(tmp_path), name, 3):
        assert f"m/{name}" in found["always"].replace(".", "/")
        assert "and 3 hold different values" in found["always"]
        assert found["never"] == ""
    assert ucpstore.CheckpointStore(tmp_path / "always").steps() == []
    assert ucpstore.CheckpointStore(tmp_path / "never").steps() == [1]


# B37: parts that do not tile the global shape.


def from_local(rows: tuple[int, int], **whole: object) -> DTensor:
    own = rows[dist.get_rank()]
    part = torch.full((own, 2), float(dist.get_rank()))
    return DTensor.from_local(part, line(), [Shard(0)], run_check=False, **whole)


UNEVEN: dict[str, Callable[[], torch.Tensor]] = {
    "1 and 3": lambda: from_local((1, 3)),
    "1 and 3 of 4": lambda: from_local((1, 3), shape=torch.Size((4, 2)), stride=(2, 1)),
    "3 and 1 of 4": lambda: from_local((3, 1), shape=torch.Size((4, 2)), stride=(2, 1)),
    "2 and 2 of 5": lambda: from_local((2, 2), shape=torch.Size((5, 2)), stride=(2, 1)),
    "2 and 2 of 3": lambda: from_local((2, 2), shape=torch.Size((3, 2)), stride=(2, 1)),
    "0 and 4": lambda: from_local((0, 4), shape=torch.Size((4, 2)), stride=(2, 1)),
    "3 and 2": lambda: from_local((3, 2)),
}


def save_uneven(url: str, kind: str) -> tuple[str, list[int]]:
    text = attempt(lambda: ucpstore.save(url, {"m": {"w": UNEVEN[kind]()}}, step=1))
    dist.barrier()
    return text, ucpstore.CheckpointStore(url).steps()


@pytest.mark.parametrize("kind", UNEVEN)
def test_b37_parts_that_do_not_follow_the_rule_are_refused(
    ranks: Ranks, tmp_path: Path, kind: str
) -> None:
    for text, steps in ranks.run(2, save_uneven, str(tmp_path / "s"), kind):
        assert "m" in text
        assert "w" in text
        assert "from_local" in text
        assert steps == []


def uneven_that_fits(url: str) -> list[list[float]]:
    """3 and 2 rows with the global shape given are what torch.chunk would give."""
    tensor = from_local((3, 2), shape=torch.Size((5, 2)), stride=(2, 1))
    ucpstore.save(url, {"m": {"w": tensor}}, step=1)
    target = torch.zeros(5, 2)
    ucpstore.load(url, {"m": {"w": target}})
    return target.tolist()


def test_b37_uneven_parts_with_the_global_shape_given(ranks: Ranks, tmp_path: Path) -> None:
    expected = [[0, 0]] * 3 + [[1, 1]] * 2
    assert ranks.run(2, uneven_that_fits, str(tmp_path / "s")) == [expected, expected]


def save_sizes(url: str) -> list[list[float]]:
    """One and three rows, which a rule says so, into two and two."""
    rank = dist.get_rank()
    own = torch.full(((1, 3)[rank], 2), float(rank))
    by = {"m.w": shard(0, "tp", sizes=(1, 3))}
    ucpstore.save(url, {"m": {"w": own}}, step=1, spec=ucpstore.Spec({"tp": 2}, by))
    target = torch.full((2, 2), 9.0)
    even = ucpstore.Spec({"tp": 2}, {"m.w": shard(0, "tp")})
    ucpstore.load(url, {"m": {"w": target}}, spec=even)
    return target.tolist()


def test_b37_uneven_parts_whose_sizes_a_rule_gives(ranks: Ranks, tmp_path: Path) -> None:
    url = str(tmp_path / "s")
    assert ranks.run(2, save_sizes, url) == [[[0, 0], [1, 1]], [[1, 1], [1, 1]]]
    stored = ucpstore.CheckpointStore(url).open()["m"]["w"].read()
    assert stored.tolist() == [[0, 0], [1, 1], [1, 1], [1, 1]]


def save_gap(url: str, sizes: tuple[int, int]) -> str:
    own = torch.ones((1, 3)[dist.get_rank()], 2)
    spec = ucpstore.Spec({"tp": 2}, {"m.w": shard(0, "tp", sizes=sizes)})
    return attempt(lambda: ucpstore.save(url, {"m": {"w": own}}, step=1, spec=spec))


@pytest.mark.parametrize("sizes", [(1, 4), (2, 3), (2, 2)])
def test_b37_parts_that_are_not_of_the_sizes_given_are_refused(
    ranks: Ranks, tmp_path: Path, sizes: tuple[int, int]
) -> None:
    for text in ranks.run(2, save_gap, str(tmp_path / "s"), sizes):
        assert f"m.w: rule 'm.w': of {sum(sizes)} elements of dimension 0 coordinate" in text
        assert "this rank's tensor has" in text
    assert not (tmp_path / "s").exists()


def target_uneven(url: str) -> tuple[str, bool]:
    target = from_local((1, 3), shape=torch.Size((4, 2)), stride=(2, 1))
    before = bits(target.to_local())
    text = attempt(lambda: ucpstore.load(url, {"m": {"w": target}}))
    return text, bits(target.to_local()) == before


def test_b37_an_uneven_target_is_refused(ranks: Ranks, tmp_path: Path) -> None:
    url = str(tmp_path / "s")
    ucpstore.save(url, {"m": {"w": torch.ones(4, 2)}}, step=1)
    for text, kept in ranks.run(2, target_uneven, url):
        assert "m.w" in text
        assert kept


def overlapping_meshes(url: str) -> str:
    """The same name is split over rows on one rank's description and over columns on the other."""
    mesh = line()
    whole = torch.arange(16.0).reshape(4, 4)
    tensor = sharded(whole, mesh, Shard(dist.get_rank()))
    text = attempt(lambda: ucpstore.save(url, {"m": {"w": tensor}}, step=1))
    dist.barrier()
    return text


def test_b37_fragments_with_a_hole_or_an_overlap_are_refused(ranks: Ranks, tmp_path: Path) -> None:
    for text in ranks.run(2, overlapping_meshes, str(tmp_path / "s")):
        assert text.startswith("StateError")
        assert "m/w" in text
    assert ucpstore.CheckpointStore(tmp_path / "s").steps() == []


def half_missing(url: str, rows: int, placement: object) -> tuple[str, list[int]]:
    """The tensor is on both ranks, but rank 1 leaves it out of its state."""
    tensor = sharded(torch.ones(rows, 3), line(), placement)
    state = {"w": tensor} if dist.get_rank() == 0 else {"other": torch.ones(2)}
    text = attempt(lambda: ucpstore.save(url, {"m": state}, step=1))
    dist.barrier()
    return text, ucpstore.CheckpointStore(url).steps()


@pytest.mark.parametrize("placement", [Shard(0), Replicate()], ids=["shard", "replicate"])
@pytest.mark.parametrize("rows", [6, 600_000])
def test_b37_a_part_that_no_rank_hands_over_is_refused(
    ranks: Ranks, tmp_path: Path, rows: int, placement: object
) -> None:
    for text, steps in ranks.run(2, half_missing, str(tmp_path / "s"), rows, placement):
        assert "m/w: rank 1 holds" in text
        assert "on every rank of its mesh" in text
        assert steps == []
    assert not (tmp_path / "s").exists()


# B38: sums that are not reduced yet.


def partial(url: str) -> tuple[str, str]:
    tensor = DTensor.from_local(torch.ones(4), line(), [Partial()], run_check=False)
    save = attempt(lambda: ucpstore.save(url, {"m": {"w": tensor}}, step=2))
    return save, attempt(lambda: ucpstore.load(url, {"m": {"w": tensor}}))


def test_b38_sums_that_are_not_reduced_are_refused(ranks: Ranks, tmp_path: Path) -> None:
    url = str(tmp_path / "s")
    ucpstore.save(url, {"m": {"w": torch.zeros(4)}}, step=1)
    for texts in ranks.run(2, partial, url):
        for text in texts:
            assert "m.w: a DTensor with placement P(sum) holds sums that are not" in text
            assert "redistribute it to Replicate() or Shard(dim)" in text
    assert ucpstore.CheckpointStore(url).steps() == [1]


# B48: states whose shape is not the parameter's.

PACKED = torch.arange(32, dtype=torch.uint8).reshape(8, 4)
LOGICAL = torch.arange(64.0).reshape(8, 8)


def packed_job(factor: int) -> dict[str, object]:
    """Two values in each byte of a parameter, and states that count rows, columns, or values."""
    rank, size = place()
    model = torch.nn.Module()
    model.w = torch.nn.Parameter(PACKED.chunk(size)[rank] * factor, requires_grad=False)
    optimizer = torch.optim.SGD([model.w], lr=0.1)
    optimizer.state[model.w] = {
        "exp_avg": LOGICAL.chunk(size)[rank] * factor,
        "row": LOGICAL.sum(1).chunk(size)[rank] * factor,
        "column": LOGICAL.sum(0) * factor,
    }
    return {"model": model, "optim": optimizer}


def packed_spec() -> ucpstore.Spec:
    rows = shard(0, "tp")
    rules = {"model.w": rows, "optim.exp_avg.w": rows, "optim.row.w": rows}
    return ucpstore.Spec({"tp": place()[1]}, {**rules, "optim.column.w": replicate("tp")})


def save_packed(url: str) -> None:
    ucpstore.save(url, packed_job(1), step=1, spec=packed_spec())


def load_packed(url: str) -> list[str]:
    target, expected = packed_job(0), packed_job(1)
    ucpstore.load(url, target, spec=packed_spec())
    (found,), (wanted,) = (job["optim"].state.values() for job in (target, expected))
    wrong = [key for key in wanted if not same(found[key], wanted[key])]
    return wrong + ["w"] * (not same(target["model"].w, expected["model"].w))


def test_b48_each_array_keeps_its_own_shape(ranks: Ranks, tmp_path: Path) -> None:
    url = str(tmp_path / "s")
    ranks.run(2, save_packed, url)
    for size in (1, 2, 4):
        assert on_ranks(ranks, size, load_packed, url) == [[]] * size
    step = ucpstore.CheckpointStore(url).open()
    assert same(step["model"]["w"].read(), PACKED)
    assert same(step["optim"]["exp_avg/w"].read(), LOGICAL)
    assert same(step["optim"]["row/w"].read(), LOGICAL.sum(1))
    assert same(step["optim"]["column/w"].read(), LOGICAL.sum(0))

"""Field cases of optimizer states that are cut flat over data parallel ranks."""

from __future__ import annotations

import math
from collections.abc import Iterable
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from describe.engine import Checkpoint, join, read
from ranks.harness import Ranks
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Shard, distribute_tensor

import ucpstore
from ucpstore import Flat
from ucpstore.describe import describe, match

SHAPES = {"w": (1000,), "v": (37, 3)}
STATES = ("master", "exp_avg", "exp_avg_sq")


def whole(salt: int) -> dict[str, torch.Tensor]:
    made, start = {}, 10_000.0 * salt
    for name, shape in SHAPES.items():
        count = math.prod(shape)
        made[name] = torch.arange(start, start + count).reshape(shape)
        start += count
    return made


def row(salt: int, parts: int, rank: int) -> torch.Tensor:
    """Part `rank` of all tensors end to end, with zeros up to a multiple of `parts`."""
    joined = torch.cat([each.reshape(-1) for each in whole(salt).values()])
    size = -(-joined.numel() // parts)
    return (
        torch.cat([joined, torch.zeros(size * parts - joined.numel())]).chunk(parts)[rank].clone()
    )


def flats(parts: int, rank: int, *, filled: bool) -> dict[str, object]:
    return {
        key: Flat(
            row(salt, parts, rank) if filled else -torch.ones_like(row(salt, parts, rank)), SHAPES
        )
        for salt, key in enumerate(STATES)
    }


def group(size: int) -> dict[int, int]:
    return {rank: rank for rank in range(size)}


def saved_by(size: int) -> Checkpoint:
    states = [
        describe({"optim": flats(size, rank, filled=True)}, group_ranks=group(size), rank=rank)
        for rank in range(size)
    ]
    return join(states)


def load_on(size: int, ranks: Iterable[int], checkpoint: Checkpoint) -> None:
    for rank in ranks:
        target = flats(size, rank, filled=False)
        found = match(
            {"optim": target}, checkpoint.tree, checkpoint.infos, group_ranks=group(size), rank=rank
        )
        read(found, checkpoint)
        for salt, key in enumerate(STATES):
            expected = row(salt, size, rank)
            real = max(0, min(expected.numel(), 1111 - rank * expected.numel()))
            part = target[key]
            assert isinstance(part, Flat)
            assert torch.equal(part.tensor[:real], expected[:real]), (size, rank, key)
            assert (part.tensor[real:] == -1).all(), "padding is left alone"


def test_b30_ranks_with_padding_only_are_no_damage() -> None:
    """Of 24 ranks of 47 elements the last has 30 of the 1,111; of 600, many have nothing."""
    checkpoint = saved_by(16)
    for salt, key in enumerate(STATES):
        for name, expected in whole(salt).items():
            assert torch.equal(checkpoint.arrays[f"optim/{key}/{name}"], expected)
    for size in (24, 32, 5, 1, 16):
        load_on(size, range(size), checkpoint)
    load_on(600, (0, 1, 555, 556, 599), checkpoint)
    load_on(7, range(7), saved_by(600))


Kind = str
KINDS: tuple[Kind, ...] = ("ZeRO-1", "ZeRO-3", "FSDP2")


def held(kind: Kind, *, filled: bool) -> dict[str, object]:
    """The states as this rank holds them: one row, a part of each tensor, or DTensors."""
    size, rank = dist.get_world_size(), dist.get_rank()
    if kind == "ZeRO-1":
        return flats(size, rank, filled=filled)
    mesh = init_device_mesh("cpu", (size,))
    found: dict[str, object] = {}
    for salt, key in enumerate(STATES):
        parts: dict[str, object] = {}
        for name, tensor in whole(salt).items():
            if kind == "FSDP2":
                value = tensor if filled else -torch.ones_like(tensor)
                parts[name] = distribute_tensor(value, mesh, [Shard(0)], src_data_rank=None)
                continue
            own = -(-tensor.numel() // size)
            padded = torch.cat([tensor.reshape(-1), -torch.ones(own * size - tensor.numel())])
            part = padded.chunk(size)[rank].clone()
            parts[name] = Flat(part if filled else part.fill_(-1.0), tensor.shape)
        found[key] = parts
    return found


def save(url: str, kind: Kind) -> None:
    ucpstore.save(url, {"optim": held(kind, filled=True)}, step=1)


def load(url: str, kind: Kind) -> bool:
    target = held(kind, filled=False)
    ucpstore.load(url, {"optim": target})
    return values(target) == values(held(kind, filled=True))


def values(value: object) -> object:
    """What this rank has, without the padding at the end of a row."""
    if isinstance(value, dict):
        return {key: values(item) for key, item in value.items()}
    if isinstance(value, Flat):
        return values(value.tensor)
    if isinstance(value, DTensor):
        return value.to_local().tolist()
    assert isinstance(value, torch.Tensor)
    return [number for number in value.tolist() if number not in (0.0, -1.0)]


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("size", [1, 2, 3, 4])
def test_b31_partitions_of_one_kind_and_count_load_under_any_other(
    ranks: Ranks, tmp_path: Path, kind: Kind, size: int
) -> None:
    url = str(tmp_path / "s")
    ranks.run(size, save, url, kind)
    for other in (1, 2, 3, 4):
        for target in KINDS:
            assert all(ranks.run(other, load, url, target)), (target, other)

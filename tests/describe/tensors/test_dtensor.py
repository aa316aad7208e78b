"""Partitions of DTensors, against an arange that torch itself distributes."""

from __future__ import annotations

import itertools

import pytest
import torch
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Partial, Replicate, Shard, distribute_tensor
from torch.distributed.tensor.placement_types import Placement, _StridedShard

from ucpstore.describe.ranks import Ranks
from ucpstore.describe.tensors.dtensor import like
from ucpstore.describe.tensors.hold import hold
from ucpstore.errors import StateError, UnsupportedError

FOUR = {rank: rank for rank in range(4)}


def _distributed(
    world: int,
    rank: int,
    shape: tuple[int, ...],
    mesh_shape: tuple[int, ...],
    places: list[Placement],
) -> tuple[torch.Tensor, DTensor]:
    whole = torch.arange(torch.Size(shape).numel()).reshape(shape)
    mesh = DeviceMesh("cpu", torch.arange(world).reshape(mesh_shape))
    return whole, distribute_tensor(whole, mesh, places, src_data_rank=None)


CASES = [
    ((11, 3), (4,), [Shard(0)]),
    ((1,), (4,), [Shard(0)]),
    ((6,), (4,), [Shard(0)]),
    ((3, 0), (4,), [Shard(1)]),
    ((3, 5), (4,), [Shard(-1)]),
    ((7, 5), (4,), [Replicate()]),
    ((), (4,), [Replicate()]),
    ((6, 2), (2, 2), [Replicate(), Shard(0)]),
    ((13, 3), (2, 2), [Shard(0), Shard(0)]),
    ((13, 7), (2, 2), [Shard(1), Shard(0)]),
    ((17, 3), (2, 2), [_StridedShard(0, split_factor=2), Shard(0)]),
    ((3, 17), (2, 2), [_StridedShard(1, split_factor=2), Shard(1)]),
    ((2,), (2, 2), [_StridedShard(0, split_factor=2), Shard(0)]),
]


@pytest.mark.parametrize(("shape", "mesh_shape", "places"), CASES, ids=str)
@pytest.mark.parametrize("rank", range(4))
def test_pieces_hold_what_torch_gave_the_rank(fake_ranks, rank, shape, mesh_shape, places):
    fake_ranks(rank, 4)
    whole, tensor = _distributed(4, rank, shape, mesh_shape, places)

    held = hold(tensor, Ranks.here(FOUR), "w")

    assert held.shape == shape
    assert held.local.data_ptr() == tensor._local_tensor.data_ptr()
    rebuilt = torch.full(held.local.shape, -1)
    for piece in held.views[0].pieces:
        rebuilt[piece.local.slices()] = whole[piece.box.slices()]
    assert torch.equal(rebuilt, held.local)


def test_ranks_are_those_of_the_process_group(fake_ranks):
    fake_ranks(2, 4)
    mesh = DeviceMesh("cpu", [2, 3])
    tensor = distribute_tensor(torch.arange(4), mesh, [Shard(0)], src_data_rank=None)

    held = hold(tensor, Ranks.here({2: 0, 3: 1}), "w")

    assert held.partition is not None
    assert held.partition.ranks == (0, 1)
    assert held.views[0].pieces[0].box.offset == (0,)


def test_b35_each_mesh_axis_gives_its_own_ranks(fake_ranks):
    fake_ranks(1, 4)
    mesh = DeviceMesh("cpu", torch.arange(4).reshape(2, 2), mesh_dim_names=("ep", "dp"))
    expert = distribute_tensor(torch.arange(8), mesh["ep"], [Shard(0)], src_data_rank=None)
    dense = distribute_tensor(torch.arange(8), mesh["dp"], [Shard(0)], src_data_rank=None)

    held = [hold(tensor, Ranks.here(FOUR), "w") for tensor in (expert, dense)]

    assert [h.partition.ranks for h in held if h.partition] == [(1, 3), (0, 1)]
    assert [h.views[0].pieces[0].box.offset for h in held] == [(0,), (4,)]


def test_rank_outside_of_the_mesh_holds_nothing(fake_ranks):
    fake_ranks(3, 4)
    mesh = DeviceMesh("cpu", [0, 1])
    tensor = distribute_tensor(torch.arange(4), mesh, [Shard(0)], src_data_rank=None)

    held = hold(tensor, Ranks.here(FOUR), "w")

    assert (held.shape, held.views[0].pieces, held.local.numel()) == ((4,), (), 0)


def test_mesh_outside_of_the_process_group_is_refused(fake_ranks):
    fake_ranks(0, 4)
    _, tensor = _distributed(4, 0, (4,), (4,), [Shard(0)])

    with pytest.raises(StateError, match=r"model\.w: .*\[2, 3\] are not in the process group"):
        hold(tensor, Ranks.here({0: 0, 1: 1}), "model.w")


def test_b38_partial_is_refused_with_advice(fake_ranks):
    fake_ranks(0, 2)
    mesh = DeviceMesh("cpu", [0, 1])
    tensor = DTensor.from_local(torch.ones(4), mesh, [Partial()], run_check=False)

    with pytest.raises(UnsupportedError, match=r"^model\.w: .*redistribute it"):
        hold(tensor, Ranks.here({0: 0, 1: 1}), "model.w")


def test_b37_parts_that_do_not_follow_chunk_are_refused(fake_ranks):
    fake_ranks(0, 2)
    mesh = DeviceMesh("cpu", [0, 1])
    tensor = DTensor.from_local(
        torch.ones(1, 2), mesh, [Shard(0)], run_check=False, shape=torch.Size((4, 2)), stride=(2, 1)
    )

    with pytest.raises(StateError, match=r"^w: .*shape \(2, 2\) .*\(4, 2\), but it has .*\(1, 2\)"):
        hold(tensor, Ranks.here({0: 0, 1: 1}), "w")


def test_subclass_inside_a_dtensor_is_refused(fake_ranks):
    from torch._subclasses.fake_tensor import FakeTensorMode

    fake_ranks(0, 2)
    mesh = DeviceMesh("cpu", [0, 1])
    tensor = DTensor.from_local(torch.ones(4), mesh, [Replicate()], run_check=False)
    tensor._local_tensor = FakeTensorMode().from_tensor(torch.ones(4))

    with pytest.raises(UnsupportedError, match=r"^w: a tensor of type .*FakeTensor"):
        hold(tensor, Ranks.here({0: 0, 1: 1}), "w")


def test_like_keeps_the_layout_and_takes_the_dtype(fake_ranks):
    fake_ranks(3, 4)
    for places in ([Shard(0), Shard(1)], [_StridedShard(0, split_factor=2), Shard(0)]):
        _, tensor = _distributed(4, 3, (7, 5), (2, 2), places)

        made = like(tensor, torch.bfloat16)

        assert made.placements == tensor.placements
        assert made.device_mesh == tensor.device_mesh
        assert (made.shape, made.dtype) == (tensor.shape, torch.bfloat16)
        assert made._local_tensor.shape == tensor._local_tensor.shape
        assert not made.requires_grad


def test_three_axes_over_two_dimensions(fake_ranks):
    for rank, places in itertools.product(
        range(8), ([Shard(0), Shard(1), Shard(0)], [Replicate(), Shard(1), Shard(1)])
    ):
        fake_ranks(rank, 8)
        whole, tensor = _distributed(8, rank, (9, 10), (2, 2, 2), places)
        held = hold(tensor, Ranks.here({r: r for r in range(8)}), "w")
        rebuilt = torch.full(held.local.shape, -1)
        for piece in held.views[0].pieces:
            rebuilt[piece.local.slices()] = whole[piece.box.slices()]
        assert torch.equal(rebuilt, held.local)


def test_like_works_outside_of_the_mesh(fake_ranks):
    fake_ranks(3, 4)
    mesh = DeviceMesh("cpu", [0, 1])
    tensor = distribute_tensor(torch.arange(4), mesh, [Shard(0)], src_data_rank=None)

    made = like(tensor, torch.float32)

    assert (made.shape, made.dtype, made._local_tensor.numel()) == ((4,), torch.float32, 0)

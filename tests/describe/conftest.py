"""Shared fixtures: any rank of a process group of any size, without other processes."""

from __future__ import annotations

from collections.abc import Callable, Iterator

import pytest
import torch.distributed as dist


@pytest.fixture
def fake_ranks() -> Iterator[Callable[[int, int], None]]:
    """`fake_ranks(rank, size)` makes this process that rank; its collectives do nothing."""
    from torch.testing._internal.distributed.fake_pg import FakeStore

    def become(rank: int, size: int) -> None:
        if dist.is_initialized():
            dist.destroy_process_group()
        dist.init_process_group("fake", rank=rank, world_size=size, store=FakeStore())

    yield become
    if dist.is_initialized():
        dist.destroy_process_group()

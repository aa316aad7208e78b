"""The harness itself: results, errors and deaths come back, and pools are reused."""

from __future__ import annotations

import os
import signal
import time

import pytest
import torch
import torch.distributed as dist
from ranks.harness import Ranks, RanksFailed, threads, values

from ucpstore.agree import Group


def reduce_with(number: int) -> tuple[int, int]:
    total = torch.tensor([dist.get_rank() + number])
    dist.all_reduce(total)
    return int(total), os.getpid()


def fail_on(rank: int) -> int:
    if dist.get_rank() == rank:
        raise ValueError(f"no luck on {rank}")
    return dist.get_rank()


def die_on(rank: int) -> int:
    if dist.get_rank() == rank:
        os.kill(os.getpid(), signal.SIGKILL)
    return torch.get_num_threads()


def sleep(seconds: float) -> None:
    time.sleep(seconds)


def test_ranks_share_a_process_group_and_live_on(ranks: Ranks) -> None:
    first = ranks.run(2, reduce_with, 10)
    assert [total for total, _ in first] == [21, 21]
    again = ranks.run(2, reduce_with, 1)
    assert [pid for _, pid in again] == [pid for _, pid in first]


def test_errors_come_back_with_rank_and_traceback(ranks: Ranks) -> None:
    before = [pid for _, pid in ranks.run(2, reduce_with, 0)]
    with pytest.raises(RanksFailed, match=r"(?s)on 1 of 2 ranks.*rank 1.*fail_on.*no luck on 1"):
        ranks.run(2, fail_on, 1)
    assert not set(before) & {pid for _, pid in ranks.run(2, reduce_with, 0)}


def test_a_killed_rank_is_told(ranks: Ranks) -> None:
    with ranks.fresh(2) as pool:
        outcomes = pool.outcomes(die_on, 1)
        assert [outcome.died for outcome in outcomes] == [False, True]
        assert outcomes[0].value == 1


def test_a_hanging_rank_is_told(ranks: Ranks) -> None:
    with ranks.fresh(1) as pool, pytest.raises(TimeoutError, match="rank 0 of 1"):
        pool.run(sleep, 60, timeout_s=0.3)


def test_threads_share_a_local_group() -> None:
    def rank_of(group: Group) -> tuple[int, int]:
        return group.rank, group.size

    assert values(threads(3, rank_of)) == [(0, 3), (1, 3), (2, 3)]

"""Calls between processes over a c10d store: deaths, subgroups, and the job's own collectives."""

from __future__ import annotations

import os
import signal
import threading
import time
from typing import Any

import torch
import torch.distributed as dist
from ranks.harness import Outcome, Ranks

from ucpstore.agree import Group, group_of
from ucpstore.errors import OutcomeUnknownError, RankMissingError, StorageError
from ucpstore.options import Options

OPTIONS = Options(arrive_timeout_s=20, report_timeout_s=600, silence_timeout_s=3)
SHORT = Options(arrive_timeout_s=1, report_timeout_s=600, silence_timeout_s=3)


def joined(answers: list[bytes]) -> bytes:
    return b"".join(answers)


def call_once(group: Group | None = None, options: Options = OPTIONS) -> bytes:
    group = group_of(group)
    with group.call("save", options) as call:
        call.round("begin", lambda: b"", joined, timeout_s=options.arrive_timeout_s)
        return call.round(
            "report", lambda: b"<%d>" % group.rank, joined, timeout_s=options.report_timeout_s
        )


def num_keys() -> int:
    from torch.distributed import distributed_c10d as c10d

    return int(c10d._get_process_group_store(dist.group.WORLD).num_keys())


def settled(count: int) -> int:
    """The number of keys, once it is `count` or has not become so for a while."""
    deadline = time.monotonic() + 3
    while num_keys() != count and time.monotonic() < deadline:
        time.sleep(0.01)
    return num_keys()


def many_calls(count: int) -> tuple[int, int, float]:
    call_once()
    dist.barrier()
    before = num_keys()
    dist.barrier()
    began = time.monotonic()
    for _ in range(count):
        call_once()
    lasted = time.monotonic() - began
    dist.barrier()
    after = settled(before)
    dist.barrier()
    return before, after, lasted / count


def test_keys_in_the_store_stay_constant_over_1000_calls(ranks: Ranks) -> None:
    for before, after, seconds in ranks.run(4, many_calls, 1000):
        assert after == before
        assert seconds < 0.1


def fail_in_turn() -> list[str]:
    seen = []
    group = group_of()
    for rank in range(group.size):
        for name in ("begin", "report"):

            def produce(place: str, rank: int = rank, name: str = name) -> bytes:
                if (group.rank, place) == (rank, name):
                    raise StorageError(f"no space at {name}")
                return b""

            try:
                with group.call("save", OPTIONS) as call:
                    call.round("begin", lambda: produce("begin"), joined, timeout_s=20)
                    call.round("report", lambda: produce("report"), joined, timeout_s=20)
            except StorageError as error:
                seen.append(str(error))
    dist.barrier()
    seen.append(call_once().decode())
    return seen


def test_a_failure_on_each_rank_is_raised_on_all_and_the_next_call_works(ranks: Ranks) -> None:
    results = ranks.run(3, fail_in_turn)
    for rank, seen in enumerate(results):
        assert seen[-1] == "<0><1><2>"
        for other in range(3):
            prefix = "" if other == rank else f"rank {other}: "
            expected = [f"{prefix}no space at begin", f"{prefix}no space at report"]
            assert seen[2 * other : 2 * other + 2] == expected


def call_without(absent: list[int]) -> tuple[str, bytes]:
    text = ""
    if dist.get_rank() not in absent:
        try:
            call_once(options=SHORT)
        except RankMissingError as error:
            text = str(error)
    dist.barrier()
    return text, call_once()


def test_ranks_that_do_not_call_are_named_and_the_next_call_works(ranks: Ranks) -> None:
    results = ranks.run(4, call_without, [1, 3])
    assert [outcome for _, outcome in results] == [b"<0><1><2><3>"] * 4
    for rank in (0, 2):
        assert results[rank][0].startswith("ranks 1, 3 did not call save within 1 s")
    results = ranks.run(4, call_without, [0])
    assert [outcome for _, outcome in results] == [b"<0><1><2><3>"] * 4
    for rank in (1, 2, 3):
        assert results[rank][0].startswith("rank 0 did not call save within 1 s")


def call_in_some(members: list[int]) -> tuple[bytes, list[int]]:
    group = dist.new_group(members, use_local_synchronization=True)
    outcome = b""
    if dist.get_rank() in members:
        outcome = call_once(group_of(group))
    everyone = torch.ones(1)
    dist.all_reduce(everyone)
    other = dist.new_group()
    dist.all_reduce(everyone, group=other)
    return outcome, everyone.int().tolist()


def test_a_call_in_two_of_three_ranks(ranks: Ranks) -> None:
    # torch counts groups made by some ranks on those alone, and names later ones by that count.
    with ranks.fresh(3) as pool:
        assert pool.run(call_in_some, [2, 0]) == [
            (b"<0><1>", [9]),
            (b"", [9]),
            (b"<0><1>", [9]),
        ]


def calls_beside_collectives(count: int) -> tuple[int, bytes]:
    outcomes: list[bytes] = []
    done = torch.zeros(1)
    thread = threading.Thread(target=lambda: outcomes.extend(call_once() for _ in range(count)))
    thread.start()
    rounds = 0
    while done.item() < dist.get_world_size():
        done = torch.tensor([0.0 if thread.is_alive() else 1.0])
        dist.all_reduce(done)
        rounds += 1
    thread.join()
    assert len(outcomes) == count
    return rounds, outcomes[-1]


def test_the_jobs_collectives_run_beside_calls(ranks: Ranks) -> None:
    results = ranks.run(3, calls_beside_collectives, 50)
    assert len({rounds for rounds, _ in results}) == 1
    assert {outcome for _, outcome in results} == {b"<0><1><2>"}


def die_in_report(rank: int, after_s: float) -> tuple[str, str, float]:
    """Rank `rank` dies `after_s` into the second round, in which the others wait for it."""
    group = group_of()
    began = time.monotonic()

    def produce() -> bytes:
        if group.rank == rank:
            time.sleep(after_s)
            os.kill(os.getpid(), signal.SIGKILL)
        return b""

    try:
        with group.call("save", OPTIONS) as call:
            call.round("begin", lambda: b"", joined, timeout_s=20)
            call.round("report", produce, joined, timeout_s=600)
    except (RankMissingError, OutcomeUnknownError) as error:
        return type(error).__name__, str(error), time.monotonic() - began
    return "", "", 0.0


def alive(outcomes: list[Outcome]) -> list[Any]:
    return [outcome.value for outcome in outcomes if not outcome.died]


def test_a_killed_rank_is_found_by_its_heartbeat(ranks: Ranks) -> None:
    with ranks.fresh(3) as pool:
        seen = alive(pool.outcomes(die_in_report, 1, 2.5))
    assert len(seen) == 2
    for name, text, seconds in seen:
        assert name == "RankMissingError"
        assert text.startswith("rank 1 stopped answering during save: no sign of life for 3 s")
        assert seconds < 20


def test_a_rank_killed_before_its_first_heartbeat_is_found(ranks: Ranks) -> None:
    with ranks.fresh(3) as pool:
        seen = alive(pool.outcomes(die_in_report, 2, 0.0))
    assert [name for name, _, _ in seen] == ["RankMissingError"] * 2


def test_where_rank_0_is_killed_with_the_store_the_outcome_is_unknown(ranks: Ranks) -> None:
    with ranks.fresh(3) as pool:
        seen = alive(pool.outcomes(die_in_report, 0, 1.0))
    assert len(seen) == 2
    for name, text, seconds in seen:
        assert name == "OutcomeUnknownError"
        assert text.startswith("the key-value store of the process group is gone")
        assert text.endswith("whether the save took effect is not known")
        assert seconds < 10


def rank_0_of_a_subgroup_dies() -> tuple[str, str]:
    """Rank 0 of the subgroup is not the process that hosts the store."""
    group = dist.new_group([1, 2], use_local_synchronization=True)
    if dist.get_rank() == 0:
        time.sleep(8)
        return "", ""
    member = group_of(group)

    def decide(answers: list[bytes]) -> bytes:
        os.kill(os.getpid(), signal.SIGKILL)
        return b""

    try:
        with member.call("save", OPTIONS) as call:
            call.round("begin", lambda: b"", joined, timeout_s=20)
            call.round("report", lambda: b"", decide, timeout_s=600)
    except OutcomeUnknownError as error:
        return type(error).__name__, str(error)
    return "", ""


def test_where_only_rank_0_is_killed_the_others_notice_its_silence(ranks: Ranks) -> None:
    with ranks.fresh(3) as pool:
        seen = alive(pool.outcomes(rank_0_of_a_subgroup_dies))
    assert seen[1][0] == "OutcomeUnknownError"
    assert seen[1][1].startswith("rank 0 stopped answering during save: no sign of life for 3 s")


def call_and_exit() -> bytes:
    """Every rank ends its process right after the call, rank 0 with the store in it."""
    outcome = call_once()
    threading.Timer(0.0 if dist.get_rank() == 0 else 0.5, os._exit, (0,)).start()
    return outcome


def test_rank_0_may_exit_right_after_a_call(ranks: Ranks) -> None:
    with ranks.fresh(4) as pool:
        outcomes = pool.outcomes(call_and_exit)
    assert [outcome.value for outcome in outcomes[1:]] == [b"<0><1><2><3>"] * 3

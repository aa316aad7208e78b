"""The exchange between threads and between processes, and what becomes of it after a failure."""

from __future__ import annotations

import os
import signal
import time
from collections.abc import Callable, Iterable
from dataclasses import replace

import numpy as np
import pytest
import torch
import torch.distributed as dist
from ranks.harness import Ranks, RanksFailed, threads, values

from ucpstore.agree import Call, Group, group_of, local_group
from ucpstore.errors import AgreementError, RankMissingError, StorageError
from ucpstore.exchange import Bytes, exchanger_of
from ucpstore.options import Options

OPTIONS = Options(arrive_timeout_s=20, report_timeout_s=60, silence_timeout_s=5)


def begin(call: Call) -> None:
    call.round("begin", lambda: b"", lambda answers: b"", timeout_s=20)


def report(call: Call, action: Callable[[], object]) -> None:
    """A round in which every rank does something first."""

    def produce() -> bytes:
        action()
        return b""

    call.round("report", produce, lambda answers: b"", timeout_s=20)


def bytes_from(source: int, target: int, size: int) -> Bytes:
    return np.full(size, 16 * source + target, np.uint8)


def all_to_all(call: Call, size: int, timeout_s: float = 20) -> dict[int, Bytes]:
    """Send `size + target` bytes to each rank; what came from each."""
    others: Iterable[int] = [rank for rank in range(call.size) if rank != call.rank]
    sends = {rank: bytes_from(call.rank, rank, size + rank) for rank in others}
    receives = {rank: np.empty(size + call.rank, np.uint8) for rank in others}
    exchanger_of(call, timeout_s).exchange(sends, receives)
    return receives


def check(call: Call, size: int) -> None:
    for source, received in all_to_all(call, size).items():
        assert np.array_equal(received, bytes_from(source, call.rank, size + call.rank))


def exchange_twice(group: Group | None = None) -> bool:
    """Two calls with several exchanges each; whether they used the same connections."""
    group = group_of(group)
    made = []
    for _ in range(2):
        with group.call("save", OPTIONS) as call:
            begin(call)
            for size in (1, 70_000, 3_000_000):
                check(call, size)
            made.append(group.exchanger)
            call.round("report", lambda: b"", lambda answers: b"", timeout_s=20)
    return made[0] == made[1] is not None


def test_threads_exchange_bytes() -> None:
    assert values(threads(3, exchange_twice)) == [True] * 3


def test_processes_exchange_bytes_and_keep_the_connections(ranks: Ranks) -> None:
    assert ranks.run(3, exchange_twice) == [True] * 3


def test_one_process_alone_exchanges_nothing() -> None:
    with group_of(None).call("save", OPTIONS) as call:
        begin(call)
        exchanger_of(call, 1).exchange({}, {})


def one_way(group: Group | None = None) -> list[int]:
    """Only rank 2 sends, to rank 0, into the middle of a buffer; empty arrays are skipped."""
    group = group_of(group)
    buffer = np.zeros(6, np.uint8)
    empty = np.empty(0, np.uint8)
    with group.call("save", OPTIONS) as call:
        begin(call)
        sends = {0: np.array([7, 8], np.uint8), 1: empty} if group.rank == 2 else {}
        receives = {2: buffer[2:4]} if group.rank == 0 else {}
        exchanger_of(call, 10).exchange(sends, receives)
        call.round("report", lambda: b"", lambda answers: b"", timeout_s=20)
    return [int(value) for value in buffer]


def test_messages_may_go_one_way(ranks: Ranks) -> None:
    expected = [[0, 0, 7, 8, 0, 0], [0] * 6, [0] * 6]
    assert values(threads(3, one_way)) == expected
    assert ranks.run(3, one_way) == expected


def exchange_in_some(members: list[int]) -> tuple[list[int], str, bool]:
    group = dist.new_group(members, use_local_synchronization=True)
    same = exchange_twice(group_of(group)) if dist.get_rank() in members else True
    total = torch.ones(1)
    dist.all_reduce(total)
    later = dist.new_group()
    dist.all_reduce(total, group=later)
    return total.int().tolist(), later.group_name, same


def test_two_of_three_ranks_exchange_and_torchs_groups_are_unharmed(ranks: Ranks) -> None:
    # torch counts groups made by some ranks on those alone, and names later ones by that count.
    with ranks.fresh(3) as pool:
        results = pool.run(exchange_in_some, [0, 2])
    assert [(total, same) for total, _, same in results] == [([9], True)] * 3


def beside_collectives() -> int:
    """Exchanges in a thread while the main thread reduces over the default group."""
    import threading

    failures: list[BaseException] = []

    def run() -> None:
        try:
            for _ in range(5):
                exchange_twice()
        except BaseException as error:
            failures.append(error)

    thread = threading.Thread(target=run)
    thread.start()
    done = torch.zeros(1)
    while done.item() < dist.get_world_size():
        done = torch.tensor([0.0 if thread.is_alive() else 1.0])
        dist.all_reduce(done)
    assert not failures, failures
    return int(done)


def test_the_jobs_collectives_run_beside_exchanges(ranks: Ranks) -> None:
    assert ranks.run(3, beside_collectives) == [3] * 3


def miss_one_exchange() -> tuple[str, bool]:
    """Rank 1 leaves an exchange out; the call fails on all ranks, the next makes a new one."""
    group = group_of()
    text = ""
    try:
        with group.call("save", OPTIONS) as call:
            begin(call)
            check(call, 10)
            report(call, lambda: call.rank != 1 and all_to_all(call, 10, timeout_s=1))
    except RankMissingError as error:
        text = str(error)
    return text, exchange_twice()


def test_after_a_timeout_the_next_call_makes_new_connections(ranks: Ranks) -> None:
    results = ranks.run(3, miss_one_exchange)
    for text, again in results:
        assert "did not take part in the exchange of save within 1 s" in text
        assert again
    assert "rank 1 did" in results[0][0] or "ranks 1, 2 did" in results[0][0]


def test_a_missing_thread_is_named() -> None:
    def run(group: Group) -> None:
        with group.call("save", OPTIONS) as call:
            begin(call)
            report(call, lambda: call.rank != 2 and all_to_all(call, 10, timeout_s=0.2))

    outcomes = threads(3, run)
    text = "rank 2 did not take part in the exchange of save within 0.2 s, or died"
    for outcome in outcomes:  # told by rank 0 or 1, whoever was first
        assert text in str(outcome.error)


def test_a_rank_that_is_late_but_alive_is_waited_for() -> None:
    def run(group: Group) -> None:
        with group.call("save", replace(OPTIONS, silence_timeout_s=0.6)) as call:
            begin(call)
            if call.rank == 2:
                time.sleep(2)
            report(call, lambda: check_slowly(call))

    assert values(threads(3, run)) == [None] * 3


def check_slowly(call: Call) -> None:
    sends = {0: np.ones(4, np.uint8)} if call.rank == 2 else {}
    received = np.zeros(4, np.uint8)
    exchanger = exchanger_of(call, 20, transfer_s=0.6)
    exchanger.exchange(sends, {2: received} if call.rank == 0 else {})
    assert received.sum() == (4 if call.rank == 0 else 0)


def fail_before_exchange(group: Group | None = None) -> tuple[str, float]:
    """Rank 1 fails before the exchange: the others hear of it at once, and why."""
    began = time.monotonic()

    def act(call: Call) -> None:
        exchanger = exchanger_of(call, 60)
        if call.rank == 1:
            raise StorageError("no space")
        exchanger.exchange({1: np.ones(4, np.uint8)}, {1: np.ones(4, np.uint8)})

    try:
        with group_of(group).call("save", OPTIONS) as call:
            begin(call)
            report(call, lambda: act(call))
    except StorageError as error:
        return str(error), time.monotonic() - began
    return "", 0.0


def test_an_error_on_one_rank_ends_the_exchange_of_the_others(ranks: Ranks) -> None:
    for outcomes in (values(threads(3, fail_before_exchange)), ranks.run(3, fail_before_exchange)):
        for rank, (text, seconds) in enumerate(outcomes):
            assert text == ("no space" if rank == 1 else "rank 1: no space")
            assert seconds < 10


def test_calls_of_several_threads_keep_to_the_exchange_that_they_began_with() -> None:
    groups = local_group(2)
    with groups[0].call("save", OPTIONS) as first, groups[0].call("load", OPTIONS) as second:
        first.exchanger = "made by the first"
        assert second.exchanger is None
        second.exchanger = "made by the second"
        assert first.exchanger == "made by the first"
    with groups[0].call("save", OPTIONS) as third:
        assert third.exchanger == "made by the second"


def test_sizes_that_differ_are_refused_between_threads() -> None:
    def run(group: Group) -> None:
        with group.call("save", OPTIONS) as call:
            begin(call)
            sends = {0: np.zeros(3, np.uint8)} if call.rank == 1 else {}
            receives = {1: np.zeros(4, np.uint8)} if call.rank == 0 else {}
            report(call, lambda: exchanger_of(call, 1).exchange(sends, receives))

    error = threads(2, run)[0].error
    assert isinstance(error, AgreementError)
    assert str(error) == "rank 1 sent 3 bytes, but 4 were expected"


def die_before_exchange() -> tuple[str, float]:
    began = 0.0
    try:
        with group_of().call("save", OPTIONS) as call:
            begin(call)
            check(call, 10)
            if call.rank == 1:
                os.kill(os.getpid(), signal.SIGKILL)
            began = time.monotonic()
            report(call, lambda: all_to_all(call, 1_000_000, timeout_s=15))
    except RankMissingError as error:
        return str(error), time.monotonic() - began
    return "", 0.0


def test_a_rank_that_died_is_named_within_the_limit(ranks: Ranks) -> None:
    with ranks.fresh(3) as pool:
        outcomes = pool.outcomes(die_before_exchange)
    assert outcomes[1].died
    for outcome in (outcomes[0], outcomes[2]):
        text, seconds = outcome.value
        assert "rank 1 did not take part in the exchange of save" in text
        assert seconds < 16


def unreachable(there: bool) -> str:
    """Rank 1 does not connect; it may have said that it will."""
    if dist.get_rank():
        group = group_of()
        with group.call("save", OPTIONS) as call:
            begin(call)
            if there:
                group.store.set(f"exchange/{call.id}/here1", b"H")
            time.sleep(2)
        return ""
    with group_of().call("save", OPTIONS) as call:
        begin(call)
        try:
            exchanger_of(call, 1)
        except RankMissingError as error:
            return str(error)
    return ""


def test_connections_that_cannot_be_made_are_told_with_advice(ranks: Ranks) -> None:
    with ranks.fresh(2) as pool:
        text = pool.run(unreachable, True)[0]
        absent = pool.run(unreachable, False)[0]
    assert absent.startswith("rank 1 did not take part in the exchange of save within 1 s, or died")
    assert "could not connect to each other over gloo within 1 s" in text
    assert "set GLOO_SOCKET_IFNAME" in text


def wrong_size() -> None:
    """Rank 0 takes fewer bytes than rank 1 sends."""
    with group_of().call("save", OPTIONS) as call:
        begin(call)
        sends = {0: np.zeros(40, np.uint8)} if call.rank == 1 else {}
        receives = {1: np.zeros(4, np.uint8)} if call.rank == 0 else {}
        exchanger_of(call, 2).exchange(sends, receives)


def test_sizes_that_differ_fail_between_processes(ranks: Ranks) -> None:
    with ranks.fresh(2) as pool, pytest.raises(RanksFailed):
        pool.run(wrong_size)

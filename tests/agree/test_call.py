"""Calls between threads: outcomes, failures, missing ranks, and keys that do not pile up."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from dataclasses import replace

import pytest
from ranks.harness import Outcome, threads, values

from ucpstore.agree import Group, group_of, local_group
from ucpstore.agree.keyvalue import DictStore
from ucpstore.errors import (
    AgreementError,
    MismatchError,
    OutcomeUnknownError,
    RankMissingError,
    StateError,
    StepExistsError,
    StorageError,
)
from ucpstore.options import Options

SHORT = Options(arrive_timeout_s=0.6, report_timeout_s=5.0, silence_timeout_s=0.6)


def text_of(rank: int) -> bytes:
    return f"<{rank}>".encode()


def joined(answers: list[bytes]) -> bytes:
    return b"".join(answers)


def one_round(group: Group, kind: str = "save", options: Options = SHORT) -> bytes:
    with group.call(kind, options) as call:
        return call.round(
            "begin", lambda: text_of(group.rank), joined, timeout_s=options.arrive_timeout_s
        )


def failing(group: Group, ranks: dict[int, BaseException], name: str = "begin") -> bytes:
    """One round in which the given ranks raise."""

    def produce() -> bytes:
        if group.rank in ranks:
            raise ranks[group.rank]
        return text_of(group.rank)

    with group.call("save", SHORT) as call:
        if name == "report":
            call.round("begin", lambda: b"", joined, timeout_s=1)
        return call.round(name, produce, joined, timeout_s=5)


def errors(outcomes: list[Outcome]) -> list[str]:
    return [f"{type(outcome.error).__name__}: {outcome.error}" for outcome in outcomes]


def keys(groups: tuple[Group, ...]) -> int:
    assert isinstance(groups[0].store, DictStore)
    return groups[0].store.num_keys()


def test_all_ranks_return_what_rank_0_decides_over_all_answers() -> None:
    assert values(threads(4, one_round)) == [b"<0><1><2><3>"] * 4


def test_one_process_alone_needs_no_store() -> None:
    group = group_of(None)
    assert one_round(group) == b"<0>"
    with pytest.raises(ValueError, match=r"^mine$"):
        failing(group, {0: ValueError("mine")})
    assert one_round(group) == b"<0>"


def test_rounds_follow_each_other_and_share_the_id() -> None:
    def two(group: Group) -> tuple[str, bytes]:
        with group.call("save", SHORT) as call:
            call.round("begin", lambda: b"", joined, timeout_s=1)
            name = call.id
            outcome = call.round("report", lambda: text_of(group.rank), joined, timeout_s=1)
            assert call.id == name
            return name, outcome

    outcomes = values(threads(3, two))
    assert len({name for name, _ in outcomes}) == 1
    assert {outcome for _, outcome in outcomes} == {b"<0><1><2>"}


def test_large_payloads_come_through_compressed_and_in_parts() -> None:
    import random

    noise = random.Random(1).randbytes(9 * 1024 * 1024)
    groups = local_group(2)

    def large(group: Group) -> bool:
        with group.call("save", SHORT) as call:
            outcome = call.round("begin", lambda: noise, joined, timeout_s=20)
            return outcome == noise + noise

    assert values(threads(groups, large)) == [True, True]
    assert keys(groups) == 0


@pytest.mark.parametrize("name", ["begin", "report"])
@pytest.mark.parametrize("rank", range(3))
def test_a_failure_is_raised_on_every_rank_with_its_class(rank: int, name: str) -> None:
    error = StorageError("disk full")
    groups = local_group(3)
    began = time.monotonic()
    outcomes = threads(groups, lambda group: failing(group, {rank: error}, name))
    assert time.monotonic() - began < 4
    assert outcomes[rank].error is error
    assert error.__notes__ == [f"met on rank {rank}; every rank of the save raises it"]
    others = [outcome for outcome in outcomes if outcome.rank != rank]
    assert errors(others) == [f"StorageError: rank {rank}: disk full"] * 2
    assert keys(groups) == 0
    assert values(threads(groups, one_round)) == [b"<0><1><2>"] * 3


def test_a_foreign_exception_becomes_an_agreement_error_elsewhere() -> None:
    outcomes = threads(2, lambda group: failing(group, {1: ZeroDivisionError("by zero")}))
    assert errors(outcomes) == [
        "AgreementError: rank 1: ZeroDivisionError: by zero",
        "ZeroDivisionError: by zero",
    ]


def test_of_several_failures_the_lowest_ranks_is_the_cause() -> None:
    raised: dict[int, BaseException] = {
        1: MismatchError("one"),
        2: StorageError("two"),
        3: StorageError("three"),
    }
    outcomes = threads(4, lambda group: failing(group, raised))
    cause = "MismatchError: rank 1: one (and 2 more ranks)"
    assert errors(outcomes) == [cause, "MismatchError: one", cause, cause]
    assert isinstance(outcomes[2].error, MismatchError)
    assert outcomes[2].error.__cause__ is raised[2]


def test_after_a_failure_rank_0_does_not_wait_for_ranks_that_are_busy() -> None:
    release = threading.Event()

    def busy(group: Group) -> bytes:
        with group.call("save", replace(SHORT, silence_timeout_s=30)) as call:
            call.round("begin", lambda: b"", joined, timeout_s=5)
            if group.rank == 1:
                return call.round("report", _raise(StorageError("full")), joined, timeout_s=60)
            if group.rank == 2:
                release.wait(20)
            try:
                return call.round("report", lambda: b"", joined, timeout_s=60)
            finally:
                release.set()

    began = time.monotonic()
    outcomes = threads(3, busy)
    assert time.monotonic() - began < 15
    assert [type(outcome.error) for outcome in outcomes] == [StorageError] * 3


def _raise(error: BaseException) -> Callable[[], bytes]:
    def produce() -> bytes:
        raise error

    return produce


@pytest.mark.parametrize(
    ("error", "elsewhere"),
    [
        (StepExistsError("step 3 exists"), "StepExistsError: rank 0: step 3 exists"),
        (StateError("ranks 0 and 1 differ"), "StateError: ranks 0 and 1 differ"),
        (KeyError("k"), "AgreementError: rank 0: KeyError: 'k'"),
    ],
)
def test_a_failed_decision_is_raised_on_every_rank(error: Exception, elsewhere: str) -> None:
    def run(group: Group) -> bytes:
        def decide(answers: list[bytes]) -> bytes:
            raise error

        with group.call("save", SHORT) as call:
            return call.round("begin", lambda: b"", decide, timeout_s=1)

    outcomes = threads(3, run)
    assert outcomes[0].error is error
    assert errors(outcomes[1:]) == [elsewhere] * 2


@pytest.mark.parametrize("rank", [0, 1])
def test_an_interrupt_is_told_to_the_others_and_raised_at_once(rank: int) -> None:
    groups = local_group(3)
    interrupt = KeyboardInterrupt()
    outcomes = threads(groups, lambda group: failing(group, {rank: interrupt}, "report"))
    assert outcomes[rank].error is interrupt
    others = [outcome for outcome in outcomes if outcome.rank != rank]
    assert errors(others) == [f"AgreementError: rank {rank}: KeyboardInterrupt"] * 2
    assert values(threads(groups, one_round)) == [b"<0><1><2>"] * 3
    assert keys(groups) == 0


@pytest.mark.parametrize(
    ("commits", "elsewhere"),
    [
        (
            True,
            "OutcomeUnknownError: rank 0 was interrupted while it decided (KeyboardInterrupt); "
            "whether the save took effect is not known",
        ),
        (False, "AgreementError: rank 0: KeyboardInterrupt"),
    ],
)
def test_an_interrupt_while_rank_0_decides_may_leave_what_it_decided(
    commits: bool, elsewhere: str
) -> None:
    interrupt = KeyboardInterrupt()

    def decide(answers: list[bytes]) -> bytes:
        raise interrupt

    def run(group: Group) -> bytes:
        with group.call("save", SHORT) as call:
            call.round("begin", lambda: b"", joined, timeout_s=1)
            return call.round("commit", lambda: b"", decide, timeout_s=5, commits=commits)

    groups = local_group(3)
    outcomes = threads(groups, run)
    assert outcomes[0].error is interrupt
    assert errors(outcomes[1:]) == [elsewhere] * 2
    assert values(threads(groups, one_round)) == [b"<0><1><2>"] * 3


@pytest.mark.parametrize("rank", [0, 1, 2])
def test_an_error_between_rounds_reaches_the_others(rank: int) -> None:
    groups = local_group(3)

    def run(group: Group) -> bytes:
        with group.call("save", SHORT) as call:
            call.round("begin", lambda: b"", joined, timeout_s=1)
            if group.rank == rank:
                raise StorageError("no staging memory")
            return call.round("report", lambda: b"", joined, timeout_s=5)

    outcomes = threads(groups, run)
    assert str(outcomes[rank].error) == "no staging memory"
    others = [outcome for outcome in outcomes if outcome.rank != rank]
    assert errors(others) == [f"StorageError: rank {rank}: no staging memory"] * 2
    assert values(threads(groups, one_round)) == [b"<0><1><2>"] * 3


def test_ranks_that_do_not_call_are_named() -> None:
    groups = local_group(4)
    outcomes = threads(groups[:2], one_round)
    text = (
        "RankMissingError: ranks 2, 3 did not call save within 0.6 s; every rank of the process "
        "group must call it, not rank 0 alone"
    )
    assert errors(outcomes) == [text, text]
    assert values(threads(groups, one_round)) == [b"<0><1><2><3>"] * 4


def test_rank_0_that_does_not_call_is_named() -> None:
    groups = local_group(3)
    outcomes = threads(groups[1:], one_round)
    text = (
        "RankMissingError: rank 0 did not call save within 0.6 s; every rank of the process group "
        "must call it"
    )
    assert errors(outcomes) == [text, text]
    assert keys(groups) == 0
    assert values(threads(groups, one_round)) == [b"<0><1><2>"] * 3


def test_a_rank_that_is_slow_but_alive_is_told_apart() -> None:
    def run(group: Group) -> bytes:
        with group.call("save", SHORT) as call:
            call.round("begin", lambda: b"", joined, timeout_s=1)
            if group.rank == 1:
                time.sleep(2)
            return call.round("report", lambda: b"", joined, timeout_s=1.2)

    outcomes = threads(2, run)
    text = (
        "RankMissingError: rank 1 did not reach the report of save within 1.2 s after rank 0, "
        "though alive; raise report_timeout_s where ranks may take so much longer than others"
    )
    assert errors(outcomes) == [text, text]


def test_a_rank_that_falls_silent_is_found_long_before_the_report_limit() -> None:
    def run(group: Group) -> bytes:
        call = group.call("save", SHORT)
        call.round("begin", lambda: b"", joined, timeout_s=1)
        if group.rank == 1:
            group.heart.end()
            return b"gone"
        with call:
            return call.round("report", lambda: b"", joined, timeout_s=600)

    began = time.monotonic()
    outcomes = threads(3, run)
    assert time.monotonic() - began < 10
    assert outcomes[1].value == b"gone"
    text = "RankMissingError: rank 1 stopped answering during save: no sign of life for 0.6 s"
    assert all(error.startswith(text) for error in (errors(outcomes)[0], errors(outcomes)[2]))


def test_where_rank_0_falls_silent_the_outcome_is_unknown() -> None:
    def run(group: Group) -> bytes:
        call = group.call("save", SHORT)
        call.round("begin", lambda: b"", joined, timeout_s=1)
        if group.rank == 0:
            group.heart.end()
            return b"gone"
        with call:
            return call.round("report", lambda: b"", joined, timeout_s=600)

    outcomes = threads(3, run)
    for outcome in outcomes[1:]:
        assert isinstance(outcome.error, OutcomeUnknownError)
        assert "rank 0 stopped answering during save" in str(outcome.error)
        assert "whether the save took effect is not known" in str(outcome.error)


def test_rank_0_may_take_longer_than_the_silence_limit_to_decide() -> None:
    def slow(answers: list[bytes]) -> bytes:
        time.sleep(1.5)
        return b"done"

    def run(group: Group) -> bytes:
        with group.call("save", SHORT) as call:
            return call.round("begin", lambda: b"", slow, timeout_s=1)

    assert values(threads(3, run)) == [b"done"] * 3


def test_a_save_that_meets_a_load_is_told_on_every_rank() -> None:
    outcomes = threads(4, lambda group: one_round(group, "load" if group.rank == 2 else "save"))
    text = (
        "AgreementError: the ranks made different calls: ranks 0, 1, 3 called save; rank 2 called "
        "load; all must make the same ones"
    )
    assert errors(outcomes) == [text] * 4


def test_an_id_that_a_dead_run_left_is_overtaken() -> None:
    groups = local_group(3)
    store = groups[0].store
    store.set("current", b"Cdead")
    store.set("dead/0/a1", b'R["save", "begin", "", null]\n')
    store.add("dead/0/n", 1)

    def run(group: Group) -> bytes:
        if group.rank == 0:
            time.sleep(0.4)
        return one_round(group, options=replace(SHORT, silence_timeout_s=10))

    assert values(threads(groups, run)) == [b"<0><1><2>"] * 3
    assert keys(groups) == 0


def test_a_late_rank_learns_that_the_call_failed_and_joins_the_next() -> None:
    groups = local_group(2)
    assert "rank 1 did not call" in errors(threads(groups[:1], one_round))[0]
    assert "rank 0 did not call" in errors(threads(groups[1:], one_round))[0]
    assert values(threads(groups, one_round)) == [b"<0><1>"] * 2


def test_keys_stay_constant_over_1000_calls() -> None:
    groups = local_group(3)

    def many(group: Group) -> None:
        for _ in range(1000):
            one_round(group)

    values(threads(groups, many))
    assert keys(groups) == 0


def test_keys_of_calls_that_miss_ranks_are_bounded() -> None:
    groups = local_group(3)
    options = replace(SHORT, arrive_timeout_s=0.05)
    counts = []
    for _ in range(12):
        threads(groups[:2], lambda group: one_round(group, options=options))
        counts.append(keys(groups))
    assert max(counts) <= 15
    assert counts[-1] == counts[-4]


def test_two_threads_of_a_rank_open_one_call_after_the_other() -> None:
    groups = local_group(2)

    def slowly(group: Group) -> bytes:
        def produce() -> bytes:
            if group.rank == 0:
                time.sleep(0.5)
            return text_of(group.rank)

        with group.call("save", replace(SHORT, arrive_timeout_s=3)) as call:
            return call.round("begin", produce, joined, timeout_s=3)

    def twice(group: Group) -> list[bytes]:
        seen: list[bytes] = []
        both = [threading.Thread(target=lambda: seen.append(slowly(group))) for _ in range(2)]
        for thread in both:
            thread.start()
            time.sleep(0.2)
        for thread in both:
            thread.join()
        return seen

    assert values(threads(groups, twice)) == [[b"<0><1>"] * 2] * 2


def test_a_call_may_begin_while_another_waits_for_reports() -> None:
    def run(group: Group) -> tuple[bytes, bytes]:
        with group.call("save", SHORT) as call:
            call.round("begin", lambda: b"", joined, timeout_s=1)
            loaded = one_round(group, "load")
            return loaded, call.round("report", lambda: text_of(group.rank), joined, timeout_s=1)

    assert values(threads(2, run)) == [(b"<0><1>", b"<0><1>")] * 2


def test_a_call_that_is_over_takes_no_more_rounds() -> None:
    call = group_of(None).call("save", SHORT)
    call.close()
    with pytest.raises(AgreementError, match=r"this save is over"):
        call.round("begin", lambda: b"", joined, timeout_s=1)


def test_missing_rank_errors_are_timeouts() -> None:
    assert issubclass(RankMissingError, TimeoutError)


def test_who_has_not_answered_a_failed_round_is_named() -> None:
    def run(group: Group) -> bytes:
        call = group.call("save", SHORT)
        call.round("begin", lambda: b"", joined, timeout_s=1)
        if group.rank == 2:  # dead: it says nothing any more
            group.heart.end()
            return b"gone"

        def produce() -> bytes:
            if group.rank == 1:
                raise StorageError("lost touch")
            return b""

        with call:
            return call.round("report", produce, joined, timeout_s=600)

    found = errors(threads(3, run))
    assert found[0] == ("StorageError: rank 1: lost touch (rank 2 has not answered since)")


def test_losing_rank_0_in_a_round_that_commits_nothing_is_a_missing_rank() -> None:
    def run(group: Group) -> bytes:
        call = group.call("save", SHORT)
        call.round("begin", lambda: b"", joined, timeout_s=1)
        if group.rank == 0:
            group.heart.end()
            return b"gone"
        with call:
            return call.round("ready", lambda: b"", joined, timeout_s=600, commits=False)

    for error in errors(threads(3, run))[1:]:
        assert error.startswith("RankMissingError: rank 0 stopped answering during save")
        assert "whether" not in error

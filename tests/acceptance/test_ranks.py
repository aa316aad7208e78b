"""Ranks that fail, die, or do not call alike: all raise the first cause, nothing hangs.

What the ranks do is in `failing`, `dying` and `grouping`.
"""

from __future__ import annotations

import asyncio
import itertools
import threading
from pathlib import Path
from typing import NamedTuple

import pytest
import torch
from acceptance import dying, failing, grouping
from acceptance.failing import CASES, EVEN, ODD, OPTIONS, Tried
from ranks.harness import Ranks

import ucpstore

LIMIT_S = 20.0
"""Most seconds for any call that fails, on a machine that is busy with other things."""


class Expected(NamedTuple):
    """What a case raises on the rank at fault and on the others, and words of the message.

    `{r}` stands for the rank at fault. An empty class means that the rank did not call.
    """

    guilty: str
    others: str
    words: tuple[str, ...]
    rank: int = -1


STATE = "StateError"
MISSING = "RankMissingError"
AGREE = "AgreementError"
UNDEFINED = "The target of this load of step 1 is undefined now"

EXPECTED = {
    "rank_0_alone": Expected(MISSING, "", ("did not call save within 1.5 s",), 0),
    "all_but_rank_0": Expected("", MISSING, ("rank 0 did not call save within 1.5 s",), 0),
    "all_but_the_last": Expected("", MISSING, ("rank {r} did not call load within 1.5 s",)),
    "one_loads": Expected(AGREE, AGREE, ("called save; rank {r} called load",)),
    "rank_0_loads": Expected(AGREE, AGREE, ("rank 0 called load; rank",), 0),
    "other_step": Expected(STATE, STATE, ("same step", "rank 0 has 2, rank {r} has 3")),
    "other_step_to_load": Expected(STATE, STATE, ("same step", "rank 0 has 1, rank {r} has 3")),
    "other_names": Expected(STATE, STATE, ("m/v: rank 0", "rank {r} gives", "no such tensor")),
    "other_shapes": Expected(STATE, STATE, ("m/w: ranks disagree about its shape", "rank {r} has")),
    "other_plain_shapes": Expected(
        STATE, STATE, ("m/w: ranks disagree about its shape", "rank {r} has (4, 5)")
    ),
    "other_dtypes": Expected(STATE, STATE, ("m/w: ranks disagree", "rank {r} has bfloat16")),
    "other_values": Expected(STATE, STATE, ("m/w: ranks 0 and {r} hold different values",)),
    "other_leaves": Expected(STATE, STATE, ("progress.seen: rank 0 has 3, rank {r} has 4",)),
    "other_placements": Expected(STATE, STATE, ("m/w: rank", "hold overlapping parts")),
    "other_options": Expected(STATE, STATE, ("same options", "rank 0 and rank {r} differ")),
    "other_overwrite": Expected(STATE, STATE, ("same overwrite", "rank {r} has True")),
    "other_metadata": Expected(STATE, STATE, ("same metadata", "rank 0 and rank 1 differ")),
    "other_stores": Expected("StorageError", "StorageError", ("rank {r}", "does not see work/")),
    "wrong_environment": Expected(STATE, STATE, ("rank {r}", "UCPSTORE_THREADS", "'many'")),
    "describing": Expected("ZeroDivisionError", AGREE, ("rank {r}", "no epoch")),
    "describing_on_rank_0": Expected("ZeroDivisionError", AGREE, ("rank 0", "no epoch"), 0),
    "describing_the_unsupported": Expected(
        "UnsupportedError", "UnsupportedError", ("rank {r}", "odd: functions")
    ),
    "writing": Expected("StorageError", "StorageError", ("rank {r}", "cannot put", "no space")),
    "writing_on_rank_0": Expected("StorageError", "StorageError", ("rank 0", "cannot put"), 0),
    "writing_with_another_error": Expected("MemoryError", AGREE, ("rank {r}", "no memory")),
    "exchanging": Expected("MemoryError", AGREE, ("rank {r}", "no buffer")),
    "committing": Expected("StorageError", "StorageError", ("rank 0", "put_if_absent"), 0),
    "reading": Expected(
        "CorruptError", "CorruptError", ("rank {r}", "/m/w/c.", "is damaged", UNDEFINED)
    ),
    "reading_with_another_error": Expected(
        "MemoryError", AGREE, ("rank {r}", "no memory", UNDEFINED)
    ),
    "applying": Expected(STATE, STATE, ("rank {r}", "loader: it refused", UNDEFINED)),
    "matching": Expected(
        "MismatchError", "MismatchError", ("rank {r}", "m.w: stored with shape", "nothing was")
    ),
    "resolving": Expected("StepNotFoundError", "StepNotFoundError", ("step 77", "rank 0"), 0),
}

STEPS = itertools.count(100)


@pytest.fixture(scope="module")
def places(ranks: Ranks, tmp_path_factory: pytest.TempPathFactory) -> dict[int, str]:
    """A store for each number of ranks, with step 1."""
    found = {}
    for size, shape in ((2, EVEN), (4, ODD)):
        found[size] = str(tmp_path_factory.mktemp("store"))
        ranks.run(size, failing.prepare, found[size], shape)
    return found


def test_all_cases_are_run() -> None:
    assert EXPECTED.keys() == CASES.keys()


RUNS = [
    pytest.param(size, shape, name, id=f"{size}-ranks-{name}")
    for size, shape in ((2, EVEN), (4, ODD))
    for name in EXPECTED
    # Arguments that differ are the same matter on two ranks, and those do not exchange anything.
    if size == 4 or not name.startswith(("other_", "exchanging"))
]


@pytest.mark.parametrize(("size", "shape", "name"), RUNS)
def test_all_ranks_raise_the_first_cause_and_go_on(
    ranks: Ranks, places: dict[int, str], size: int, shape: tuple[int, ...], name: str
) -> None:
    expected = EXPECTED[name]
    fault = expected.rank % size
    seen = ranks.run(size, failing.go_wrong, name, places[size], shape, next(STEPS), timeout_s=90)
    for rank, tried in enumerate(seen):
        assert tried.error == (expected.guilty if rank == fault else expected.others), tried
        assert tried.seconds < LIMIT_S
        for words in expected.words if tried.error else ():
            assert words.format(r=fault) in tried.text, (rank, tried.text)


# -- ranks that die ------------------------------------------------------------------------------


def survivors(outcomes: list[object], dead: int) -> list[Tried]:
    """What the ranks saw that live; exactly `dead` has died."""
    assert [outcome.died for outcome in outcomes] == [  # type: ignore[attr-defined]
        rank == dead for rank in range(len(outcomes))
    ]
    found = [outcome.value for outcome in outcomes if not outcome.died]  # type: ignore[attr-defined]
    assert all(tried.seconds < LIMIT_S for tried in found)
    return found


def steps(url: str) -> list[int]:
    return ucpstore.CheckpointStore(url).steps()


@pytest.mark.parametrize(
    ("size", "shape", "rank", "moment"),
    [
        (2, EVEN, 1, "writing"),
        (4, ODD, 3, "writing"),
        (4, ODD, 2, "seeing the mark"),
    ],
)
def test_a_rank_killed_while_it_saves_is_named(
    ranks: Ranks, tmp_path: Path, size: int, shape: tuple[int, ...], rank: int, moment: str
) -> None:
    with ranks.fresh(size) as pool:
        seen = survivors(
            pool.outcomes(dying.save_and_die, str(tmp_path), shape, rank, moment), rank
        )
    for tried in seen:
        assert tried.error == MISSING
        assert f"rank {rank} " in tried.text
    assert steps(str(tmp_path)) == []


@pytest.mark.parametrize("rank", [0, 1])
def test_a_rank_killed_in_the_exchange_is_named(ranks: Ranks, tmp_path: Path, rank: int) -> None:
    with ranks.fresh(4) as pool:
        seen = survivors(pool.outcomes(dying.die_in_the_exchange, str(tmp_path), ODD, rank), rank)
    for tried in seen:
        if rank == 0:  # and the key-value store with it
            assert tried.error == "OutcomeUnknownError"
            assert "whether step 2 was committed" in tried.text
        else:
            assert tried.error == MISSING
            assert f"rank {rank} " in tried.text
    assert steps(str(tmp_path)) == []


@pytest.mark.parametrize("moment", ["opening", "seeing the mark"])
def test_where_rank_0_is_killed_before_it_can_commit_it_is_missing(
    ranks: Ranks, tmp_path: Path, moment: str
) -> None:
    with ranks.fresh(2) as pool:
        (tried,) = survivors(
            pool.outcomes(dying.save_and_die, str(tmp_path), EVEN, 0, moment), dead=0
        )
    assert tried.error == MISSING
    assert "the process that hosted it" in tried.text


@pytest.mark.parametrize("moment", ["the step group", "the record"])
def test_where_rank_0_is_killed_while_it_commits_the_others_say_how_to_look(
    ranks: Ranks, tmp_path: Path, moment: str
) -> None:
    with ranks.fresh(4) as pool:
        seen = survivors(pool.outcomes(dying.save_and_die, str(tmp_path), ODD, 0, moment), dead=0)
    for tried in seen:
        assert tried.error == "OutcomeUnknownError"
        assert f"whether step 2 was committed to {tmp_path} is not known" in tried.text
        assert f"look with `ucpstore ls {tmp_path}`" in tried.text
    assert steps(str(tmp_path)) == []


@pytest.mark.parametrize(("size", "shape"), [(2, EVEN), (4, ODD)])
def test_where_rank_0_is_killed_after_the_record_the_others_succeed(
    ranks: Ranks, tmp_path: Path, size: int, shape: tuple[int, ...]
) -> None:
    with ranks.fresh(size) as pool:
        seen = survivors(
            pool.outcomes(dying.save_and_die, str(tmp_path), shape, 0, "after the record"), dead=0
        )
    assert [tried.error for tried in seen] == [""] * (size - 1)
    assert steps(str(tmp_path)) == [2]


@pytest.mark.parametrize(
    ("moment", "error", "left"),
    [
        ("opening", MISSING, []),
        ("the record", "OutcomeUnknownError", []),
        ("after the record", "", [2]),
    ],
)
def test_the_same_where_the_key_value_store_lives_on(
    ranks: Ranks, tmp_path: Path, moment: str, error: str, left: list[int]
) -> None:
    """As under torchrun, whose agent hosts it: only silence tells."""
    with ranks.fresh(3) as pool:
        seen = survivors(pool.outcomes(dying.save_in_group_and_die, str(tmp_path), moment), dead=1)
    assert seen[1].error == error
    if error:
        assert "rank 0 stopped answering during save: no sign of life for 3 s" in seen[1].text
    assert steps(str(tmp_path)) == left


@pytest.mark.parametrize("rank", [0, 2])
def test_a_rank_killed_while_it_loads_is_told(ranks: Ranks, tmp_path: Path, rank: int) -> None:
    with ranks.fresh(3) as pool:
        pool.run(failing.prepare, str(tmp_path), EVEN)
        seen = survivors(pool.outcomes(dying.load_and_die, str(tmp_path), EVEN, rank), rank)
    for tried in seen:
        assert tried.error == MISSING
        assert (f"rank {rank} stopped" if rank else "the process that hosted it") in tried.text
        # Where rank 0 dies, the others may not have begun to read.
        assert rank == 0 or UNDEFINED in tried.text


# -- process groups, threads, event loops --------------------------------------------------------


def test_a_subgroup_saves_and_loads_alone(ranks: Ranks, tmp_path: Path) -> None:
    sent = ranks.run(3, grouping.in_a_subgroup, str(tmp_path))
    assert sum(sent) > 0, "there is an exchange"
    assert steps(str(tmp_path)) == [1, 2]


def test_a_mesh_outside_of_the_group_is_refused(ranks: Ranks, tmp_path: Path) -> None:
    seen = ranks.run(3, grouping.in_no_group, str(tmp_path))
    assert seen[0].error == AGREE
    assert "not a member of the process group" in seen[0].text
    for tried in seen[1:]:
        assert tried.error == STATE
        assert "w: its device mesh has the global ranks [0, 1, 2], of which [0]" in tried.text
    assert list(tmp_path.iterdir()) == []


def test_groups_of_a_mesh_save_side_by_side(ranks: Ranks, tmp_path: Path) -> None:
    sent = ranks.run(4, grouping.along_a_mesh, str(tmp_path))
    assert sent[:2] == sent[2:]
    assert [steps(str(tmp_path / name)) for name in "01"] == [[1], [1]]


def test_ranks_load_alone_other_steps_than_the_others(ranks: Ranks, tmp_path: Path) -> None:
    assert ranks.run(3, grouping.alone, str(tmp_path)) == [[0], [1, 2], [2, 0, 1]]


def test_calls_in_a_thread_beside_the_users_collectives(ranks: Ranks, tmp_path: Path) -> None:
    sums = ranks.run(2, grouping.in_a_thread, str(tmp_path))
    assert sums == [[float(2 * number) for number in range(30)]] * 2


def test_calls_inside_of_a_running_event_loop(ranks: Ranks, tmp_path: Path) -> None:
    assert ranks.run(2, grouping.in_an_event_loop, str(tmp_path)) == [[1, 2]] * 2


def test_four_threads_at_once_each_with_a_group(ranks: Ranks, tmp_path: Path) -> None:
    sent = ranks.run(2, grouping.in_four_threads, str(tmp_path))
    assert min(map(sum, zip(*sent, strict=True))) > 0, "each of them has an exchange"
    assert [steps(str(tmp_path / str(n))) for n in range(4)] == [[0], [1], [2], [3]]


def one_process(url: str, start: int) -> list[float]:
    """Save and load without a process group; the loaded values."""
    store = ucpstore.CheckpointStore(url, options=OPTIONS)
    weight = torch.arange(start, start + 300_000, dtype=torch.float32).reshape(300, 1000)
    store.save({"w": weight, "start": start}, step=start)
    target = {"w": torch.zeros(300, 1000), "start": -1}
    store.load(target)
    assert target["start"] == start
    return target["w"][299, -3:].tolist()  # type: ignore[index]


def test_four_threads_of_one_process_at_once(tmp_path: Path) -> None:
    found: dict[int, list[float]] = {}

    def work(number: int) -> None:
        for turn in range(3):
            found[10 * turn + number] = one_process(str(tmp_path / str(number)), 10 * turn + number)

    threads = [threading.Thread(target=work, args=(number,)) for number in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len(found) == 12
    for start, last in found.items():
        assert last == [start + 299_997.0, start + 299_998.0, start + 299_999.0]


def test_one_process_inside_of_an_event_loop(tmp_path: Path) -> None:
    async def main(start: int) -> list[float]:
        assert await asyncio.to_thread(one_process, str(tmp_path / "thread"), start)
        return one_process(str(tmp_path), start)

    assert asyncio.run(main(1)) == [299_998.0, 299_999.0, 300_000.0]
    assert asyncio.run(main(2)) == [299_999.0, 300_000.0, 300_001.0]


def test_keys_in_the_key_value_store_stay_constant(ranks: Ranks, tmp_path: Path) -> None:
    (counts, other) = ranks.run(2, grouping.count_keys, str(tmp_path), 51)
    assert other == counts
    assert len(counts) == 6
    assert len(set(counts)) == 1, counts


def test_refused_saves_leave_no_keys_either(ranks: Ranks, tmp_path: Path) -> None:
    counts = ranks.run(4, grouping.count_keys_of_failures, str(tmp_path), 8)[0]
    # The last few failures are kept for ranks that come late to read why.
    assert len(set(counts[2:])) == 1, counts

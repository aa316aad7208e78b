from __future__ import annotations

from dataclasses import replace

import pytest

from ucpstore.errors import StateError
from ucpstore.saving.arrival import (
    Arrival,
    Invitation,
    PerRankArrival,
    classes,
    invite,
    per_rank_rows,
)


def arrival(**changes: object) -> Arrival:
    plain = Arrival(
        step=5,
        overwrite=False,
        options="o",
        metadata="m",
        arrays="a",
        tree="t",
        replicas="r",
        planned=(),
        per_rank=(),
    )
    return replace(plain, **changes)  # type: ignore[arg-type]


def document(index: int, *, count: int = 2, length: int = 9, digest: str = "d") -> PerRankArrival:
    return PerRankArrival("loader", "dp", index, count, length, digest)


def test_ranks_with_equal_digests_form_a_class() -> None:
    assert classes(["x", "y", "x", "z", "y"]) == ((0, 2), (1, 4), (3,))


def test_equal_ranks_send_one_tree_and_one_description() -> None:
    found = invite([arrival()] * 4)
    assert found.arrays == found.trees == ((0, 1, 2, 3),)
    assert found.send_arrays
    assert found.replicas == (), "replicas agree, so nobody sends digests"


def test_a_plan_that_every_rank_has_needs_no_description() -> None:
    plan = invite([arrival()] * 2).plan
    assert not invite([arrival(planned=(plan,))] * 2).send_arrays
    assert invite([arrival(planned=(plan,)), arrival()]).send_arrays
    other = invite([arrival(planned=(plan,), arrays="b")] * 2)
    assert other.plan != plan
    assert other.send_arrays


def test_the_plan_depends_on_options_and_on_who_holds_what() -> None:
    plans = {
        invite(ranks).plan
        for ranks in (
            [arrival(), arrival()],
            [arrival(), arrival(arrays="b")],
            [arrival(arrays="b"), arrival()],
            [arrival(options="p"), arrival(options="p")],
        )
    }
    assert len(plans) == 4
    assert invite([arrival(tree="u")] * 2).plan == invite([arrival()] * 2).plan


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"step": 6}, "same step: rank 0 has 5, rank 2 has 6"),
        ({"overwrite": True}, "same overwrite: rank 0 has False, rank 2 has True"),
        ({"options": "x"}, "options .*rank 0 and rank 2 differ"),
        ({"metadata": "x"}, "metadata: rank 0 and rank 2 differ"),
    ],
)
def test_ranks_that_ask_for_other_saves_are_refused(
    changes: dict[str, object], message: str
) -> None:
    with pytest.raises(StateError, match=message):
        invite([arrival(), arrival(), arrival(**changes)])


def test_the_first_rank_of_each_index_writes_its_document() -> None:
    ranks = [
        arrival(per_rank=(document(0, length=9),)),
        arrival(per_rank=(document(1, length=12, digest="e"),)),
        arrival(per_rank=(document(0, length=9),)),
    ]
    invite(ranks)
    (rows,) = per_rank_rows(ranks)
    assert (rows.path, rows.axis, rows.count) == ("loader", "dp", 2)
    assert rows.writers == (0, 1)
    assert rows.lengths == (9, 12)
    assert type(rows).from_json(rows.to_json()) == rows


@pytest.mark.parametrize(
    ("second", "message"),
    [
        (document(0, digest="other"), "ranks 0 and 1 both have index 0 on axis 'dp'"),
        (document(1, count=3), "size 2, rank 1 by 'dp' of size 3"),
    ],
)
def test_per_rank_values_that_do_not_fit_are_refused(second: PerRankArrival, message: str) -> None:
    with pytest.raises(StateError, match=message):
        invite([arrival(per_rank=(document(0),)), arrival(per_rank=(second,))])


def test_an_index_that_nobody_holds_is_refused() -> None:
    with pytest.raises(StateError, match="no rank holds index 1 of the 2"):
        invite([arrival(per_rank=(document(0),))])


def test_they_travel_as_bytes() -> None:
    sent = arrival(per_rank=(document(1),), planned=("p", "q"))
    assert Arrival.from_bytes(sent.to_bytes()) == sent
    invitation = invite([arrival(), arrival(arrays="b", replicas="s")])
    assert Invitation.from_bytes(invitation.to_bytes()) == invitation

import numpy as np

from ucpstore.plan.parts import Senders
from ucpstore.plan.rounds import SharedObject, pack_rounds


def shared(owner: int, **senders: int) -> SharedObject:
    """One object of which rank n sends the given bytes; its buffer takes all of them and no more.

    `shared(1, r0=6, r1=4)`: rank 1 owns it, 4 bytes are its own, 6 come from rank 0.
    """
    ranks = np.array([int(name[1:]) for name in senders])
    sizes = np.array(list(senders.values()))
    return SharedObject(0, 0, sum(senders.values()), owner, Senders.of(ranks, sizes, 0))


def test_an_owner_counts_its_buffer_and_what_it_receives() -> None:
    objects = [shared(1, r0=10, r1=10) for _ in range(3)]  # 20 + 10 at rank 1
    assert pack_rounds(objects, 2, 99) == [0, 0, 0]
    assert pack_rounds(objects, 2, 89) == [0, 0, 1]


def test_a_sender_counts_what_it_sends() -> None:
    """Rank 0 sends 10 bytes to each of five owners that have room."""
    objects = [shared(owner, r0=10) for owner in range(1, 6)]
    assert pack_rounds(objects, 6, 50) == [0, 0, 0, 0, 0]
    assert pack_rounds(objects, 6, 30) == [0, 0, 0, 1, 1]


def test_an_earlier_round_is_filled_up() -> None:
    large, small = {"r0": 30}, {"r0": 5}
    objects = [shared(1, **large), shared(1, **large), shared(2, **small), shared(1, **small)]
    assert pack_rounds(objects, 3, 90) == [0, 1, 0, 0]


def test_a_budget_below_one_object_gives_way_to_it() -> None:
    """An object needs 60, so 90 are allowed: a second does not fit, another owner does."""
    objects = [shared(1, r0=30), shared(1, r0=30), shared(2, r0=30)]
    assert pack_rounds(objects, 3, 1) == [0, 1, 0]


def test_no_objects_no_rounds() -> None:
    assert pack_rounds([], 3, 1) == []

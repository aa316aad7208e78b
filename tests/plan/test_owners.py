import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from ucpstore.plan.owners import LeastLoaded


def test_ties_go_to_the_lowest_rank() -> None:
    ranks = LeastLoaded([0, 0, 0])
    assert ranks.pick(np.array([1, 2])) == 1
    ranks.add(1, 5)
    assert ranks.pick(np.array([1, 2])) == 2
    ranks.add(2, 5)
    assert ranks.pick(np.array([1, 2])) == 1
    assert ranks.pick(np.array([0, 1, 2])) == 0


@given(st.lists(st.tuples(st.sets(st.integers(0, 5), min_size=1), st.integers(0, 9))))
def test_the_pick_is_always_the_least_loaded(steps) -> None:
    ranks, loads = LeastLoaded([0] * 6), [0] * 6
    for among, load in steps:
        picked = ranks.pick(np.array(sorted(among)))
        assert picked == min(sorted(among), key=lambda rank: loads[rank])
        ranks.add(picked, load)
        loads[picked] += load
    assert ranks.loads == tuple(loads)

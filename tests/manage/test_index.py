from __future__ import annotations

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from ucpstore.manage.index import select


def taken(array: torch.Tensor, index: object) -> torch.Tensor:
    """What a reader gets: the box read, and of it what was asked for."""
    selection = select(index, tuple(array.shape), "a")
    return array[selection.box.slices()][selection.within]


@pytest.mark.parametrize(
    "index",
    [
        0,
        -1,
        slice(None),
        slice(1, 3),
        slice(4, 2),
        slice(None, None, 2),
        (1, 2, 3),
        (slice(1, None), -1),
        (..., 2),
        (0, ..., slice(1, 3)),
        ...,
        (),
        (slice(-2, None), ..., slice(0, 100)),
    ],
)
def test_it_is_what_torch_gives(index: object) -> None:
    array = torch.arange(4 * 5 * 6).reshape(4, 5, 6)
    assert torch.equal(taken(array, index), array[index])  # type: ignore[index]


def test_the_box_holds_no_more_than_the_slices_span() -> None:
    assert select((slice(2, 9, 3), 1), (10, 4), "a").box.shape == (7, 1)  # rows 2, 5 and 8
    assert select((slice(2, 9, 3), 1), (10, 4), "a").box.offset == (2, 1)
    assert select(slice(5, 5), (10, 4), "a").box.size == 0


def test_a_0d_array_takes_an_ellipsis_and_an_empty_tuple() -> None:
    array = torch.tensor(3.0)
    assert taken(array, ...).item() == taken(array, ()).item() == 3.0


@pytest.mark.parametrize(
    ("index", "message"),
    [
        (4, "index 4 is out of range for extent 4"),
        (-5, "index -5 is out of range"),
        ((0, 0, 0, 0), "has 3 dimensions, but the index has 4"),
        ((..., ...), "one `...`"),
        (slice(None, None, -1), "negative step"),
        (None, "not with NoneType"),
        ([0, 1], "not with list"),
        (True, "not with bool"),
        ("x", "not with str"),
    ],
)
def test_what_is_not_supported_is_refused_by_name(index: object, message: str) -> None:
    with pytest.raises(IndexError, match=r"^weight.*") as caught:
        select(index, (4, 5, 6), "weight")
    assert message in str(caught.value)


slices = st.builds(
    slice,
    st.none() | st.integers(-8, 8),
    st.none() | st.integers(-8, 8),
    st.none() | st.integers(1, 4),
)


@given(st.lists(st.integers(-3, 2) | slices, max_size=3), st.booleans())
def test_any_index_is_what_torch_gives(entries: list[object], dots: bool) -> None:
    array = torch.arange(3 * 4 * 5).reshape(3, 4, 5)
    index = (..., *entries) if dots else tuple(entries)
    assert torch.equal(taken(array, index), array[index])  # type: ignore[index]

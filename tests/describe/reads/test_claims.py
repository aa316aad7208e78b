"""Memory that several targets of a load share."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from describe.engine import load, save

from ucpstore import Flat, MismatchError
from ucpstore.describe.place import ROOT
from ucpstore.describe.reads.claims import Claim, Claims
from ucpstore.describe.tensors.memory import memory_of

BOTH = {"x": torch.ones(4), "y": torch.zeros(4)}


def test_numpy_arrays_and_tensors_over_the_same_memory_are_seen() -> None:
    saved = save({"d": BOTH})
    array = np.full(6, 9.0, np.float32)
    for x, y, text in (
        (array[:4], torch.from_numpy(array[:4]), "tied in the target, but two tensors"),
        (array[:4], array[:4], "tied in the target, but two tensors"),
        (array[:4], torch.from_numpy(array[1:5]), "views of the same memory that overlap"),
        (array[:4], array[2:], "views of the same memory that overlap"),
        (array[:4], array[3::-1], "views of the same memory that overlap"),
    ):
        with pytest.raises(MismatchError, match=f"d\\.[xy] and d\\.[xy]: {text}"):
            load({"d": {"x": x, "y": y}}, saved)
        assert array.tolist() == [9.0] * 6
    load({"d": {"x": array[::-1][:3], "y": array[:3]}}, save({"d": {k: BOTH[k][:3] for k in BOTH}}))
    assert array.tolist() == [0.0] * 3 + [1.0] * 3


def test_a_row_over_a_numpy_target_is_seen() -> None:
    row = torch.full((6,), 9.0)
    with pytest.raises(MismatchError, match="x and y: views of the same memory"):
        load({"x": row.numpy()[:4], "y": Flat(row, (4,))}, save(BOTH))
    assert row.tolist() == [9.0] * 6


@pytest.mark.parametrize("dtype", ["<f4", ">f4"])
def test_one_array_under_two_names_is_saved_once_and_loaded_again(dtype: str) -> None:
    array = np.arange(3).astype(dtype)
    saved = save({"d": {"x": array, "y": array}})
    assert list(saved.arrays) == ["d/x"]
    target = np.zeros(3, dtype)
    load({"d": {"x": target, "y": target}}, saved)
    assert target.tolist() == [0.0, 1.0, 2.0]


def _claim(path: str, memory: torch.Tensor) -> Claim:
    return Claim(path, ROOT.child(path, [path]), memory, memory)


def test_memory_is_claimed_once() -> None:
    claims, memory = Claims(), torch.zeros(4)
    first, second = _claim("x", memory), _claim("y", memory)
    assert not claims.has(memory)
    assert claims.add(first, memory_of(memory)) is first
    assert claims.add(second, memory_of(memory)) is first
    assert claims.has(memory) and not claims.has(memory[1:])
    # nothing is tied to a tensor without elements
    empty = torch.zeros(0)
    assert claims.add(second, memory_of(empty)) is second and not claims.has(empty)


def test_views_that_overlap_are_told_in_the_order_of_their_memory() -> None:
    claims, memory = Claims(), torch.zeros(6)
    for path, view in (("b", memory[2:5]), ("a", memory[:3]), ("c", memory[5:])):
        claims.add(_claim(path, view), memory_of(view))
    assert [(one.path, other.path) for one, other in claims.overlapping()] == [("a", "b")]


def test_a_numpy_array_that_is_filled_from_a_copy_is_claimed_too() -> None:
    claims, memory = Claims(), torch.zeros(4)
    array = memory.numpy()
    claims.add(_claim("x", memory[:2]), memory_of(memory[:2]))
    claims.add_copied(Claim("y", ROOT.child("y", ["y"]), array, array[1:]))
    assert [(one.path, other.path) for one, other in claims.overlapping()] == [("x", "y")]

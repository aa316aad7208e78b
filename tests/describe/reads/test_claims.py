"""Memory that several targets of a load share."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from describe.engine import load, save

from ucpstore import Flat, MismatchError

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

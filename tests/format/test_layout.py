"""Keys of a store, and what does not count as one."""

import numpy as np
import pytest

from ucpstore.errors import StateError
from ucpstore.format import layout


@pytest.mark.parametrize(
    ("step", "generation", "key"),
    [
        (0, 1, "commits/0000000000/zarr.json"),
        (100, 1, "commits/0000000100/zarr.json"),
        (100, 2, "commits/0000000100.2/zarr.json"),
        (100, 10, "commits/0000000100.10/zarr.json"),
        (10**10, 1, "commits/10000000000/zarr.json"),
        (2**63 - 1, 3, "commits/9223372036854775807.3/zarr.json"),
    ],
)
def test_commit_keys(step, generation, key):
    assert layout.commit_key(step, generation) == key
    assert layout.parse_commit(key) == (step, generation)


@pytest.mark.parametrize(
    "key",
    [
        "commits/zarr.json",
        "commits/0000000100",
        "commits/100/zarr.json",
        "commits/00000000100/zarr.json",
        "commits/0000000100.1/zarr.json",
        "commits/0000000100.02/zarr.json",
        "commits/0000000100.2/other",
        "commits/0000000100/zarr.json.tmp",
        "commits/0000000100/zarr.json\n",
        "commits/-000000100/zarr.json",
        "commits/000000010\u0660/zarr.json",
        "commits/9999999999999999999/zarr.json",
        "steps/0000000100/zarr.json",
    ],
)
def test_other_keys_are_no_records(key):
    assert layout.parse_commit(key) is None


def test_step_folders():
    path = layout.step_path(100, "8d41c0e2a7b3")
    assert path == "steps/0000000100-8d41c0e2a7b3"
    assert layout.parse_step_path(path) == (100, "8d41c0e2a7b3")
    assert layout.parse_step_path(path + "/model") is None
    assert layout.step_key(path) == path + "/zarr.json"
    assert layout.step_path_of(path + "/model/w/c.0") == path
    assert layout.step_path_of("steps/zarr.json") is None


def test_work_and_tags():
    assert layout.work_key("8d41c0e2a7b3") == "work/8d41c0e2a7b3/zarr.json"
    assert layout.parse_work("work/8d41c0e2a7b3/zarr.json") == "8d41c0e2a7b3"
    assert layout.parse_work("work/zarr.json") is None
    assert layout.tag_key("best-v1.2") == "tags/best-v1.2/zarr.json"
    assert layout.parse_tag("tags/best-v1.2/zarr.json") == "best-v1.2"
    assert layout.parse_tag("tags/zarr.json") is None


@pytest.mark.parametrize("name", ["", "..", "a/b", "../x", "zarr.json", "é", "x" * 101, "a\n"])
def test_tag_names_cannot_leave_their_folder(name):
    with pytest.raises(StateError, match="a tag must have"):
        layout.tag_key(name)


def test_steps_are_numbers_in_range():
    assert layout.check_step(np.int32(7)) == 7
    for step in (-1, 2**63, True, 1.0, "1", None):
        with pytest.raises(StateError, match="step must be"):
            layout.check_step(step)

"""The keys of a store: where records, steps, tags and marks lie. Relative to the store's URL."""

from __future__ import annotations

import re
from typing import Final

from ucpstore.errors import StateError

DOCUMENT: Final = "zarr.json"
ROOT_KEY: Final = DOCUMENT
COMMITS_KEY: Final = f"commits/{DOCUMENT}"
STEPS_KEY: Final = f"steps/{DOCUMENT}"
TAGS_KEY: Final = f"tags/{DOCUMENT}"
WORK_KEY: Final = f"work/{DOCUMENT}"

COMMITS_PREFIX: Final = "commits/"
STEPS_PREFIX: Final = "steps/"
TAGS_PREFIX: Final = "tags/"
WORK_PREFIX: Final = "work/"

MAX_STEP: Final = 2**63 - 1
SAVE_ID_DIGITS: Final = 12

_STEP = r"[0-9]{10}|[1-9][0-9]{10,18}"
_SAVE_ID = r"[0-9a-f]{12}"
_COMMIT_KEY = re.compile(rf"commits/({_STEP})(?:\.([2-9]|[1-9][0-9]+))?/zarr\.json")
_STEP_PATH = re.compile(rf"steps/({_STEP})-({_SAVE_ID})")
_STEP_FOLDER = re.compile(rf"steps/({_STEP})-({_SAVE_ID})/.*", re.DOTALL)
_INSIDE = re.compile(rf"(?:.*/)?steps/(?:{_STEP})-{_SAVE_ID}(?:/.*)?", re.DOTALL)
_WORK = re.compile(rf"work/({_SAVE_ID})/zarr\.json")
_TAG = re.compile(r"tags/([A-Za-z0-9][A-Za-z0-9_.-]{0,99})/zarr\.json")
_TAG_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9_.-]{0,99}")


def check_step(step: object) -> int:
    """`step` as a number that can name a checkpoint, else StateError."""
    if isinstance(step, bool) or not hasattr(step, "__index__"):
        raise StateError(
            f"step must be an integer, but it is {step!r} of type {type(step).__name__}"
        )
    number = int(step.__index__())
    if not 0 <= number <= MAX_STEP:
        raise StateError(f"step must be from 0 to {MAX_STEP}, but it is {number}")
    return number


def commit_key(step: int, generation: int = 1) -> str:
    """The key of the commit record; generation 1 is a step that was never overwritten."""
    suffix = "" if generation == 1 else f".{generation}"
    return f"commits/{step:010d}{suffix}/{DOCUMENT}"


def parse_commit(key: str) -> tuple[int, int] | None:
    """(step, generation) of a commit record's key; None for every other key."""
    match = _COMMIT_KEY.fullmatch(key)
    if match is None:
        return None
    step = int(match[1])
    return (step, int(match[2] or 1)) if step <= MAX_STEP else None


def step_path(step: int, save_id: str) -> str:
    """The folder of one save, without a `/` at its end; it belongs to that save for ever."""
    return f"steps/{step:010d}-{save_id}"


def parse_step_path(path: str) -> tuple[int, str] | None:
    """(step, save_id) of the folder of a save; None for every other path."""
    match = _STEP_PATH.fullmatch(path)
    return None if match is None else (int(match[1]), match[2])


def step_path_of(key: str) -> str | None:
    """The folder of the save that a key lies in; None for a key outside all of them."""
    match = _STEP_FOLDER.fullmatch(key)
    return None if match is None else f"steps/{match[1]}-{match[2]}"


def lies_in_step(url: str) -> bool:
    """Whether a place is the folder of a save, or lies in one, by its name."""
    return _INSIDE.fullmatch(url.rstrip("/")) is not None


def step_key(path: str) -> str:
    """The key of the step group of the save in folder `path`."""
    return f"{path}/{DOCUMENT}"


def work_key(save_id: str) -> str:
    """The key of the mark of a save in progress."""
    return f"work/{save_id}/{DOCUMENT}"


def parse_work(key: str) -> str | None:
    """The save_id of a mark's key; None for every other key."""
    match = _WORK.fullmatch(key)
    return None if match is None else match[1]


def tag_key(name: str) -> str:
    """The key of a tag; StateError for a name that cannot be one."""
    if not _TAG_NAME.fullmatch(name) or name.lower() == DOCUMENT:
        raise StateError(
            f"a tag must have 1 to 100 letters, digits, `_`, `-` or `.` and begin with a letter "
            f"or digit, but it is {name!r}"
        )
    return f"tags/{name}/{DOCUMENT}"


def parse_tag(key: str) -> str | None:
    """The name of a tag's key; None for every other key."""
    match = _TAG.fullmatch(key)
    return None if match is None else match[1]

"""Names that are hard on a place, as keys of a state: each comes back, or is refused at save."""

from __future__ import annotations

import secrets
from pathlib import Path

import pytest
import torch
from services.seaweed import S3Service

import ucpstore
from ucpstore.storage import open_storage

NAMES = (
    # separators and lone dots
    "a/b", "/", "/a", "a/", "a//b", "../../up", "..", ".", "...", ".hidden", "a\\b", "C:\\x", "c:",
    "s3://bucket/key", "a::b", "a.b", "a..b",
    # globs, escapes, queries
    "*", "?", "[ab]", "{a,b}", "**", "%", "%2F", "%25", "%zz", "a%00b", "a+b", "a&b=c",
    "a#b", "a?b", "~", "~/x", "$HOME", "`id`", "a;b", "a|b", "<a>", "'", '"', "a:b", "a=b",
    "@", "!", "^", "(", ",", "?versionId=1",
    # blanks and nothing
    "", " ", "  ", " a", "a ", "a b", "\ta", "a\n", "\u00a0", "\u2003", "\u200b", "\ufeffa",
    # Unicode forms, directions, planes
    "\u00e9", "e\u0301", "\u212b", "\u00c5", "A\u030a", "\u65e5\u672c", "\U0001f600", "\u202eabc",
    "\u0130", "\ufb01", "\uffff",
    # halves of surrogate pairs
    "\ud800", "a\udfffb",
    # control characters
    "\x00", "a\x00b", "\x01", "\x1b[31m", "\x7f", "\x85", "\r\n",
    # reserved by Zarr, by ucpstore, by systems
    "zarr.json", ".zarray", ".zgroup", ".zattrs", ".zmetadata", "__x", "__", "c", "c.0", "c.0.0",
    "commits", "steps", "work", "tags", ".tmp-writable", ".tmp-0123456789abcdef", "CON", "nul",
    "aux.txt", "LPT1", "a.", "dict", "array",
    # very long, also with a long common beginning
    "x" * 200, "x" * 201, "x" * 255, "x" * 256, "x" * 5000, "x" * 4999 + "y", "\u65e5" * 100,
    "\U0001f600" * 80, "%" * 90,
    # differing in case only
    "Case", "case", "CASE", "cAse", "\u00df", "ss", "SS", "\u00c9", "x" * 4999 + "X",
)  # fmt: skip
OTHERS = (0, 1, -1, True, None, 1.5, b"a", ("a", 1), "0", "1", "True", "None")


@pytest.fixture(params=["local", "obstore", "s3fs"])
def place(request: pytest.FixtureRequest, tmp_path: Path) -> tuple[str, dict[str, object]]:
    """A URL with something else beside it, and the options."""
    if request.param == "local":
        return f"{tmp_path}/outer/run", {}
    service: S3Service = request.getfixturevalue("s3")
    bucket = request.getfixturevalue("s3_bucket")
    options = {"engine": request.param, **service.options()}
    return f"s3://{bucket}/{secrets.token_hex(4)}/run", options


def unlike() -> list[object]:
    """All names, without those that Python takes for the same key."""
    return list(dict.fromkeys((*NAMES, *OTHERS)))


def test_awkward_names_come_back_each_from_a_place_of_its_own(
    place: tuple[str, dict[str, object]],
) -> None:
    url, options = place
    names = unlike()
    state = {
        "m": {name: torch.tensor([number, -number]) for number, name in enumerate(names)},
        "plain": dict.fromkeys(names, 7),
    }
    ucpstore.save(url, state, step=1, storage_options=options)
    target = {
        "m": {name: torch.zeros(2, dtype=torch.int64) for name in names},
        "plain": dict.fromkeys(names, 0),
    }
    ucpstore.load(url, target, storage_options=options)
    wrong = [
        name for number, name in enumerate(names) if target["m"][name].tolist() != [number, -number]
    ]
    assert wrong == []
    assert target["plain"] == state["plain"]
    folder = check_inside(url, options)
    arrays = {key.rpartition("/")[0] for key in folder if key.startswith("m/")}
    assert len(arrays - {"m"}) == len(names)
    assert all(len(part.encode()) <= 255 for key in folder for part in key.split("/"))
    assert all(key.isascii() and key.isprintable() for key in folder)


def check_inside(url: str, options: dict[str, object]) -> list[str]:
    """Everything that was stored lies in the store and its one step; the keys below that."""
    outer = open_storage(url.rpartition("/")[0], options)
    found = [entry.key for entry in outer.list("")]
    assert [key for key in found if not key.startswith("run/")] == []
    (step,) = open_storage(url, options).folders("steps/")
    fixed = {
        "run/zarr.json",
        *(f"run/{name}/zarr.json" for name in ("commits", "steps", "tags", "work")),
        "run/commits/0000000001/zarr.json",
    }
    inside = f"run/steps/{step}/"
    assert {key for key in found if not key.startswith(inside)} == fixed
    return [key.removeprefix(inside) for key in found if key.startswith(inside)]


@pytest.mark.parametrize("name", ["..", "zarr.json", "a/b", "\x00", " ", "x" * 300, "*"])
def test_awkward_names_of_items(place: tuple[str, dict[str, object]], name: str) -> None:
    """At the top of the state too, as an item and as an array."""
    url, options = place
    ucpstore.save(
        url,
        {name: {"w": torch.ones(2)}, f"{name}2": torch.ones(3)},
        step=1,
        storage_options=options,
    )
    target = {name: {"w": torch.zeros(2)}, f"{name}2": torch.zeros(3)}
    ucpstore.load(url, target, storage_options=options)
    assert target[name]["w"].sum() == 2
    assert target[f"{name}2"].sum() == 3
    check_inside(url, options)

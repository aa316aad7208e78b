"""Marks of saves in progress, tags, the root."""

import pytest

from ucpstore.errors import CorruptError, FormatError, StateError, StepNotFoundError
from ucpstore.format.documents import COMMITS, PLAIN, ROOT, WORK, marked
from ucpstore.format.marks import Tag, WorkMark, refusal


def test_marks_and_tags_come_back():
    mark = WorkMark(100, "8d41c0e2a7b3", "node-7", 4242, "2026-01-02T03:04:05Z")
    assert WorkMark.from_bytes(mark.to_bytes(), "k") == mark
    tag = Tag("best", 100, "2026-01-02T03:04:05Z")
    assert Tag.from_bytes(tag.to_bytes(), "k") == tag
    with pytest.raises(CorruptError, match="k is damaged"):
        Tag.from_bytes(tag.to_bytes().replace(b"100", b"101"), "k")
    with pytest.raises(CorruptError, match="should be a tag document"):
        Tag.from_bytes(mark.to_bytes(), "k")
    with pytest.raises(StateError, match="step must be"):
        Tag("best", -1, "").to_bytes()


INSIDE = "lies inside a store; give the folder above `steps` and `commits`"
OTHER = "/x is a Zarr node, but not a checkpoint store"


@pytest.mark.parametrize(
    ("raw", "committed", "kind", "words"),
    [
        (PLAIN, False, StepNotFoundError, OTHER),
        (marked("store")[:-9], False, CorruptError, "not a JSON document"),
        (WORK, False, StepNotFoundError, f"/x {INSIDE}"),
        (COMMITS, False, StepNotFoundError, f"/x {INSIDE}"),
        (ROOT.replace(b'"layout":1', b'"layout":2'), False, FormatError, "a store of layout 2"),
        (ROOT.replace(b'"layout":1', b'"layout":2'), True, FormatError, "a store of layout 2"),
        (ROOT + b"\n", False, CorruptError, "byte for byte"),
        (ROOT.replace(b'"layout":1', b'"layout":0'), False, CorruptError, "byte for byte"),
        (ROOT.replace(b"ucpstore", b"tcpstore"), False, StepNotFoundError, OTHER),
        (ROOT.replace(b"ucpstore", b"tcpstore"), True, CorruptError, "/x is damaged"),
        (ROOT.replace(b'store"', b'stose"'), True, CorruptError, "/x is damaged"),
    ],
)
def test_a_root_that_is_not_the_one_of_a_store(
    raw: bytes, committed: bool, kind: type[Exception], words: str
) -> None:
    error = refusal(raw, "/x", committed=committed)
    assert type(error) is kind
    assert words in str(error)


@pytest.mark.parametrize("raw", [None, PLAIN, b'{"node_type":"array"}', b"{"])
@pytest.mark.parametrize("below", ["", "/", "/model", "/model/0.bias"])
def test_a_place_in_the_folder_of_a_save_is_known_by_its_name(
    raw: bytes | None, below: str
) -> None:
    for above in ("", "/data/run/", "s3://bucket/run/", "memory://"):
        url = f"{above}steps/0000000003-0123456789ab{below}"
        assert str(refusal(raw, url)) == f"{url} {INSIDE}"


def test_a_store_and_an_empty_place_are_not_refused() -> None:
    for url in ("/x", "s3://bucket/steps/3", "/run/steps/0000000003-0123456789abc"):
        assert refusal(ROOT, url) is None
        assert refusal(None, url) is None

"""Marks of saves in progress, tags, the root."""

import pytest

from ucpstore.errors import CorruptError, FormatError, StateError
from ucpstore.format.documents import PLAIN, ROOT, WORK
from ucpstore.format.marks import Tag, WorkMark, check_root


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


def test_the_root_is_one_fixed_document():
    check_root(ROOT)
    for other, found in [
        (PLAIN, "not the root of a checkpoint store"),
        (WORK, "not the root of a checkpoint store"),
        (ROOT.replace(b'"layout":1', b'"layout":2'), "layout 2, but this ucpstore knows only"),
        (ROOT + b"\n", "byte for byte"),
    ]:
        with pytest.raises(FormatError, match=found):
            check_root(other)

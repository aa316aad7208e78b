from __future__ import annotations

import os
from pathlib import Path

import pytest

from ucpstore.errors import StateError
from ucpstore.storage import open_storage
from ucpstore.storage.objects import S3Storage

KEYS = {"key": "k", "secret": "s"}


@pytest.fixture(autouse=True)
def _folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("HOME", str(tmp_path / "home"))


@pytest.mark.parametrize(
    ("url", "root"),
    [
        ("/t/x", "/t/x"),
        ("/t/x/", "/t/x"),
        ("/t/x//", "/t/x"),
        ("/", "/"),
        ("x", "{here}/x"),
        ("./x", "{here}/x"),
        ("x/y/", "{here}/x/y"),
        ("../x", "{here}/../x"),
        ("~", "{here}/home"),
        ("~/x", "{here}/home/x"),
        ("file:///t/x", "/t/x"),
        ("file:///t/x/", "/t/x"),
        ("FILE://localhost/t/x", "/t/x"),
        ("file:/t/x", "/t/x"),
        ("file:///t/with%20space/%C3%A9", "/t/with space/é"),
        ("file:///t/a?b#c", "/t/a?b#c"),
        ("/t/with space/é", "/t/with space/é"),
        ("/t/with%20percent", "/t/with%20percent"),
        (Path("/t/x"), "/t/x"),
        (Path("~/x"), "{here}/home/x"),
        ("C:\\x", "{here}/C:\\x"),
        ("/t/a://b", "/t/a:/b"),
        ("step:100", "{here}/step:100"),
    ],
)
def test_local_urls(url: str | Path, root: str, tmp_path: Path) -> None:
    assert open_storage(url).url == root.format(here=tmp_path)


@pytest.mark.parametrize(
    ("url", "root"),
    [
        ("s3://b", "s3://b"),
        ("s3://b/", "s3://b"),
        ("s3://b/k", "s3://b/k"),
        ("s3://b/k/", "s3://b/k"),
        ("s3://b//k", "s3://b/k"),
        ("S3://b/k//l/", "s3://b/k/l"),
        ("s3://b/with space/%41", "s3://b/with space/%41"),
        ("s3://my.bucket-1/k", "s3://my.bucket-1/k"),
    ],
)
def test_s3_urls(url: str, root: str) -> None:
    storage = open_storage(url, KEYS)
    assert isinstance(storage, S3Storage)
    assert storage.url == root


def test_memory_urls_name_one_storage() -> None:
    open_storage("memory://test-urls/").put("k", b"1")
    assert open_storage("memory://test-urls").get("k") == b"1"


@pytest.mark.parametrize(
    ("url", "words"),
    [
        ("s3:/b/k", "'s3://b/k'"),
        ("s3:b/k", "'s3://b/k'"),
        (Path("s3://b/k"), "'s3://b/k'"),
        (Path("runs") / "s3://b/k", "'s3://b/k'"),
        ("./s3:/b/k", "'s3://b/k'"),
        ("s3:", "'s3://'"),
        ("gs:/b/k", "'gs://b/k'"),
        ("s3://", "s3://bucket/prefix"),
        ("s3:///k", None),
        ("s3://b?/k", "s3://bucket/prefix"),
        ("s3://b/../k", "s3://bucket/prefix"),
        ("nope://b/k", "scheme 'nope' is not known; give a path, file:///path, s3://bucket/prefix"),
        ("nope::s3://b/k", "scheme 'nope' is not known"),
        ("simplecache::b k", "every part of a chained URL must name its protocol"),
        ("file://host/t", "three slashes"),
        ("file://t", "three slashes"),
        ("~nobody-of-that-name/x", "no such user"),
        ("", "is not a path"),
        ("a\0b", "is not a path"),
    ],
)
def test_what_is_no_url_is_refused(url: str | Path, words: str | None, tmp_path: Path) -> None:
    if words is None:  # empty segments mean nothing, so this is bucket k
        assert open_storage(url, KEYS).url == "s3://k"
        return
    with pytest.raises(StateError) as caught:
        open_storage(url)
    assert words in str(caught.value)
    assert list(tmp_path.iterdir()) == []


def test_credentials_in_a_url_are_refused_and_not_shown() -> None:
    with pytest.raises(StateError, match="do not belong") as caught:
        open_storage("s3://AKIAXXXX:very-secret@bucket/k")
    assert "very-secret" not in str(caught.value)


def test_places_without_options_refuse_them() -> None:
    for url in ("/t/x", "file:///t/x", "memory://x"):
        with pytest.raises(StateError, match=r"takes no storage options, but these .*: anon, key"):
            open_storage(url, {"key": "secret-value", "anon": True})
        assert open_storage(url, {}).url


def test_a_relative_path_is_taken_from_where_it_was_opened(tmp_path: Path) -> None:
    storage = open_storage("x")
    (tmp_path / "elsewhere").mkdir()
    os.chdir(tmp_path / "elsewhere")
    storage.put("k", b"1")
    assert (tmp_path / "x" / "k").read_bytes() == b"1"


def test_a_symbolic_link_to_a_folder_is_that_folder(tmp_path: Path) -> None:
    (tmp_path / "real").mkdir()
    (tmp_path / "link").symlink_to("real")
    open_storage(tmp_path / "link").put("k", b"1")
    assert open_storage(tmp_path / "real").get("k") == b"1"


def test_a_state_in_the_place_of_the_url_is_refused() -> None:
    with pytest.raises(StateError, match=r"url must be a path or a URL, but it is a dict; the url"):
        open_storage({"model": 1})  # type: ignore[arg-type]

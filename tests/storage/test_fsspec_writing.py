"""Writes through fsspec: what others do meanwhile, what fails on the way, what places lack."""

from __future__ import annotations

import errno
import random
from pathlib import Path

import fsspec
import pytest
from fsspec.implementations.local import LocalFileOpener, LocalFileSystem
from services.fsspec_stores import new_memory, open_fsspec
from services.storage_suite import keys, with_threads

from ucpstore.errors import StorageError


def test_folders_that_others_make_and_remove_meanwhile(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Network file systems fail `makedirs` for what another rank has just made."""
    real = LocalFileSystem.makedirs
    draw = random.Random(1)

    def makedirs(self: LocalFileSystem, path: str, exist_ok: bool = False) -> None:
        real(self, path, exist_ok=True)
        if draw.random() < 0.5:
            raise FileExistsError(path)

    monkeypatch.setattr(LocalFileSystem, "makedirs", makedirs)
    storage = open_fsspec(f"local://{tmp_path}/run")

    def work(me: int) -> None:
        for i in range(30):
            storage.put(f"a/b/{i % 3}/{me}", b"x")
            storage.delete([f"a/b/{i % 3}/{me}"])

    with_threads(4, work)
    assert keys(storage) == []


def test_a_write_that_could_not_begin_leaves_what_is_there(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    storage = open_fsspec(f"local://{tmp_path}/s")
    storage.put_if_absent("k", b"old")

    def fail(*_: object, **__: object) -> None:
        raise OSError(errno.EMFILE, "too many open files")

    with monkeypatch.context() as patch:
        patch.setattr(LocalFileSystem, "_open", fail)
        with pytest.raises(StorageError, match="too many open files"):
            storage.put_if_absent("k", b"new")
        with pytest.raises(StorageError, match="too many open files"):
            storage.put("k", b"new")
    assert storage.get("k") == b"old"


@pytest.mark.parametrize("create", [False, True])
def test_a_write_that_fails_on_the_way_leaves_nothing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, create: bool
) -> None:
    storage = open_fsspec(f"local://{tmp_path}/s")
    storage.put("other", b"")
    write = storage.put_if_absent if create else storage.put

    def fail(self: LocalFileOpener, data: bytes) -> None:
        self.f.write(data[:2])
        raise OSError(errno.ENOSPC, "no space left on device")

    with monkeypatch.context() as patch:
        patch.setattr(LocalFileOpener, "write", fail, raising=False)
        with pytest.raises(StorageError, match="no space left"):
            write("k", b"new")
    assert keys(storage) == ["other"]


def test_a_place_without_exclusive_creation_is_warned_of_once(bare: str) -> None:
    storage = open_fsspec(bare)
    with pytest.warns(UserWarning, match="let only one job at a time write to this store"):
        storage.check_writable()
    storage.check_writable()
    storage.put_if_absent("k", b"first")
    with pytest.raises(FileExistsError):
        storage.put_if_absent("k", b"second")
    assert storage.get("k") == b"first"


def test_a_missing_bucket_is_refused_and_not_made(bare: str) -> None:
    storage = open_fsspec("bare://no-such-bucket/run")
    for call in (storage.check_writable, lambda: storage.put("k", b"")):
        with pytest.raises(StorageError, match="does not exist: create it first"):
            call()


@pytest.mark.parametrize("kind", ["memory", "local"])
def test_a_file_in_the_way(kind: str, tmp_path: Path) -> None:
    url = new_memory() if kind == "memory" else f"local://{tmp_path}/run"
    storage = open_fsspec(url)
    storage.put("a", b"I am a file")
    for write in (storage.put, storage.put_if_absent):
        with pytest.raises(StorageError, match=r"cannot write .*a/b"):
            write("a/b", b"")
    assert keys(storage) == ["a"]


def test_two_stores_that_try_a_place_at_once_do_not_mislead_each_other() -> None:
    url = new_memory()
    first, second = open_fsspec(url), open_fsspec(url)
    puts: list[str] = []
    writer = first._writer
    put = writer._put

    def put_and_let_the_other_try(
        fs: fsspec.AbstractFileSystem, path: str, data: bytes, *, create: bool
    ) -> None:
        put(fs, path, data, create=create)
        puts.append(path)
        if len(puts) == 1:  # between the two puts of the first one's probe
            second.check_writable()

    writer._put = put_and_let_the_other_try  # type: ignore[method-assign]
    first.check_writable()  # a warning would be an error
    assert len(puts) == 1, "the second put was refused, as it has to be"
    assert list(first.list("")) == []

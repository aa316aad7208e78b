# ruff: noqa: PTH115, PTH208  # plain names are what is compared

from __future__ import annotations

import errno
import os
import shutil
import tempfile
import threading
from pathlib import Path

import pytest
from services.storage_suite import StorageSuite, keys, with_threads

from ucpstore.errors import OutcomeUnknownError, StorageError
from ucpstore.storage import read_into
from ucpstore.storage.local import LocalStorage


@pytest.fixture
def storage(tmp_path: Path) -> LocalStorage:
    return LocalStorage(tmp_path / "store with space é")


class TestLocalStorage(StorageSuite):
    @pytest.fixture
    def storage(self, tmp_path: Path) -> LocalStorage:
        return LocalStorage(tmp_path / "store")


def test_files_are_not_executable(storage: LocalStorage, tmp_path: Path) -> None:
    storage.put("a/b", b"x")
    storage.put_if_absent("a/c", b"x")
    Path(tmp_path / "plain").write_bytes(b"x")
    modes = {Path(storage.url, key).stat().st_mode for key in ("a/b", "a/c")}
    assert modes == {(tmp_path / "plain").stat().st_mode}


def fail(monkeypatch: pytest.MonkeyPatch, name: str, number: int, after: int = 0) -> list[int]:
    """Make `os.name` fail with an errno from call `after` on; returns the list of calls."""
    real = getattr(os, name)
    calls: list[int] = []

    def call(*args: object, **kwargs: object) -> object:
        calls.append(1)
        if len(calls) > after:
            raise OSError(number, os.strerror(number))
        return real(*args, **kwargs)

    monkeypatch.setattr(os, name, call)
    return calls


@pytest.mark.parametrize(
    ("name", "number", "words"),
    [
        ("write", errno.ENOSPC, "No space left on device; free some space"),
        ("write", errno.EDQUOT, "quota"),
        ("write", errno.EIO, "kernel's log"),
        ("close", errno.EDQUOT, "quota"),
        ("open", errno.EROFS, "read-only"),
        ("open", errno.EACCES, "permissions"),
        ("open", errno.EMFILE, "ulimit"),
    ],
)
def test_a_put_that_fails_keeps_the_cause_and_leaves_nothing(
    storage: LocalStorage,
    monkeypatch: pytest.MonkeyPatch,
    name: str,
    number: int,
    words: str,
) -> None:
    storage.put("a/other", b"")
    with monkeypatch.context() as patch:
        fail(patch, name, number)
        with pytest.raises(StorageError, match=words) as caught:
            storage.put("a/object", b"x" * 100)
    assert caught.value.errno == number
    assert isinstance(caught.value.__cause__, OSError)
    assert storage.url in str(caught.value)
    assert sorted(os.listdir(f"{storage.url}/a")) == ["other"]


def test_a_put_writes_on_where_the_system_stopped(
    storage: LocalStorage, monkeypatch: pytest.MonkeyPatch
) -> None:
    real = os.write
    monkeypatch.setattr(os, "write", lambda descriptor, data: real(descriptor, data[:3]))
    storage.put("k", b"0123456789")
    assert storage.get("k") == b"0123456789"


def test_a_read_reads_on_where_the_system_stopped(
    storage: LocalStorage, monkeypatch: pytest.MonkeyPatch
) -> None:
    storage.put("k", b"0123456789")
    real = os.preadv
    monkeypatch.setattr(
        os, "preadv", lambda descriptor, views, start: real(descriptor, [views[0][:3]], start)
    )
    out = bytearray(8)
    read_into(storage, "k", 1, memoryview(out))
    assert out == b"12345678"


@pytest.mark.parametrize("name", ["write", "fsync", "link"])
def test_a_put_if_absent_that_fails_leaves_nothing(
    storage: LocalStorage, monkeypatch: pytest.MonkeyPatch, name: str
) -> None:
    storage.put("a/other", b"")
    with monkeypatch.context() as patch:
        fail(patch, name, errno.ENOSPC)
        with pytest.raises(StorageError) as caught:
            storage.put_if_absent("a/object", b"x")
    assert not isinstance(caught.value, OutcomeUnknownError)
    assert os.listdir(f"{storage.url}/a") == ["other"]


def test_a_put_if_absent_whose_folder_cannot_be_synced_is_unknown(
    storage: LocalStorage, monkeypatch: pytest.MonkeyPatch
) -> None:
    storage.put("a/other", b"")
    fail(monkeypatch, "fsync", errno.EIO, after=1)  # the first is the file's
    with pytest.raises(OutcomeUnknownError, match="could not be synced"):
        storage.put_if_absent("a/object", b"x")


def test_put_if_absent_syncs_file_then_folders(
    storage: LocalStorage, monkeypatch: pytest.MonkeyPatch
) -> None:
    events: list[str] = []
    real_link, real_sync = os.link, os.fsync

    def name(descriptor: int) -> str:
        return os.readlink(f"/proc/self/fd/{descriptor}").removeprefix(storage.url)

    def sync(descriptor: int) -> None:
        events.append(f"sync {name(descriptor)}")
        real_sync(descriptor)

    def link(source: str, target: str) -> None:
        events.append("link")
        real_link(source, target)

    monkeypatch.setattr(os, "fsync", sync)
    monkeypatch.setattr(os, "link", link)
    storage.put_if_absent("commits/1/zarr.json", b"x")
    assert events[0].startswith("sync /commits/1/.tmp-")
    assert events[1:] == ["link", "sync /commits/1", "sync /commits", "sync "]


def test_a_link_whose_answer_was_lost_has_worked(
    storage: LocalStorage, monkeypatch: pytest.MonkeyPatch
) -> None:
    """NFS clients send a link again and then meet their own."""
    real = os.link

    def link(source: str, target: str) -> None:
        real(source, target)
        real(source, target)

    monkeypatch.setattr(os, "link", link)
    storage.put_if_absent("k", b"mine")
    assert storage.get("k") == b"mine"
    with pytest.raises(FileExistsError):
        storage.put_if_absent("k", b"other")


@pytest.mark.parametrize("number", [errno.EPERM, errno.EOPNOTSUPP])
def test_a_file_system_without_links_is_found_before_the_first_write(
    storage: LocalStorage, monkeypatch: pytest.MonkeyPatch, number: int
) -> None:
    fail(monkeypatch, "link", number)
    with pytest.raises(StorageError, match="no hard links, which a commit needs") as caught:
        storage.check_writable()
    assert caught.value.errno == number
    assert os.listdir(storage.url) == []


def test_sync_syncs_each_file_and_folder_once_and_not_again(
    storage: LocalStorage, monkeypatch: pytest.MonkeyPatch
) -> None:
    synced: list[str] = []
    real = os.fsync

    def sync(descriptor: int) -> None:
        synced.append(os.readlink(f"/proc/self/fd/{descriptor}").removeprefix(storage.url))
        real(descriptor)

    monkeypatch.setattr(os, "fsync", sync)
    for key in ("steps/1/m/a/c.0", "steps/1/m/a/c.1", "steps/1/m/b/c.0", "steps/2/x", "tags/t"):
        storage.put(key, b"")
    assert synced == []
    storage.sync("steps/1/")
    files = ["/steps/1/m/a/c.0", "/steps/1/m/a/c.1", "/steps/1/m/b/c.0"]
    folders = ["", "/steps", "/steps/1", "/steps/1/m", "/steps/1/m/a", "/steps/1/m/b"]
    assert sorted(synced[:3]) == files
    assert sorted(synced[3:]) == folders
    synced.clear()
    storage.sync("steps/1/")
    assert synced == []
    storage.sync("")
    assert sorted(synced) == ["", "/steps", "/steps/2", "/steps/2/x", "/tags", "/tags/t"]


def test_an_error_of_one_file_of_many_ends_the_sync(
    storage: LocalStorage, monkeypatch: pytest.MonkeyPatch
) -> None:
    for number in range(20):
        storage.put(f"a/{number}", b"")
    real = os.fsync

    def sync(descriptor: int) -> None:
        if Path(f"/proc/self/fd/{descriptor}").readlink().name == "13":
            raise OSError(errno.EIO, "injected")
        real(descriptor)

    monkeypatch.setattr(os, "fsync", sync)
    for _ in range(2):  # what was not synced is not forgotten
        with pytest.raises(StorageError, match=r"cannot sync .*\(.*/a/13\)"):
            storage.sync("a/")


def test_what_was_deleted_needs_no_sync(storage: LocalStorage) -> None:
    for key in ("a/1", "a/2", "b/c/3"):
        storage.put(key, b"x")
    storage.delete(["a/1"])
    storage.delete_tree("b/")
    Path(f"{storage.url}/a/2").unlink()
    storage.put("a/3", b"x")
    storage.sync("")
    assert sorted(entry.key for entry in storage.list("")) == ["a/3"]


def test_a_sync_that_fails_is_not_forgotten(
    storage: LocalStorage, monkeypatch: pytest.MonkeyPatch
) -> None:
    storage.put("a/b", b"")
    with monkeypatch.context() as patch:
        fail(patch, "fsync", errno.EIO)
        with pytest.raises(StorageError, match=r"cannot sync .*\(.*/a/b\)"):
            storage.sync("a/")
    calls = fail(monkeypatch, "fsync", errno.EIO, after=99)
    storage.sync("a/")
    assert len(calls) == 3  # the file, its folder, the root


def test_temporary_files_are_not_listed(storage: LocalStorage) -> None:
    storage.put("a/object", b"")
    for name in (".tmp-0123456789abcdef", "a/.tmp-fedcba9876543210"):
        Path(storage.url, name).write_bytes(b"left by a crash")
    assert keys(storage) == ["a/object"]
    storage.delete_tree("a/")
    assert os.listdir(storage.url) == [".tmp-0123456789abcdef"]


def test_delete_removes_the_folders_it_empties(storage: LocalStorage) -> None:
    """Other Zarr tools warn of a folder that is no node."""
    storage.put("commits/1/zarr.json", b"")
    storage.put("commits/zarr.json", b"")
    storage.put("work/a/zarr.json", b"")
    storage.delete(["commits/1/zarr.json", "work/a/zarr.json"])
    assert sorted(os.listdir(storage.url)) == ["commits"]
    assert os.listdir(f"{storage.url}/commits") == ["zarr.json"]
    storage.delete(["commits/zarr.json"])
    assert os.listdir(storage.url) == []


def test_writers_and_deleters_of_one_folder_do_not_disturb_each_other(
    storage: LocalStorage,
) -> None:
    other = LocalStorage(storage.url)  # as another process would: with its own memory of folders

    def work(me: int) -> None:
        mine = storage if me % 2 else other
        for i in range(200):
            mine.put(f"a/b/{me}", b"x")
            if i % 10 == 0:
                mine.put_if_absent(f"a/b/{me}-{i}", b"x")
                mine.delete([f"a/b/{me}-{i}"])
            mine.delete([f"a/b/{me}"])

    with_threads(4, work)
    assert os.listdir(storage.url) == []


def test_folders_made_by_others_at_the_same_time_are_fine(
    storage: LocalStorage, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Network file systems answer EEXIST for folders that they just did not show."""
    real = os.mkdir

    def mkdir(path: str) -> None:
        real(path)
        raise FileExistsError(errno.EEXIST, "File exists", path)

    monkeypatch.setattr(os, "mkdir", mkdir)
    storage.check_writable()
    storage.put("a/b/c/d", b"1")
    assert storage.get("a/b/c/d") == b"1"


def test_a_file_in_the_way(storage: LocalStorage, tmp_path: Path) -> None:
    storage.put("a", b"I am a file")
    for write in (storage.put, storage.put_if_absent):
        with pytest.raises(StorageError, match="a file is where a folder is needed"):
            write("a/b", b"")
    storage.put("d/e", b"")
    with pytest.raises(StorageError, match="a folder is where a file is needed"):
        storage.put("d", b"")
    (tmp_path / "file").write_bytes(b"")
    for root in (tmp_path / "file", tmp_path / "file" / "below"):
        with pytest.raises(StorageError, match=r"cannot write below.*a file is where a folder"):
            LocalStorage(root).check_writable()


def test_check_writable_makes_the_root_with_its_parents(tmp_path: Path) -> None:
    LocalStorage(tmp_path / "a" / "b" / "c").check_writable()
    assert (tmp_path / "a" / "b" / "c").is_dir()
    assert os.listdir(tmp_path / "a" / "b" / "c") == []


def test_opening_and_reading_make_nothing(tmp_path: Path) -> None:
    storage = LocalStorage(tmp_path / "store")
    assert keys(storage) == []
    assert storage.folders("a/") == ()
    with pytest.raises(FileNotFoundError):
        storage.get("a")
    storage.delete(["a/b"])
    storage.delete_tree("a/")
    storage.sync("")
    assert os.listdir(tmp_path) == []


def test_a_read_only_root_is_refused(
    storage: LocalStorage, monkeypatch: pytest.MonkeyPatch
) -> None:
    storage.put("k", b"1")
    fail(monkeypatch, "open", errno.EROFS)
    with pytest.raises(StorageError, match="read-only") as caught:
        storage.check_writable()
    assert caught.value.errno == errno.EROFS


@pytest.mark.skipif(os.geteuid() != 0, reason="only root can become another user")
def test_permissions_hold_for_other_users(request: pytest.FixtureRequest) -> None:
    """In a child that is not root: reading a closed store works, writing says why it does not."""
    folder = tempfile.mkdtemp()  # pytest's own are closed to other users
    request.addfinalizer(lambda: shutil.rmtree(folder))
    Path(folder).chmod(0o755)
    storage = LocalStorage(folder)
    storage.put("a/k", b"1")
    pid = os.fork()
    if pid == 0:
        try:
            os.setuid(65534)
            assert storage.get("a/k") == b"1"
            for call in (
                lambda: storage.put("a/k2", b""),
                lambda: storage.put_if_absent("a/k3", b""),
                lambda: storage.delete(["a/k"]),
                lambda: storage.delete_tree("a/"),
                storage.check_writable,
            ):
                with pytest.raises(StorageError, match="permissions") as caught:
                    call()
                assert caught.value.errno == errno.EACCES
            os._exit(0)
        except BaseException:
            os._exit(1)
    assert os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) == 0


def test_case_insensitive_file_systems_are_found(
    storage: LocalStorage, monkeypatch: pytest.MonkeyPatch
) -> None:
    storage.check_writable()
    real = Path.exists
    monkeypatch.setattr(
        Path, "exists", lambda path: real(path) or real(path.with_name(path.name[:-1] + "a"))
    )
    assert storage.case_insensitive is True
    assert os.listdir(storage.url) == []


def test_copy_without_copy_file_range(
    storage: LocalStorage, monkeypatch: pytest.MonkeyPatch
) -> None:
    storage.put("a", b"0123456789")
    fail(monkeypatch, "copy_file_range", errno.EXDEV)
    storage.copy("a", "b")
    monkeypatch.setattr(os, "copy_file_range", lambda *_: 0)
    storage.copy("a", "c")
    assert storage.get("b") == storage.get("c") == b"0123456789"


def test_symbolic_links_are_read_but_never_deleted_through(
    storage: LocalStorage, tmp_path: Path
) -> None:
    storage.put("a/k", b"1")
    elsewhere = tmp_path / "elsewhere"
    elsewhere.mkdir()
    (elsewhere / "precious").write_bytes(b"2")
    Path(storage.url, "a", "link").symlink_to(elsewhere)
    assert keys(storage) == ["a/k", "a/link/precious"]
    storage.delete_tree("a/")
    assert os.listdir(elsewhere) == ["precious"]


def test_listing_survives_what_is_deleted_meanwhile(storage: LocalStorage) -> None:
    for i in range(300):
        storage.put(f"a/{i}/k", b"")
    deleter = threading.Thread(target=lambda: storage.delete_tree("a/"))
    deleter.start()
    while deleter.is_alive():
        keys(storage)
    assert keys(storage) == []


def test_put_if_absent_has_one_winner_between_processes(storage: LocalStorage) -> None:
    read_end, write_end = os.pipe()
    children = []
    for me in range(6):
        pid = os.fork()
        if pid == 0:
            for race in range(20):
                try:
                    storage.put_if_absent(f"race/{race}", f"{me}".encode())
                    os.write(write_end, f"{race}:{me} ".encode())
                except FileExistsError:
                    pass
            os._exit(0)
        children.append(pid)
    os.close(write_end)
    with os.fdopen(read_end) as pipe:
        winners = [each.split(":") for each in pipe.read().split()]
    for pid in children:
        os.waitpid(pid, 0)
    assert sorted(int(race) for race, _ in winners) == list(range(20))
    for race, me in winners:
        assert storage.get(f"race/{race}") == me.encode()

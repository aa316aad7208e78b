"""Places reached through fsspec: the storage suite on three of them, and what fsspec adds to it."""

from __future__ import annotations

import asyncio
import errno
import functools
import importlib.util
import random
import secrets
import threading
import time
from collections.abc import Iterator
from http.server import SimpleHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

import fsspec
import pytest
from fsspec.implementations.local import LocalFileOpener, LocalFileSystem
from fsspec.implementations.memory import MemoryFileSystem
from ranks.harness import Ranks
from services.forking import in_child
from services.sftp import SftpServer
from services.storage_suite import StorageSuite, keys, with_threads

import ucpstore
from ucpstore.errors import StateError, StorageError
from ucpstore.storage import fsspec_storage, open_storage
from ucpstore.storage.fsspec_storage import FsspecStorage


def open_fsspec(url: str, options: dict[str, object] | None = None) -> FsspecStorage:
    storage = open_storage(url, options)
    assert isinstance(storage, FsspecStorage)
    return storage


def new_memory() -> str:
    return f"memory://test-{secrets.token_hex(6)}"


class TestFsspecMemory(StorageSuite):
    @pytest.fixture
    def storage(self) -> FsspecStorage:
        return open_fsspec(new_memory())


class TestFsspecLocal(StorageSuite):
    """`local://` is a folder as fsspec sees it, `file://` as we do."""

    keeps_folders = True

    @pytest.fixture
    def storage(self, tmp_path: Path) -> FsspecStorage:
        return open_fsspec(f"local://{tmp_path}/store with space é")


@pytest.fixture(scope="module")
def sftp() -> Iterator[SftpServer]:
    with SftpServer() as server:
        yield server


@pytest.mark.filterwarnings("ignore:.*cannot create an object only where there is none")
class TestFsspecSftp(StorageSuite):
    """A server behind a socket, with real folders and without exclusive creation."""

    large_bytes = 1024 * 1024
    keeps_folders = True

    @pytest.fixture
    def storage(self, sftp: SftpServer) -> Iterator[FsspecStorage]:
        storage = open_fsspec(f"{sftp.url}/{secrets.token_hex(6)}/run", sftp.options)
        yield storage
        storage.close()


# -- processes, threads and caches ----------------------------------------------------------------


def test_a_forked_child_has_a_file_system_of_its_own(tmp_path: Path) -> None:
    storage = open_fsspec(f"local://{tmp_path}/run")
    storage.put("a", b"parent")
    assert storage._calls.here is not None
    mine = storage._calls.here.fs

    def check() -> None:
        assert storage.get("a") == b"parent"
        storage.put_if_absent("b", b"child")
        assert storage._calls.here is not None
        assert storage._calls.here.fs is not mine

    assert in_child(check) == 0
    assert storage.get("b") == b"child"


@pytest.mark.filterwarnings("ignore:.*cannot create an object only where there is none")
def test_a_forked_child_connects_again(sftp: SftpServer) -> None:
    storage = open_fsspec(f"{sftp.url}/{secrets.token_hex(6)}", sftp.options)
    storage.put("a", b"parent")
    holding = threading.Event()

    def hold() -> None:  # while the parent is in the middle of something
        with fsspec_storage._creating:
            holding.set()
            time.sleep(0.5)

    thread = threading.Thread(target=hold)
    thread.start()
    holding.wait(5)

    def check() -> None:
        assert storage.get("a") == b"parent"
        storage.put_if_absent("b", b"child")

    assert in_child(check) == 0
    thread.join()
    assert storage.get("b") == b"child"
    storage.close()


@pytest.mark.filterwarnings("ignore:.*cannot create an object only where there is none")
def test_a_broken_connection_is_made_again(sftp: SftpServer) -> None:
    storage = open_fsspec(f"{sftp.url}/{secrets.token_hex(6)}", sftp.options)
    storage.put("a", b"1")
    for transport in sftp.transports:
        transport.close()
    with pytest.raises(StorageError, match="cannot read"):
        storage.get("a")
    assert storage.get("a") == b"1"
    storage.close()


def test_memory_is_fsspecs_and_shared_in_the_process() -> None:
    url = new_memory()
    open_fsspec(url).put("a/k", b"1")
    assert open_fsspec(f"{url}/").get("a/k") == b"1"
    assert fsspec.filesystem("memory").cat_file(f"{url}/a/k") == b"1"
    fsspec.filesystem("memory").pipe_file(f"{url}/b", b"2")
    assert keys(open_fsspec(url)) == ["a/k", "b"]
    assert keys(open_fsspec(f"{url}x")) == []


def test_memory_of_one_process_is_refused_with_several(ranks: Ranks) -> None:
    for text in ranks.run(2, memory_in_ranks):
        assert text.count("is the memory of one process, which the other 1 ranks do not see") == 2


def memory_in_ranks() -> str:
    said = []
    for call in (
        lambda: ucpstore.save("memory://ranks", {"a": 1}, step=1),
        lambda: ucpstore.load("memory://ranks", {"a": 1}),
    ):
        try:
            call()
        except StateError as error:
            said.append(str(error))
    assert ucpstore.CheckpointStore("memory://ranks").steps() == []
    return " ".join(said)


def test_callers_may_be_inside_of_a_running_loop(tmp_path: Path) -> None:
    storage = open_fsspec(new_memory())

    async def inside() -> bytes:
        storage.put("k", b"1")
        return storage.get("k")

    assert asyncio.run(inside()) == asyncio.run(inside()) == b"1"


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


# -- what is refused ------------------------------------------------------------------------------


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


class Bare(MemoryFileSystem):
    """A place without buckets of that name, and without exclusive creation."""

    protocol = "bare"

    def __init__(self, endpoint: str = "", password: str = "", account_key: str = "") -> None:
        super().__init__()

    @classmethod
    def _strip_protocol(cls, path: str) -> str:
        return super()._strip_protocol(path.removeprefix("bare://"))

    def pipe_file(self, path: str, value: bytes, mode: str = "overwrite", **_: object) -> None:
        if "no-such-bucket" in path:
            raise FileNotFoundError(path)
        super().pipe_file(path, value)

    def ls(self, path: str, detail: bool = True, **_: object) -> object:
        if "forbidden" in path:
            raise RuntimeError("403 for https://user:hunter2@host/?sig=hunter3&account_key=hunter4")
        return super().ls(path, detail)

    def makedirs(self, path: str, exist_ok: bool = False) -> None:
        raise AssertionError("this would make a bucket")


@pytest.fixture
def bare() -> str:
    fsspec.register_implementation("bare", Bare, clobber=True)
    return f"bare://bucket/{secrets.token_hex(4)}"


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


def test_options_are_checked_against_what_the_file_system_knows(bare: str) -> None:
    with pytest.raises(StateError, match=r"unknown storage option 'endpont'.*mean 'endpoint'"):
        open_storage(bare, {"endpont": "x"})
    with pytest.raises(StateError, match=r"unknown storage option 'zzz'.*Known are account_key"):
        open_storage(bare, {"zzz": "x"})


def test_errors_and_names_hold_no_secret(bare: str) -> None:
    options = {"password": "hunter2", "account_key": "hunter4"}
    storage = open_fsspec(f"{bare}/forbidden", options)
    with pytest.raises(StorageError, match="403 for") as caught:
        storage.folders("")
    assert "hunter" not in f"{caught.value}{caught.value.__context__}{storage!r}{storage._place!r}"
    shown = open_storage("sftp://me:hunter2@host:22/run")
    assert shown.url == "sftp://me:***@host:22/run"
    assert "hunter" not in repr(shown)
    with pytest.raises(StateError) as refused:
        open_storage("nope://me:hunter2@host/run?token=hunter3")
    assert "hunter" not in str(refused.value)


def test_a_wrong_password_says_what_to_check(sftp: SftpServer) -> None:
    storage = open_fsspec(f"{sftp.url}/x", {**sftp.options, "password": "wrong-password"})
    with pytest.raises(StorageError, match=r"cannot write sftp://.*Authentication"):
        storage.check_writable()


def test_a_missing_package_is_named() -> None:
    if importlib.util.find_spec("gcsfs"):
        pytest.skip("gcsfs is installed")
    with pytest.raises(StateError, match=r"'gs://b/k' needs a package that is missing.*gcsfs"):
        open_storage("gs://b/k")


def test_web_servers_are_read(tmp_path: Path) -> None:
    """Names that hold escapes have to be escaped once more in a URL."""
    open_storage(tmp_path).put("a%2Fb/k c", b"0123")
    handler = functools.partial(QuietHandler, directory=str(tmp_path))
    with ThreadingHTTPServer(("127.0.0.1", 0), handler) as server:
        thread = threading.Thread(target=server.serve_forever, args=(0.05,))
        thread.start()
        storage = open_fsspec(f"http://127.0.0.1:{server.server_address[1]}")
        assert storage.get("a%2Fb/k c") == b"0123"
        assert storage.size("a%2Fb/k c") == 4
        with pytest.raises(FileNotFoundError):
            storage.get("a%2Fb/absent")
        server.shutdown()
        thread.join()


class QuietHandler(SimpleHTTPRequestHandler):
    def log_message(self, format: str, *args: object) -> None:
        pass


def test_two_stores_that_try_a_place_at_once_do_not_mislead_each_other() -> None:
    url = new_memory()
    first, second = open_fsspec(url), open_fsspec(url)
    puts: list[str] = []
    put = first._put

    def put_and_let_the_other_try(
        fs: fsspec.AbstractFileSystem, path: str, data: bytes, *, create: bool
    ) -> None:
        put(fs, path, data, create=create)
        puts.append(path)
        if len(puts) == 1:  # between the two puts of the first one's probe
            second.check_writable()

    first._put = put_and_let_the_other_try  # type: ignore[method-assign]
    first.check_writable()  # a warning would be an error
    assert len(puts) == 1, "the second put was refused, as it has to be"
    assert list(first.list("")) == []

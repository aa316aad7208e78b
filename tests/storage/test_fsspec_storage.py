"""Places reached through fsspec: the storage suite on three of them, and what fsspec adds to it."""

from __future__ import annotations

import functools
import secrets
import threading
from collections.abc import Iterator
from http.server import SimpleHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

import fsspec
import pytest
from ranks.harness import Ranks
from services.fsspec_stores import new_memory, open_fsspec
from services.sftp import SftpServer
from services.storage_suite import StorageSuite, keys

import ucpstore
from ucpstore.errors import StateError
from ucpstore.storage import open_storage
from ucpstore.storage.fsspec_storage import FsspecStorage


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

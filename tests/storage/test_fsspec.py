"""Places reached through fsspec: the storage suite on three of them, and what fsspec adds to it."""

from __future__ import annotations

import asyncio
import os
import secrets
import threading
from collections.abc import Iterator
from pathlib import Path

import fsspec
import pytest
from fsspec.implementations.memory import MemoryFileSystem
from services.sftp import SftpServer
from services.storage_suite import StorageSuite, keys, with_threads

from ucpstore.errors import StateError, StorageError
from ucpstore.storage import Storage, open_storage
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

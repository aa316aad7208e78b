"""Stores of fsspec's, and a file system that promises little."""

from __future__ import annotations

import secrets

from fsspec.implementations.memory import MemoryFileSystem

from ucpstore.storage import open_storage
from ucpstore.storage.fsspec_storage import FsspecStorage


def open_fsspec(url: str, options: dict[str, object] | None = None) -> FsspecStorage:
    storage = open_storage(url, options)
    assert isinstance(storage, FsspecStorage)
    return storage


def new_memory() -> str:
    return f"memory://test-{secrets.token_hex(6)}"


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

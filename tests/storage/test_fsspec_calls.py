"""Calls to fsspec's file systems: processes, connections, and errors without secrets."""

from __future__ import annotations

import asyncio
import secrets
import threading
import time
from pathlib import Path

import pytest
from services.forking import in_child
from services.fsspec_stores import new_memory, open_fsspec
from services.sftp import SftpServer

from ucpstore.errors import StateError, StorageError
from ucpstore.storage import fsspec_writing, open_storage


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
        with fsspec_writing._creating:
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


def test_callers_may_be_inside_of_a_running_loop(tmp_path: Path) -> None:
    storage = open_fsspec(new_memory())

    async def inside() -> bytes:
        storage.put("k", b"1")
        return storage.get("k")

    assert asyncio.run(inside()) == asyncio.run(inside()) == b"1"


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

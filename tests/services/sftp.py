"""An SFTP server on loopback, in threads of this process, for the tests."""

from __future__ import annotations

import os
import secrets
import shutil
import socket
import tempfile
import threading
from collections.abc import Callable
from pathlib import Path
from typing import TypeVar

import paramiko

T = TypeVar("T")


class SftpServer:
    """Serves a new folder at `url`; `options` say who may come in. Use as a context manager."""

    def __init__(self) -> None:
        self.folder = Path(tempfile.mkdtemp(prefix="ucpstore-sftp-"))
        self.password = secrets.token_hex(12)
        self._key = paramiko.ECDSAKey.generate()
        self.transports: list[paramiko.Transport] = []
        self._socket = socket.create_server(("127.0.0.1", 0))
        self._thread = threading.Thread(target=self._accept, daemon=True)

    @property
    def url(self) -> str:
        return "sftp://127.0.0.1"

    @property
    def options(self) -> dict[str, object]:
        return {
            "port": self._socket.getsockname()[1],
            "username": "tester",
            "password": self.password,
            "look_for_keys": False,
            "allow_agent": False,
        }

    def __enter__(self) -> SftpServer:
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._socket.close()
        for each in self.transports:
            each.close()
        shutil.rmtree(self.folder, ignore_errors=True)

    def _accept(self) -> None:
        while True:
            try:
                connection, _ = self._socket.accept()
            except OSError:
                return
            transport = paramiko.Transport(connection)
            transport.add_server_key(self._key)
            transport.set_subsystem_handler(
                "sftp", paramiko.SFTPServer, _Files, root=str(self.folder)
            )
            transport.start_server(server=_Door(self.password))
            self.transports.append(transport)


class _Door(paramiko.ServerInterface):
    def __init__(self, password: str) -> None:
        self._password = password

    def check_auth_password(self, username: str, password: str) -> int:
        right = password == self._password
        return paramiko.AUTH_SUCCESSFUL if right else paramiko.AUTH_FAILED

    def check_channel_request(self, kind: str, number: int) -> int:
        return paramiko.OPEN_SUCCEEDED

    def get_allowed_auths(self, username: str) -> str:
        return "password"


class _Files(paramiko.SFTPServerInterface):
    """The operations that are used, below `root`."""

    def __init__(self, server: object, *, root: str) -> None:
        self._root = root

    def _path(self, path: str) -> str:
        return self._root + self.canonicalize(path)

    def list_folder(self, path: str) -> list[paramiko.SFTPAttributes] | int:
        def listing() -> list[paramiko.SFTPAttributes]:
            with os.scandir(self._path(path)) as entries:
                return [
                    paramiko.SFTPAttributes.from_stat(each.stat(), each.name) for each in entries
                ]

        return _answer(listing)

    def stat(self, path: str) -> paramiko.SFTPAttributes | int:
        return _answer(lambda: paramiko.SFTPAttributes.from_stat(os.stat(self._path(path))))  # noqa: PTH116

    lstat = stat

    def open(
        self, path: str, flags: int, attributes: paramiko.SFTPAttributes
    ) -> paramiko.SFTPHandle | int:
        def opened() -> paramiko.SFTPHandle:
            descriptor = os.open(self._path(path), flags, 0o666)
            handle = paramiko.SFTPHandle(flags)
            mode = "r+b" if flags & (os.O_WRONLY | os.O_RDWR) else "rb"
            if flags & os.O_WRONLY:
                mode = "wb"
            handle.readfile = handle.writefile = os.fdopen(descriptor, mode)
            return handle

        return _answer(opened)

    def remove(self, path: str) -> int:
        return _done(lambda: os.remove(self._path(path)))  # noqa: PTH107

    def mkdir(self, path: str, attributes: paramiko.SFTPAttributes) -> int:
        return _done(lambda: os.mkdir(self._path(path)))  # noqa: PTH102

    def rmdir(self, path: str) -> int:
        return _done(lambda: os.rmdir(self._path(path)))  # noqa: PTH106


def _answer(call: Callable[[], T]) -> T | int:
    try:
        return call()
    except OSError as error:
        return paramiko.SFTPServer.convert_errno(error.errno or 0)


def _done(call: Callable[[], object]) -> int:
    found = _answer(call)
    return found if isinstance(found, int) else paramiko.SFTP_OK

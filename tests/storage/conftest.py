"""Places that fsspec reaches."""

from __future__ import annotations

import secrets
from collections.abc import Iterator

import fsspec
import pytest
from services.fsspec_stores import Bare
from services.sftp import SftpServer


@pytest.fixture(scope="module")
def sftp() -> Iterator[SftpServer]:
    with SftpServer() as server:
        yield server


@pytest.fixture
def bare() -> str:
    fsspec.register_implementation("bare", Bare, clobber=True)
    return f"bare://bucket/{secrets.token_hex(4)}"

"""Places in buckets, and such that fsspec reaches."""

from __future__ import annotations

import secrets
from collections.abc import Iterator

import fsspec
import pytest
from services.fsspec_stores import Bare
from services.s3_stores import ENGINE
from services.sftp import SftpServer


@pytest.fixture(scope="module")
def sftp() -> Iterator[SftpServer]:
    with SftpServer() as server:
        yield server


@pytest.fixture
def bare() -> str:
    fsspec.register_implementation("bare", Bare, clobber=True)
    return f"bare://bucket/{secrets.token_hex(4)}"


@pytest.fixture
def prefix(bucket: str) -> str:
    """The URL of a place in the bucket that no other test uses."""
    return f"s3://{bucket}/{secrets.token_hex(4)}"


@pytest.fixture(params=["obstore", "s3fs"])
def engine(request: pytest.FixtureRequest) -> str:
    """Through which library `open_s3` sends: tests that use it run with both."""
    ENGINE[0] = request.param
    return ENGINE[0]

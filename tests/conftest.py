"""Services that tests talk to. `from services.faults import FaultyStorage` works in every test."""

from __future__ import annotations

import os
import signal
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).parent))
if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
    # Started in the background of a script. Processes of tests that are interrupted inherit this.
    signal.signal(signal.SIGINT, signal.default_int_handler)
pytest.register_assert_rewrite("services.storage_suite")

from services.proxy import S3Proxy  # noqa: E402  # found there
from services.seaweed import S3Service, Seaweed, external_service  # noqa: E402  # found there

pytest_plugins = ("ranks.plugin",)


@pytest.fixture(scope="session")
def s3() -> Iterator[S3Service]:
    """An S3 server: the one UCPSTORE_TEST_S3_ENDPOINT names, else a SeaweedFS for this session."""
    service = external_service()
    if service is not None:
        yield service
        return
    server = Seaweed()
    try:
        yield server.start()
    finally:
        server.stop()


@pytest.fixture
def s3_bucket(s3: S3Service) -> str:
    """A new, empty bucket."""
    return s3.create_bucket()


@pytest.fixture
def proxy(s3: S3Service) -> Iterator[S3Proxy]:
    """A proxy in front of the S3 server that counts requests and can misbehave."""
    with S3Proxy(s3.endpoint) as proxy:
        yield proxy


@pytest.fixture(scope="module")
def bucket(s3: S3Service) -> str:
    """One bucket for a module; making one is slow."""
    return s3.create_bucket()


@pytest.fixture
def no_aws_settings(monkeypatch: pytest.MonkeyPatch) -> None:
    """No variable, file or role gives credentials or an endpoint."""
    for name in list(os.environ):
        if name.startswith("AWS_"):
            monkeypatch.delenv(name)
    monkeypatch.setenv("AWS_EC2_METADATA_DISABLED", "true")
    monkeypatch.setenv("AWS_SHARED_CREDENTIALS_FILE", "/dev/null")
    monkeypatch.setenv("AWS_CONFIG_FILE", "/dev/null")

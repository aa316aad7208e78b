from __future__ import annotations

import threading
from concurrent.futures import ThreadPoolExecutor

import pytest
from services.seaweed import S3Service

from ucpstore.storage import s3_clients
from ucpstore.storage.objects import S3Storage
from ucpstore.storage.s3_options import S3Options


@pytest.fixture(autouse=True)
def _none_kept(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(s3_clients, "_kept", {})


def options(key: str = "a") -> S3Options:
    return S3Options(key=key, secret="s", endpoint_url="http://127.0.0.1:1")


@pytest.mark.parametrize("engine", ["obstore", "s3fs"])
def test_threads_and_storages_share_what_is_made_once(
    monkeypatch: pytest.MonkeyPatch, s3: S3Service, s3_bucket: str, engine: str
) -> None:
    made = []
    real = s3_clients._connect
    start = threading.Barrier(8)

    def connect(bucket: str, options: S3Options) -> s3_clients.Clients:
        made.append(bucket)
        return real(bucket, options)

    monkeypatch.setattr(s3_clients, "_connect", connect)

    def use(number: int) -> bytes:
        given = {**s3.options(), "engine": engine}
        storage = S3Storage.from_url(f"s3://{s3_bucket}/clients-{engine}/{number}", given)
        start.wait(10)
        storage.put("k", b"%d" % number)
        found = storage.get("k")
        storage.close()
        return found

    with ThreadPoolExecutor(8) as pool:
        assert list(pool.map(use, range(8))) == [b"%d" % number for number in range(8)]
    assert made == [s3_bucket]


def test_other_options_variables_and_processes_have_clients_of_their_own(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    first = s3_clients.clients_of("b", options())
    assert s3_clients.clients_of("b", options()) is first
    assert s3_clients.clients_of("c", options()) is not first
    assert s3_clients.clients_of("b", options("other")) is not first
    with monkeypatch.context() as patch:
        patch.setenv("AWS_REGION", "eu-central-1")
        assert s3_clients.clients_of("b", options()) is not first
    assert s3_clients.clients_of("b", options()) is first
    monkeypatch.setattr("os.getpid", lambda: 1)
    assert s3_clients.clients_of("b", options()) is not first


def test_only_some_are_kept() -> None:
    first = s3_clients.clients_of("b0", options())
    for number in range(1, s3_clients.KEPT + 1):
        s3_clients.clients_of(f"b{number}", options())
    assert len(s3_clients._kept) == s3_clients.KEPT
    assert s3_clients.clients_of("b0", options()) is not first


def test_renewing_looks_up_once_for_all(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("AWS_ACCESS_KEY_ID", "AWS_SECRET_ACCESS_KEY"):
        monkeypatch.setenv(name, "old")
    found = S3Options(endpoint_url="http://127.0.0.1:1")
    used = s3_clients.clients_of("b", found)
    assert s3_clients.renewed("b", found, used) is None
    monkeypatch.setenv("AWS_ACCESS_KEY_ID", "new")
    fresh = s3_clients.renewed("b", found, used)
    assert fresh is not None
    assert fresh.secrets[0] == "new"
    assert s3_clients.renewed("b", found, used) is fresh
    assert "old" not in repr(s3_clients._kept)
    assert "new" not in repr(s3_clients._kept)

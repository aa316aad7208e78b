from __future__ import annotations

import threading
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from datetime import UTC, datetime
from pathlib import Path

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


def test_other_options_and_variables_and_forked_children_have_clients_of_their_own(
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
    with monkeypatch.context() as patch:
        patch.setenv("https_proxy", "http://127.0.0.1:2")
        assert s3_clients.clients_of("b", options()) is not first
    s3_clients._after_fork()
    assert s3_clients.clients_of("b", options()) is not first


@pytest.mark.parametrize("change", ["config", "credentials", "home"])
def test_changed_files_are_read_again(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, change: str
) -> None:
    for name in ("AWS_CONFIG_FILE", "AWS_SHARED_CREDENTIALS_FILE"):
        monkeypatch.delenv(name, raising=False)

    def home(name: str, number: int, key: str) -> None:
        folder = tmp_path / name / ".aws"
        folder.mkdir(parents=True, exist_ok=True)
        (folder / "config").write_text(f"[default]\nendpoint_url = http://127.0.0.1:{number}\n")
        (folder / "credentials").write_text(
            f"[default]\naws_access_key_id = {key}\naws_secret_access_key = s\n"
        )
        monkeypatch.setenv("HOME", str(tmp_path / name))

    home("one", 1, "key1")
    first = s3_clients.clients_of("b", S3Options())
    assert s3_clients.clients_of("b", S3Options()) is first
    assert (first.endpoint, first.secrets[0]) == ("http://127.0.0.1:1", "key1")
    number, key = (
        (22 if change == "config" else 1),
        ("key22" if change == "credentials" else "key1"),
    )
    home("two" if change == "home" else "one", number, key)
    second = s3_clients.clients_of("b", S3Options())
    assert second is not first
    assert (second.endpoint, second.secrets[0]) == (f"http://127.0.0.1:{number}", key)


def test_when_credentials_end_does_not_make_them_others(monkeypatch: pytest.MonkeyPatch) -> None:
    used = s3_clients.clients_of("b", options())
    later = dict(used.credential or {}, expires_at=datetime.now(UTC))
    monkeypatch.setattr(s3_clients, "_connect", lambda *_: replace(used, credential=later))
    assert s3_clients.renewed("b", options(), used) is None


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

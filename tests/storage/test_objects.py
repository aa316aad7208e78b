"""S3: the storage suite through both libraries, keys, settings and what is sent."""

from __future__ import annotations

import mmap

import pytest
from services.proxy import S3Proxy
from services.s3_stores import identity_of, open_s3
from services.seaweed import S3Service
from services.storage_suite import StorageSuite, keys

from ucpstore.errors import StorageError
from ucpstore.storage import read_into
from ucpstore.storage.objects import S3Storage

pytestmark = pytest.mark.usefixtures("no_aws_settings", "engine")


class TestS3Storage(StorageSuite):
    """With an identity for which the server does not make buckets on its own."""

    keeps_folders = True

    @pytest.fixture(autouse=True)
    def engine(self) -> str:
        return "obstore"

    @pytest.fixture
    def storage(self, s3: S3Service, prefix: str, engine: str) -> S3Storage:
        return open_s3(prefix, {"engine": engine, **s3.options(identity_of(s3))})


class TestS3fsStorage(TestS3Storage):
    """The same through s3fs."""

    @pytest.fixture(autouse=True)
    def engine(self) -> str:
        return "s3fs"


def test_a_whole_bucket(s3: S3Service, s3_bucket: str) -> None:
    """The empty prefix, and the identity that may do everything."""
    storage = open_s3(f"s3://{s3_bucket}/", s3.options("admin"))
    storage.check_writable()
    storage.put("a/k", b"1")
    storage.put_if_absent("k", b"2")
    assert keys(storage) == ["a/k", "k"]
    assert storage.folders("") == ("a",)
    storage.copy("a/k", "b/k")
    storage.delete_tree("a/")
    assert keys(storage) == ["b/k", "k"]


def test_url_forms_are_one_place(s3: S3Service, prefix: str) -> None:
    open_s3(prefix, s3.options()).put("k", b"1")
    bucket, name = prefix.removeprefix("s3://").split("/")
    for url in (f"{prefix}/", f"s3://{bucket}//{name}", f"S3://{bucket}/{name}//"):
        assert open_s3(url, s3.options()).get("k") == b"1"
    assert open_s3(f"s3://{bucket}", s3.options()).get(f"{name}/k") == b"1"


def test_prefixes_match_whole_segments(s3: S3Service, prefix: str) -> None:
    open_s3(f"{prefix}/run", s3.options()).put("k", b"")
    open_s3(f"{prefix}/run2", s3.options()).put("k", b"")
    open_s3(f"{prefix}/a b%41", s3.options()).put("k%2F", b"")
    assert keys(open_s3(f"{prefix}/run", s3.options())) == ["k"]
    assert keys(open_s3(f"{prefix}/a b%41", s3.options())) == ["k%2F"]
    assert open_s3(prefix, s3.options()).folders("") == ("a b%41", "run", "run2")


def test_s3fs_sees_the_same_keys(s3: S3Service, prefix: str) -> None:
    import botocore.session

    open_s3(prefix, s3.options()).put("a%2Fb/c d", b"1")
    key, secret = s3.identities["admin"]
    client = botocore.session.Session().create_client(
        "s3", "us-east-1", endpoint_url=s3.endpoint, aws_access_key_id=key,
        aws_secret_access_key=secret,
    )  # fmt: skip
    bucket, name = prefix.removeprefix("s3://").split("/")
    found = client.list_objects_v2(Bucket=bucket, Prefix=name)["Contents"]
    assert [each["Key"] for each in found] == [f"{name}/a%2Fb/c d"]
    client.close()


def test_environment_settings(s3: S3Service, prefix: str, monkeypatch: pytest.MonkeyPatch) -> None:
    for name, value in s3.environment().items():
        monkeypatch.setenv(name, value)
    open_s3(prefix, {}).put("k", b"1")
    monkeypatch.setenv("AWS_ENDPOINT_URL_S3", "http://127.0.0.1:1")
    monkeypatch.setenv("AWS_ACCESS_KEY_ID", "other")
    monkeypatch.setenv("AWS_SESSION_TOKEN", "other")
    assert open_s3(prefix, s3.options()).get("k") == b"1"


def test_explicit_keys_are_sent_without_the_environments_token(
    s3: S3Service, prefix: str, proxy: S3Proxy, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("AWS_SESSION_TOKEN", "other")
    open_s3(prefix, s3.options(endpoint=proxy.endpoint)).put("k", b"1")
    assert "x-amz-security-token" not in {name.lower() for name in proxy.headers[-1]}
    assert "authorization" in {name.lower() for name in proxy.headers[-1]}


def test_anonymous_requests_are_not_signed(
    s3: S3Service, prefix: str, proxy: S3Proxy, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("AWS_ACCESS_KEY_ID", "k")
    monkeypatch.setenv("AWS_SECRET_ACCESS_KEY", "s")
    storage = open_s3(prefix, {"anon": True, "endpoint_url": proxy.endpoint})
    with pytest.raises(StorageError, match="access denied"):
        storage.get("k")
    assert "authorization" not in {name.lower() for name in proxy.headers[-1]}


# -- requests -------------------------------------------------------------------------------------


def test_every_call_is_one_request(s3: S3Service, prefix: str, proxy: S3Proxy) -> None:
    storage = open_s3(prefix, s3.options(endpoint=proxy.endpoint))
    data = bytes(range(256)) * 4096 * 12  # above the size at which others split uploads
    storage.put("big", data)
    assert [(each.method, each.received) for each in proxy.log] == [("PUT", 12 * 1024 * 1024)]
    out = bytearray(1000)
    for call, expected in (
        (lambda: read_into(storage, "big", 5, memoryview(out)), ("GET", 1000)),
        (lambda: storage.size("big"), ("HEAD", 0)),
        (lambda: storage.put_if_absent("k", b"1"), ("PUT", 0)),
        (lambda: storage.get("k"), ("GET", 1)),
        (lambda: storage.sync("a/"), None),
    ):
        proxy.log.clear()
        call()
        shown = [(each.method, each.sent) for each in proxy.log]
        assert shown == ([] if expected is None else [expected])
    assert out == data[5:1005]
    for call, method in (
        (lambda: storage.copy("big", "big2"), "PUT"),
        (lambda: list(storage.list("")), "GET"),
        (lambda: storage.folders(""), "GET"),
        (lambda: storage.delete(["big", "big2", "k"]), "POST"),
    ):
        proxy.log.clear()
        call()
        assert [each.method for each in proxy.log] == [method]
    proxy.log.clear()
    storage.delete([])
    assert proxy.log == []


def test_more_than_one_request_takes_is_refused_before_it_is_sent(
    s3: S3Service, prefix: str, proxy: S3Proxy
) -> None:
    storage = open_s3(prefix, s3.options(endpoint=proxy.endpoint))
    huge = mmap.mmap(-1, 5 * 1024**3 + 1)  # never touched, so it takes no memory
    with memoryview(huge) as view, pytest.raises(StorageError, match="at most 5368709120"):
        storage.put("k", view)
    huge.close()
    assert proxy.log == []


@pytest.mark.parametrize("there", [True, False])
def test_a_conflict_is_looked_into(s3: S3Service, prefix: str, proxy: S3Proxy, there: bool) -> None:
    """409: another write was under way. It was a put, or a delete after which ours may go."""
    storage = open_s3(prefix, s3.options(endpoint=proxy.endpoint))
    if there:
        storage.put("k", b"other")
    conflict = (409, b"<Error><Code>ConditionalRequestConflict</Code></Error>")
    answers = [conflict]
    proxy.answer(lambda method, path: answers.pop() if method == "PUT" and answers else None)
    if there:
        with pytest.raises(FileExistsError):
            storage.put_if_absent("k", b"mine")
    else:
        storage.put_if_absent("k", b"mine")
    assert storage.get("k") == (b"other" if there else b"mine")


def test_a_server_without_conditional_puts_is_warned_of(
    s3: S3Service, prefix: str, proxy: S3Proxy, monkeypatch: pytest.MonkeyPatch
) -> None:
    storage = open_s3(prefix, s3.options(endpoint=proxy.endpoint))
    real = proxy._forward

    def forward(handler, body):  # type: ignore[no-untyped-def]
        # SeaweedFS does not mind that a signed header is gone only if it is not signed: it is,
        # so put the object by the side door and answer as if this had been a plain put.
        if handler.headers.get("If-None-Match"):
            name = handler.path.split("/", 3)[-1]
            open_s3(prefix, s3.options()).put(name, body)
            return 200, [("ETag", '"x"')], b""
        return real(handler, body)

    monkeypatch.setattr(proxy, "_forward", forward)
    with pytest.warns(UserWarning, match="ignores conditional puts: let only one job"):
        storage.check_writable()
    storage.put_if_absent("k", b"first")
    with pytest.raises(FileExistsError):
        storage.put_if_absent("k", b"second")
    assert storage.get("k") == b"first"
    assert keys(storage) == ["k"]


def test_opening_sends_nothing_and_needs_nothing() -> None:
    storage = open_s3("s3://b/k", {})
    assert storage.url == "s3://b/k"
    assert storage.case_insensitive is False
    storage.close()

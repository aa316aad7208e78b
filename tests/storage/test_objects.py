from __future__ import annotations

import mmap
import secrets
import time

import pytest
from services.forking import in_child
from services.proxy import S3Proxy
from services.seaweed import S3Service
from services.storage_suite import StorageSuite, keys, with_threads

from ucpstore.errors import OutcomeUnknownError, StorageError
from ucpstore.storage import open_storage, read_into
from ucpstore.storage.objects import S3Storage

pytestmark = pytest.mark.usefixtures("no_aws_settings")


@pytest.fixture
def prefix(bucket: str) -> str:
    """The URL of a place in the bucket that no other test uses."""
    return f"s3://{bucket}/{secrets.token_hex(4)}"


ENGINE = ["obstore"]


@pytest.fixture(autouse=True, params=["obstore", "s3fs"])
def engine(request: pytest.FixtureRequest) -> str:
    """Through which library `open_s3` sends: every test here runs with both."""
    ENGINE[0] = request.param
    return ENGINE[0]


def open_s3(url: str, options: dict[str, object]) -> S3Storage:
    storage = open_storage(url, {"engine": ENGINE[0], **options})
    assert isinstance(storage, S3Storage)
    return storage


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


def identity_of(s3: S3Service) -> str:
    return "writer" if "writer" in s3.identities else "admin"


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


def test_a_busy_server_is_asked_again(
    s3: S3Service, prefix: str, proxy: S3Proxy, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("ucpstore.storage.objects.FIRST_WAIT_S", 0.02)
    storage = open_s3(prefix, s3.options(endpoint=proxy.endpoint))
    proxy.busy_first(6)
    storage.put("k", b"1")
    assert storage.get("k") == b"1"
    assert [each.status for each in proxy.requests("PUT")] == [503] * 6 + [200]


def test_a_share_of_busy_answers_is_survived(s3: S3Service, prefix: str, proxy: S3Proxy) -> None:
    storage = open_s3(prefix, s3.options(endpoint=proxy.endpoint))
    proxy.busy_share(0.3)
    with_threads(4, lambda me: [storage.put(f"{me}/{i}", b"1") for i in range(10)])
    assert len(keys(storage)) == 40
    assert len([each for each in proxy.log if each.status == 503]) >= 8


def test_a_dropped_answer_to_a_put_is_asked_for_again(
    s3: S3Service, prefix: str, proxy: S3Proxy
) -> None:
    storage = open_s3(prefix, s3.options(endpoint=proxy.endpoint))
    proxy.drop_answer("PUT")
    storage.put("k", b"1")
    assert [each.status for each in proxy.requests("PUT")] == [0, 200]


# -- put if absent --------------------------------------------------------------------------------


def test_a_lost_answer_to_put_if_absent_is_unknown(
    s3: S3Service, prefix: str, proxy: S3Proxy
) -> None:
    storage = open_s3(prefix, s3.options(endpoint=proxy.endpoint))
    proxy.drop_answer("PUT", "commits")
    with pytest.raises(OutcomeUnknownError, match=r"commits/1.*not known: look"):
        storage.put_if_absent("commits/1", b"mine")
    assert proxy.count("PUT") == 1
    assert storage.get("commits/1") == b"mine"


def test_a_busy_answer_to_put_if_absent_is_asked_again(
    s3: S3Service, prefix: str, proxy: S3Proxy, monkeypatch: pytest.MonkeyPatch
) -> None:
    """503 SlowDown: the server did nothing, so the second try cannot meet the first."""
    monkeypatch.setattr("ucpstore.storage.objects.FIRST_WAIT_S", 0.01)
    storage = open_s3(prefix, s3.options(endpoint=proxy.endpoint))
    proxy.busy_first(6)
    storage.put_if_absent("commits/1", b"mine")
    assert [each.status for each in proxy.requests("PUT")] == [503] * 6 + [200]
    with pytest.raises(FileExistsError):
        storage.put_if_absent("commits/1", b"other")
    assert storage.get("commits/1") == b"mine"


def test_put_if_absent_gives_up_on_a_busy_server_and_is_certain(
    s3: S3Service, prefix: str, proxy: S3Proxy, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("ucpstore.storage.s3_clients.RETRY_TIMEOUT_S", 2.0)
    storage = open_s3(prefix, s3.options(endpoint=proxy.endpoint))
    proxy.busy_share(1.0)
    with pytest.raises(StorageError, match="too busy") as caught:
        storage.put_if_absent("commits/1", b"mine")
    assert not isinstance(caught.value, OutcomeUnknownError)
    assert proxy.count("PUT") > 1


@pytest.mark.parametrize("kept", [True, False])
def test_an_inner_error_leaves_put_if_absent_unknown_where_something_is_there(
    s3: S3Service, prefix: str, proxy: S3Proxy, monkeypatch: pytest.MonkeyPatch, kept: bool
) -> None:
    """500: the first try has ended, but may have been kept, so a 412 may speak of itself."""
    monkeypatch.setattr("ucpstore.storage.objects.FIRST_WAIT_S", 0.01)
    storage = open_s3(prefix, s3.options(endpoint=proxy.endpoint))
    left = [(500, b"<Error><Code>InternalError</Code></Error>")]

    def answer(method: str, path: str) -> tuple[int, bytes] | None:
        if method == "PUT" and left:
            if kept:
                open_s3(prefix, s3.options()).put("commits/1", b"mine")
            return left.pop()
        return None

    proxy.answer(answer)
    if kept:
        with pytest.raises(OutcomeUnknownError, match=r"first answered 500.*look"):
            storage.put_if_absent("commits/1", b"mine")
    else:
        storage.put_if_absent("commits/1", b"mine")
    assert storage.get("commits/1") == b"mine"


@pytest.mark.parametrize("status", [502, 504])
def test_an_answer_of_a_gateway_to_put_if_absent_is_unknown(
    s3: S3Service, prefix: str, proxy: S3Proxy, status: int
) -> None:
    storage = open_s3(prefix, s3.options(endpoint=proxy.endpoint))
    proxy.answer(lambda method, path: (status, b"") if method == "PUT" else None)
    with pytest.raises(OutcomeUnknownError, match="not known: look"):
        storage.put_if_absent("commits/1", b"mine")
    assert proxy.count("PUT") == 1


def test_a_put_if_absent_that_never_left_is_certain(prefix: str) -> None:
    storage = open_s3(prefix, {"key": "k", "secret": "s", "endpoint_url": "http://127.0.0.1:1"})
    with pytest.raises(StorageError) as caught:
        storage.put_if_absent("k", b"1")
    assert not isinstance(caught.value, OutcomeUnknownError)


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


# -- what can be wrong ----------------------------------------------------------------------------


def check_says(storage: S3Storage, words: str, *, secret: str = "never-shown") -> None:
    """Each of the first calls that a job makes fails with `words`, soon and without a secret."""
    for call in (storage.check_writable, lambda: list(storage.list("commits/"))):
        began = time.monotonic()
        with pytest.raises(StorageError, match=words) as caught:
            call()
        assert time.monotonic() - began < 30
        assert caught.value.__context__ is None
        assert secret not in str(caught.value)


@pytest.mark.parametrize("identity", ["admin", "writer"])
def test_a_missing_bucket_is_refused_and_not_made(s3: S3Service, identity: str) -> None:
    for _ in range(2):
        storage = open_s3("s3://no-such-bucket/run", s3.options(identity))
        check_says(storage, "bucket 'no-such-bucket' does not exist at http.*create it first")
    with pytest.raises(StorageError, match="does not exist"):
        storage.get("k")


def test_an_unknown_key(s3: S3Service, prefix: str) -> None:
    options = {**s3.options(), "key": "AKIANOBODY"}
    secret = str(options["secret"])
    check_says(open_s3(prefix, options), "does not know the access key", secret=secret)


def test_a_wrong_secret(s3: S3Service, prefix: str) -> None:
    options = {**s3.options(), "secret": "wrong-secret"}
    check_says(open_s3(prefix, options), "secret does not belong to", secret="wrong-secret")


def test_no_credentials(prefix: str, s3: S3Service) -> None:
    check_says(open_s3(prefix, {"endpoint_url": s3.endpoint}), "no S3 credentials found")


def test_no_right_to_write(s3: S3Service, prefix: str) -> None:
    open_s3(prefix, s3.options()).put("k", b"1")
    storage = open_s3(prefix, s3.options("reader"))
    assert storage.get("k") == b"1"
    for call in (
        storage.check_writable,
        lambda: storage.put("k2", b""),
        lambda: storage.put_if_absent("k3", b""),
        lambda: storage.delete(["k"]),
        lambda: storage.copy("k", "k4"),
    ):
        with pytest.raises(StorageError, match="access denied") as caught:
            call()
        assert not isinstance(caught.value, OutcomeUnknownError)
    assert storage.get("k") == b"1"


def test_no_right_to_list(s3: S3Service, prefix: str) -> None:
    open_s3(prefix, s3.options()).put("k", b"1")
    storage = open_s3(prefix, s3.options("getter"))
    assert storage.get("k") == b"1"
    assert storage.size("k") == 1
    with pytest.raises(StorageError, match=r"cannot list .*access denied"):
        keys(storage)


@pytest.mark.parametrize(
    ("endpoint", "words"),
    [
        ("http://127.0.0.1:1", "nothing answers at http://127.0.0.1:1"),
        ("http://no-such-host.invalid", "the host of http://no-such-host.invalid is not known"),
    ],
)
def test_nothing_answers(
    prefix: str, endpoint: str, words: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("ucpstore.storage.s3_clients.FIRST_RETRY_TIMEOUT_S", 3.0)
    storage = open_s3(prefix, {"key": "k", "secret": "never-shown", "endpoint_url": endpoint})
    began = time.monotonic()
    with pytest.raises(StorageError, match=words) as caught:
        storage.check_writable()
    assert time.monotonic() - began < 30
    assert "never-shown" not in str(caught.value)


def test_a_permanently_busy_server_fails_within_the_limit(
    s3: S3Service, prefix: str, proxy: S3Proxy, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("ucpstore.storage.s3_clients.RETRY_TIMEOUT_S", 0.5)
    storage = open_s3(prefix, s3.options(endpoint=proxy.endpoint))
    storage.put("k", b"")
    proxy.busy_share(1.0)
    proxy.log.clear()
    with pytest.raises(StorageError, match="too busy"):
        storage.put("k", b"")
    # Counted, since a stalled machine makes any time long: waits are 0.075 s at least. The limit
    # on the number of tries alone would allow 13.
    assert 2 <= len(proxy.log) <= 8


EXPIRED = (
    400,
    b"<Error><Code>ExpiredToken</Code><Message>The provided token has expired.</Message>"
    b"<Token-0>the-old-token</Token-0></Error>",
)


def test_an_expired_token_is_said_to_be_expired(s3: S3Service, prefix: str, proxy: S3Proxy) -> None:
    options = s3.options(endpoint=proxy.endpoint)
    storage = open_s3(prefix, options)
    storage.put("k", b"")
    proxy.answer(lambda method, path: EXPIRED)
    check_says(storage, "session token has expired", secret="the-old-token")
    with pytest.raises(StorageError, match="expired"):
        storage.put("k", b"")
    with pytest.raises(StorageError, match="expired") as caught:
        storage.put_if_absent("k", b"")
    assert not isinstance(caught.value, OutcomeUnknownError)


def test_renewed_credentials_of_the_environment_are_used(
    s3: S3Service, prefix: str, proxy: S3Proxy, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name, value in s3.environment("admin").items():
        monkeypatch.setenv(name, value)
    monkeypatch.setenv("AWS_ENDPOINT_URL", proxy.endpoint)
    storage = open_s3(prefix, {})
    storage.put("k", b"1")
    old = s3.identities["admin"][0]
    for name, value in s3.environment("writer").items():
        monkeypatch.setenv(name, value)
    monkeypatch.setenv("AWS_ENDPOINT_URL", proxy.endpoint)
    real = proxy._forward

    def forward(handler, body):  # type: ignore[no-untyped-def]
        if old in handler.headers["Authorization"]:
            return EXPIRED[0], [], EXPIRED[1]
        return real(handler, body)

    monkeypatch.setattr(proxy, "_forward", forward)
    storage.put_if_absent("k2", b"2")
    assert storage.get("k2") == b"2"
    assert [each.status for each in proxy.requests("PUT", "k2")] == [400, 200]


def test_another_region(s3: S3Service, prefix: str, proxy: S3Proxy) -> None:
    storage = open_s3(prefix, s3.options(endpoint=proxy.endpoint))
    proxy.answer(
        lambda method, path: (400, b"<Error><Code>AuthorizationHeaderMalformed</Code></Error>")
    )
    check_says(storage, "another region.*AWS_REGION")


def test_an_unknown_answer_is_shown_without_secrets(
    s3: S3Service, prefix: str, proxy: S3Proxy
) -> None:
    options = s3.options(endpoint=proxy.endpoint)
    secret = str(options["secret"])
    storage = open_s3(prefix, options)
    body = f"<Error><Code>Odd</Code><Message>bad {secret}</Message></Error>".encode()
    proxy.answer(lambda method, path: (400, body))
    check_says(storage, r"answered Odd: bad \*\*\*", secret=secret)


# -- processes ------------------------------------------------------------------------------------


def test_a_forked_child_can_go_on(s3: S3Service, prefix: str) -> None:
    """obstore's threads do not survive a fork: without care the child would wait for ever."""
    storage = open_s3(prefix, s3.options())
    storage.put("k", b"from the parent")

    def go_on() -> None:
        assert storage.get("k") == b"from the parent"
        storage.put("child", b"1")
        storage.put_if_absent("once", b"child")
        with pytest.raises(FileExistsError):
            storage.put_if_absent("once", b"again")

    assert in_child(go_on) == 0
    assert storage.get("child") == b"1"
    assert storage.get("once") == b"child"


def test_opening_sends_nothing_and_needs_nothing() -> None:
    storage = open_s3("s3://b/k", {})
    assert storage.url == "s3://b/k"
    assert storage.case_insensitive is False
    storage.close()

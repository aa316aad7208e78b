"""Requests to S3 that fail: sent again or not, and what is said of them."""

from __future__ import annotations

import time

import pytest
from services.forking import in_child
from services.proxy import S3Proxy
from services.s3_stores import open_s3
from services.seaweed import S3Service
from services.storage_suite import keys, with_threads

from ucpstore.errors import OutcomeUnknownError, StorageError
from ucpstore.storage.objects import S3Storage

pytestmark = pytest.mark.usefixtures("no_aws_settings", "engine")


def test_a_busy_server_is_asked_again(
    s3: S3Service, prefix: str, proxy: S3Proxy, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("ucpstore.storage.s3_calls.FIRST_WAIT_S", 0.02)
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
    monkeypatch.setattr("ucpstore.storage.s3_calls.FIRST_WAIT_S", 0.01)
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
    monkeypatch.setattr("ucpstore.storage.s3_calls.FIRST_WAIT_S", 0.01)
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

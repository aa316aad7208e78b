import pytest
from services.proxy import S3Proxy
from services.seaweed import S3Service

from ucpstore.errors import StorageError
from ucpstore.storage import Storage, open_storage, read_into


@pytest.fixture
def storage(s3: S3Service, proxy: S3Proxy, bucket: str) -> Storage:
    return open_storage(f"s3://{bucket}/proxy", s3.options(endpoint=proxy.endpoint))


def test_requests_are_forwarded_signed_with_their_host(storage: Storage, proxy: S3Proxy) -> None:
    storage.put("a b%41/k", b"12345")
    assert storage.get("a b%41/k") == b"12345"
    assert {each["host"] for each in proxy.headers} == {proxy.endpoint.removeprefix("http://")}
    assert all("SignedHeaders=host" in each["authorization"] for each in proxy.headers)


def test_it_counts_requests_and_bytes(storage: Storage, proxy: S3Proxy, bucket: str) -> None:
    storage.put("count/k", b"12345")
    read_into(storage, "count/k", 1, memoryview(bytearray(3)))
    storage.size("count/k")
    with pytest.raises(FileNotFoundError):
        storage.get("count/absent")
    assert [(each.method, each.path, each.status) for each in proxy.log] == [
        ("PUT", f"/{bucket}/proxy/count/k", 200),
        ("GET", f"/{bucket}/proxy/count/k", 206),
        ("HEAD", f"/{bucket}/proxy/count/k", 200),
        ("GET", f"/{bucket}/proxy/count/absent", 404),
    ]
    assert proxy.count("GET") == 2
    assert proxy.bytes_sent("GET", "count/k") == 3
    assert proxy.bytes_sent("HEAD") == 0
    assert proxy.requests("PUT")[0].received == 5


def test_it_answers_itself(storage: Storage, proxy: S3Proxy) -> None:
    proxy.answer(lambda method, path: (403, b"<Error><Code>AccessDenied</Code></Error>"))
    with pytest.raises(StorageError, match="access denied"):
        storage.get("k")
    proxy.heal()
    with pytest.raises(FileNotFoundError):
        storage.get("k")


def test_it_drops_one_answer_after_forwarding(storage: Storage, proxy: S3Proxy) -> None:
    storage.put("drop/first", b"")
    proxy.drop_answer("PUT", "drop/k")
    with pytest.raises(StorageError):
        storage.put_if_absent("drop/k", b"1")
    assert proxy.requests("PUT", "drop/k")[0].status == 0
    proxy.heal()
    assert storage.get("drop/k") == b"1"

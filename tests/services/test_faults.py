import time

import pytest
from services.faults import FaultyStorage, Operation
from services.storage_suite import StorageSuite

from ucpstore.errors import OutcomeUnknownError, StorageError
from ucpstore.storage import read_into
from ucpstore.storage.memory import MemoryStorage


@pytest.fixture
def storage() -> FaultyStorage:
    return FaultyStorage(MemoryStorage())


class TestFaultyStorage(StorageSuite):
    """Told nothing, it is a storage like any other."""

    @pytest.fixture
    def storage(self) -> FaultyStorage:
        return FaultyStorage(MemoryStorage())


def test_it_records_operations_and_bytes(storage: FaultyStorage) -> None:
    storage.put("a/1", b"123")
    storage.put("b/1", b"12")
    assert storage.get("a/1") == b"123"
    read_into(storage, "a/1", 1, memoryview(bytearray(2)))
    storage.delete(["a/1", "b/1"])
    assert storage.log == [
        Operation("put", "a/1", 3),
        Operation("put", "b/1", 2),
        Operation("get", "a/1", 3),
        Operation("read_into", "a/1", 2),
        Operation("delete", "a/1"),
        Operation("delete", "b/1"),
    ]
    assert storage.count("put") == 2
    assert storage.bytes("put") == 5
    assert storage.bytes("put", "a/") == 3
    assert storage.keys("delete") == ["a/1", "b/1"]


def test_it_fails_the_nth_operation_once(storage: FaultyStorage) -> None:
    storage.fail_at(2, {"put"})
    storage.put("1", b"")
    with pytest.raises(StorageError, match="injected: cannot put 2") as caught:
        storage.put("2", b"")
    assert caught.value.errno is not None
    storage.put("3", b"")
    assert sorted(entry.key for entry in storage.inner.list("")) == ["1", "3"]
    storage.fail_at(1, {"get"}, KeyboardInterrupt())
    with pytest.raises(KeyboardInterrupt):
        storage.get("1")
    storage.fail_when(lambda operation: "secret" in operation.key)
    storage.put("plain", b"")
    for _ in range(2):
        with pytest.raises(StorageError):
            storage.put("secret", b"")
    storage.heal()
    storage.put("secret", b"")


@pytest.mark.parametrize("applied", [True, False])
def test_it_loses_an_answer(storage: FaultyStorage, applied: bool) -> None:
    storage.lose_answer("commits", applied=applied)
    storage.put_if_absent("other", b"1")
    with pytest.raises(OutcomeUnknownError):
        storage.put_if_absent("commits/1", b"1")
    if applied:
        assert storage.get("commits/1") == b"1"
    else:
        storage.put_if_absent("commits/1", b"2")


def test_it_slows_down(storage: FaultyStorage) -> None:
    storage.delay_s = 0.05
    began = time.monotonic()
    storage.put("k", b"")
    assert time.monotonic() - began >= 0.05

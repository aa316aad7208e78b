"""Every kind of store behaves alike, and a store whose host is gone says so."""

from __future__ import annotations

import datetime
from collections.abc import Iterator
from pathlib import Path

import pytest
from torch.distributed import FileStore, HashStore, TCPStore

from ucpstore.agree.keyvalue import PART_BYTES, C10dStore, DictStore, KeyValue, StoreGoneError

LIMIT = datetime.timedelta(seconds=20)


@pytest.fixture(params=["dict", "tcp", "hash", "file"])
def store(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[KeyValue]:
    if request.param == "dict":
        yield DictStore()
    elif request.param == "tcp":
        host = TCPStore("127.0.0.1", 0, 1, True, LIMIT)
        yield C10dStore(host, "test")
        del host  # a client does not keep its server
    elif request.param == "hash":
        yield C10dStore(HashStore(), "test")
    else:
        yield C10dStore(FileStore(str(tmp_path / "store"), 1), "test")


def test_values_are_set_replaced_and_deleted(store: KeyValue) -> None:
    assert store.get("a") is None
    store.set("a", b"R\x00\xff\n")
    store.set("b", b"R")
    assert store.get("a") == b"R\x00\xff\n"
    assert store.get_many(["b", "a"]) == [b"R", b"R\x00\xff\n"]
    store.set("a", b"Rnew")
    assert store.get("a") == b"Rnew"
    store.delete(["a", "never there"])
    assert store.get("a") is None


def test_looking_for_a_key_does_not_make_it(store: KeyValue) -> None:
    assert store.get("a") is None
    assert store.get("a") is None
    assert store.add("a", 2) == 2
    assert store.add("a", 1 << 33) == 2 + (1 << 33)
    assert int(store.get("a") or 0) == 2 + (1 << 33)


def test_many_values_are_read_at_once(store: KeyValue) -> None:
    names = [f"k{number}" for number in range(150)]
    for name in names:
        store.set(name, b"R" + name.encode())
    assert store.get_many(names) == [b"R" + name.encode() for name in names]


def test_a_value_of_the_largest_size_is_kept(store: KeyValue) -> None:
    value = b"R" * (PART_BYTES + 1)  # a part and its first letter
    store.set("a", value)
    assert store.get("a") == value


def test_a_store_whose_host_is_gone_is_told() -> None:
    host = TCPStore("127.0.0.1", 0, 1, True, LIMIT)
    store = C10dStore(host, "test")
    store.set("a", b"R")
    del host
    with pytest.raises(StoreGoneError):
        for _ in range(100):
            store.add("b", 1)

import pytest
from services.storage_suite import StorageSuite

from ucpstore.storage.memory import MemoryStorage


class TestMemoryStorage(StorageSuite):
    @pytest.fixture
    def storage(self) -> MemoryStorage:
        return MemoryStorage()


def test_named_storages_are_shared() -> None:
    MemoryStorage.named("test-shared").put("k", b"1")
    assert MemoryStorage.named("test-shared").get("k") == b"1"
    assert MemoryStorage.named("test-other") is not MemoryStorage.named("test-shared")

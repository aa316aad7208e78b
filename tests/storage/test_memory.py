import pytest
from services.storage_suite import StorageSuite

from ucpstore.storage.memory import MemoryStorage


class TestMemoryStorage(StorageSuite):
    @pytest.fixture
    def storage(self) -> MemoryStorage:
        return MemoryStorage()

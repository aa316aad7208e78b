from __future__ import annotations

from pathlib import Path

import pytest
from manage.samples import copy_store, make_store


@pytest.fixture(scope="session")
def made(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The store of this session; not to be changed."""
    folder = tmp_path_factory.mktemp("made") / "store"
    make_store(folder)
    return folder


@pytest.fixture
def store(made: Path, tmp_path: Path) -> Path:
    """A store of the test's own."""
    return copy_store(made, tmp_path / "store")

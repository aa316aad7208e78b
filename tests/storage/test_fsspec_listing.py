"""Listings through fsspec: when objects were written, and folders that cannot be read."""

from __future__ import annotations

from datetime import UTC, datetime
from pathlib import Path

import pytest
from fsspec.implementations.local import LocalFileSystem
from services.fsspec_stores import open_fsspec
from services.storage_suite import keys

from ucpstore.errors import StorageError
from ucpstore.storage.fsspec_listing import _modified

WRITTEN_S = 1_750_000_000.0


@pytest.mark.parametrize(
    "info",
    [
        {"mtime": WRITTEN_S},
        {"mtime": None, "created": int(WRITTEN_S)},
        {"LastModified": datetime.fromtimestamp(WRITTEN_S, UTC)},
        {"updated": datetime.fromtimestamp(WRITTEN_S, UTC).isoformat()},
        {"modify": "long ago", "created": WRITTEN_S},
    ],
)
def test_when_an_object_was_written(info: dict[str, object]) -> None:
    assert _modified(info) == WRITTEN_S


def test_a_folder_that_cannot_be_read_is_not_left_out(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    storage = open_fsspec(f"local://{tmp_path}/run")
    storage.put("a/open", b"")
    storage.put("a/closed/k", b"")
    assert keys(storage) == ["a/closed/k", "a/open"]
    real = LocalFileSystem.ls

    def ls(self: LocalFileSystem, path: str, detail: bool = False, **how: object) -> object:
        if path.endswith("closed"):
            raise PermissionError(path)
        return real(self, path, detail, **how)

    monkeypatch.setattr(LocalFileSystem, "ls", ls)
    with pytest.raises(StorageError, match="cannot list"):
        keys(storage)

"""Storages on the S3 server of the tests, through either library."""

from __future__ import annotations

from services.seaweed import S3Service

from ucpstore.storage import open_storage
from ucpstore.storage.objects import S3Storage

ENGINE = ["obstore"]
"""Through which library `open_s3` sends; a test's fixture sets it."""


def open_s3(url: str, options: dict[str, object]) -> S3Storage:
    storage = open_storage(url, {"engine": ENGINE[0], **options})
    assert isinstance(storage, S3Storage)
    return storage


def identity_of(s3: S3Service) -> str:
    return "writer" if "writer" in s3.identities else "admin"

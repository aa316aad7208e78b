"""Bytes by key, in a folder or a bucket; only this package knows obstore, fsspec and s3fs."""

from ucpstore.storage.base import Buffer, Entry, Fill, Storage, read_into
from ucpstore.storage.urls import open_storage

__all__ = ["Buffer", "Entry", "Fill", "Storage", "open_storage", "read_into"]

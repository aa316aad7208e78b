"""Bytes by key, in a folder or a bucket; only this package knows obstore, fsspec and s3fs."""

from ucpstore.storage.base import Buffer, Entry, Storage
from ucpstore.storage.urls import open_storage

__all__ = ["Buffer", "Entry", "Storage", "open_storage"]

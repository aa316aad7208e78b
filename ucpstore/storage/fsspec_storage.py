"""Any place that fsspec has a protocol for.

fsspec's file systems differ in what they promise. Used here is what all of them have: whole objects
in and out, listings, deletions. What a place lacks, exclusive creation above all, is found by
trying before the first write, and said in a warning.
"""

from __future__ import annotations

import warnings
from collections.abc import Iterable, Iterator, Mapping
from contextlib import AbstractContextManager, nullcontext
from functools import partial

from ucpstore.errors import CorruptError
from ucpstore.storage import fsspec_listing
from ucpstore.storage.base import (
    ROUND_TRIP_BYTES,
    ROUND_TRIP_REQUESTS,
    Buffer,
    Entry,
    Fill,
    byte_view,
    check_key,
    check_prefix,
)
from ucpstore.storage.fsspec_calls import ABSENT, FsspecCalls, Here, is_folder
from ucpstore.storage.fsspec_places import Place, open_place
from ucpstore.storage.fsspec_writing import Writer


class FsspecStorage:
    """Objects below the path of a URL."""

    def __init__(self, place: Place) -> None:
        self._place = place
        self._calls = FsspecCalls(place)
        self._writer = Writer(place, self._calls)
        self._checked = False

    @classmethod
    def from_url(cls, url: str, options: Mapping[str, object]) -> FsspecStorage:
        """From any URL that fsspec knows, chained ones too; chained ones are for reading."""
        return cls(open_place(url.rstrip("/") if not url.endswith("://") else url, options))

    def __repr__(self) -> str:
        return f"FsspecStorage({self.url!r})"

    @property
    def url(self) -> str:
        return self._place.url

    @property
    def one_process(self) -> bool:
        return self._place.protocol == "memory"

    @property
    def read_bytes(self) -> int:
        return ROUND_TRIP_BYTES

    @property
    def requests(self) -> int:
        return ROUND_TRIP_REQUESTS

    @property
    def case_insensitive(self) -> bool:
        return self._writer.case_insensitive

    def put(self, key: str, data: Buffer) -> None:
        self._writer.put(check_key(key), byte_view(data))

    def put_if_absent(self, key: str, data: bytes) -> None:
        self._writer.put_if_absent(check_key(key), bytes(byte_view(data)))

    def get(self, key: str) -> bytes:
        check_key(key)
        return self._calls.read(key, lambda here: bytes(here.fs.cat_file(here.path(key))))

    def reading(self, key: str) -> AbstractContextManager[Fill]:
        return nullcontext(partial(self._fill, key))

    def _fill(self, key: str, start: int, out: memoryview) -> None:
        view = byte_view(out)
        if not view:
            self.size(key)
            return
        check_key(key)
        end = start + len(view)

        def read(here: Here) -> bytes:
            try:
                return bytes(here.fs.cat_file(here.path(key), start=start, end=end))
            except ABSENT:
                raise
            except Exception:
                if self.size(key) >= end:
                    raise
                return b""  # some answer so where the range lies behind the end

        data = self._calls.read(key, read)
        if len(data) != len(view):
            found = min(len(view), max(0, self.size(key) - start))
            raise CorruptError(
                f"{self._calls.where(key)} is too short: expected {len(view)} bytes from byte "
                f"{start} on, found {found}. The object is damaged; load another step"
            )
        view[:] = data

    def size(self, key: str) -> int:
        check_key(key)

        def look(here: Here) -> int:
            info = here.fs.info(here.path(key))
            if is_folder(info):
                raise FileNotFoundError
            if info.get("size") is None:  # a web server that does not say
                return len(here.fs.cat_file(here.path(key)))
            return int(info["size"])

        return self._calls.read(key, look)

    def list(self, prefix: str) -> Iterator[Entry]:
        return fsspec_listing.objects(self._calls, prefix, flat=self._place.flat)

    def folders(self, prefix: str) -> tuple[str, ...]:
        return fsspec_listing.folders(self._calls, prefix)

    def delete(self, keys: Iterable[str]) -> None:
        self._writer.delete([check_key(key) for key in keys])

    def delete_tree(self, prefix: str) -> None:
        if not check_prefix(prefix):
            raise ValueError("the whole storage is not deleted through delete_tree")
        self.delete([entry.key for entry in self.list(prefix)])

    def copy(self, source: str, target: str) -> None:
        if source == target:
            self.size(source)
        else:  # not every protocol can copy, and some change what they copy
            self.put(target, self.get(source))

    def sync(self, prefix: str) -> None:
        check_prefix(prefix)

    def check_writable(self) -> None:
        """Puts a probe, twice if absent; the second must be refused, else a warning is given."""
        if self._checked:
            return
        self._writer.refuse_chain("")
        if not self._writer.creates():
            warnings.warn(
                f"{self.url} cannot create an object only where there is none: let only one job "
                "at a time write to this store",
                stacklevel=2,
            )
        self._checked = True

    def close(self) -> None:
        self._calls.close()

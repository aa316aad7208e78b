"""Check one committed step: its documents against its record, its folder against its documents."""

from __future__ import annotations

import errno
from collections.abc import Callable, Mapping, Sequence
from collections.abc import Set as AbstractSet
from concurrent.futures import ThreadPoolExecutor
from functools import partial

from ucpstore.arrays.metadata import parse, to_bytes
from ucpstore.catalog import StepRef
from ucpstore.errors import CorruptError, FormatError, StorageError
from ucpstore.format import layout
from ucpstore.format.documents import PLAIN, Json, hex8
from ucpstore.format.record import DocumentEntry, arrays_crc32c
from ucpstore.format.step import groups_of, parse_item, parse_step
from ucpstore.manage.findings import Findings
from ucpstore.manage.objects import ObjectRef, check_object, check_tail, objects_of
from ucpstore.options import Options
from ucpstore.staging import pool_for
from ucpstore.storage import Storage

_REMEDY = "restore it from a copy, or use another step"


class StepCheck:
    """The check of one step; used once.

    A document that is damaged says nothing, so what it should name is not looked for, and nothing
    below it is said not to belong.
    """

    def __init__(
        self, storage: Storage, ref: StepRef, findings: Findings, options: Options
    ) -> None:
        self._storage = storage
        self._ref = ref
        self._findings = findings
        self._pool = pool_for(options.budget_bytes)
        self._threads = options.threads or storage.requests
        self._stop = False
        self._arrays: dict[str, dict[str, Json]] = {}
        self._items: set[str] = set()
        self._unknown: set[str] = set()  # folders whose contents cannot be known
        self._root_known = False

    def run(self, *, data: bool) -> None:
        """Check everything, with `data` every byte of every object too."""
        self._findings.progress.phase("documents", step=self._ref.record.step)
        listed = {
            entry.key.removeprefix(f"{self._ref.path}/"): entry.size
            for entry in self._storage.list(f"{self._ref.path}/")
        }
        self._read_documents(listed)
        objects = self._objects()
        documents = self._documents()
        present = self._compare(listed, documents.keys(), objects)
        if not data:
            present = [(each, size) for each, size in present if each.metadata.codec is not None]
        tasks: list[Callable[[], None]] = [
            partial(self._check_document, path, expected)
            for path, expected in documents.items()
            if path in listed and expected is not None
        ]
        tasks += [partial(self._check_data, each, size, data) for each, size in present]
        self._findings.progress.phase(
            "objects",
            total_bytes=sum(size for _, size in present) if data else 0,
            total_objects=len(tasks),
        )
        self._run(tasks)

    # -- documents -------------------------------------------------------------------------------

    def _read_documents(self, listed: Mapping[str, int]) -> None:
        """Read the documents that the record names, to know the metadata of all arrays."""
        whole = True
        for entry in self._ref.record.documents:
            item = entry.path.removesuffix(layout.DOCUMENT).rstrip("/")
            self._items.add(item)
            self._findings.documents += 1
            # A missing one is told with everything else that the listing lacks.
            if entry.path not in listed or not self._read_document(entry, item):
                self._unknown.add(item)
                whole = False
        self._root_known = "" in self._items - self._unknown
        if whole:
            self._check_arrays()

    def _read_document(self, entry: DocumentEntry, item: str) -> bool:
        key = self._key(entry.path)
        try:
            raw = entry.check(self._storage.get(key))
            if item:
                for path, document in parse_item(raw, key).items():
                    self._arrays[f"{item}/{path}"] = document
            else:
                self._arrays.update(parse_step(raw, key).root_arrays)
        except FileNotFoundError:
            self._findings.problem(key, f"is missing; {_REMEDY}")
        except (CorruptError, FormatError) as error:
            self._findings.problem(key, error, entry.path)
        else:
            return True
        return False

    def _check_arrays(self) -> None:
        """Compare what all arrays together are with the record."""
        record = self._ref.record
        key = layout.commit_key(record.step, record.generation)
        if len(self._arrays) != record.arrays:
            self._findings.problem(
                key,
                f"counts {record.arrays} arrays, but the step's documents name "
                f"{len(self._arrays)}; use another step",
            )
        found = arrays_crc32c((path, to_bytes(each)) for path, each in self._arrays.items())
        if found != record.arrays_crc32c:
            self._findings.problem(
                key,
                f"the metadata of all arrays should have the checksum {hex8(record.arrays_crc32c)}"
                f", found {hex8(found)}; use another step",
            )

    def _documents(self) -> dict[str, bytes | None]:
        """Every document of the step by its path, with its bytes; None where they were checked."""
        named: dict[str, bytes | None] = {entry.path: None for entry in self._ref.record.documents}
        for path in groups_of(self._arrays):
            named.setdefault(f"{path}/{layout.DOCUMENT}", PLAIN)
        for path, document in self._arrays.items():
            named[f"{path}/{layout.DOCUMENT}"] = to_bytes(document)
        return named

    def _check_document(self, path: str, expected: bytes) -> None:
        key = self._key(path)
        try:
            raw = self._storage.get(key)
        except FileNotFoundError:
            raw = None
        self._findings.document(key, raw, expected)

    # -- objects ---------------------------------------------------------------------------------

    def _objects(self) -> dict[str, ObjectRef]:
        """Every object of the step by its path."""
        found: dict[str, ObjectRef] = {}
        for path, document in self._arrays.items():
            self._findings.arrays += 1
            try:
                metadata = parse(document, path)
            except FormatError as error:
                self._findings.problem(self._key(path), error, path)
                self._unknown.add(path)
                continue
            for each in objects_of(path, metadata):
                found[each.key] = each
                self._findings.objects += 1
                self._findings.bytes += each.size or 0
        return found

    def _compare(
        self,
        listed: Mapping[str, int],
        documents: AbstractSet[str],
        objects: Mapping[str, ObjectRef],
    ) -> list[tuple[ObjectRef, int]]:
        """Compare the listing with what must be there; the objects that may be whole, their sizes.

        An object with a compressor may have any size that its index fits.
        """
        present = []
        for path in documents:
            if path not in listed:
                self._findings.documents += 1
                self._findings.problem(self._key(path), f"is missing; {_REMEDY}")
        for path, each in objects.items():
            size = listed.get(path)
            if size is not None and each.size in (size, None):
                present.append((each, size))
                self._findings.bytes += size if each.size is None else 0
                continue
            found = "is missing" if size is None else f"should have {each.size} bytes, found {size}"
            self._findings.problem(self._key(path), f"{found}; {_REMEDY}")
        for path in listed.keys() - documents - objects.keys():
            if self._known(path):
                self._findings.problem(self._key(path), "does not belong to the step; remove it")
        return present

    def _known(self, path: str) -> bool:
        """Whether the documents that would name an object at this path could all be read."""
        item = path.partition("/")[0]
        if item not in self._items:
            return self._root_known
        return not any(path.startswith(f"{folder}/") for folder in self._unknown)

    def _check_data(self, each: ObjectRef, size: int, whole: bool) -> None:
        """Check every byte of an object that is there; unless `whole`, its index alone."""
        key = self._key(each.key)
        try:
            if whole:
                found = check_object(self._storage, key, each, size, self._pool)
            else:
                found = check_tail(self._storage, key, each, size)
            for error in found:
                self._findings.problem(key, error)
        except FileNotFoundError:
            self._findings.problem(key, f"is missing; {_REMEDY}")
        except CorruptError as error:  # it became shorter since it was listed
            self._findings.problem(key, error)
        except StorageError as error:
            if error.errno != errno.EIO:  # a bad sector is damage of this object alone
                raise
            self._findings.problem(key, error)
        if whole:
            self._findings.read(size)

    def _key(self, path: str) -> str:
        return f"{self._ref.path}/{path}"

    def _run(self, tasks: Sequence[Callable[[], None]]) -> None:
        """Run all, concurrently; the first error that is no damage stops the rest."""
        if not tasks:
            return
        pool = ThreadPoolExecutor(min(self._threads, len(tasks)), "ucpstore-verify")
        try:
            for future in [pool.submit(self._unless_stopped, task) for task in tasks]:
                future.result()
        except BaseException:
            self._stop = True
            raise
        finally:
            pool.shutdown(cancel_futures=True)

    def _unless_stopped(self, task: Callable[[], None]) -> None:
        if not self._stop:
            task()
            self._findings.progress.add(0)

"""What rank 0 does alone: open a save with its mark, and make the step exist, last of all.

The order is what keeps a listed step whole: data, the documents of arrays, groups and items, the
step group, and then the commit record by put-if-absent. Until the record is there no reader sees
anything of it.
"""

from __future__ import annotations

import contextlib
import json
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from datetime import UTC, datetime

import ucpstore
from ucpstore import catalog
from ucpstore.errors import OutcomeUnknownError, StepExistsError, StorageError, UnsupportedError
from ucpstore.format import layout
from ucpstore.format.documents import PLAIN, canonical
from ucpstore.format.marks import WorkMark
from ucpstore.format.paths import find_clash
from ucpstore.format.record import (
    CODECS,
    FEATURES,
    CommitRecord,
    DocumentEntry,
    arrays_crc32c,
)
from ucpstore.format.step import build_item, build_step, groups_of
from ucpstore.options import Options
from ucpstore.saving.bytearrays import bytes_document, bytes_grid, write_bytes
from ucpstore.saving.mark import end, new_mark
from ucpstore.saving.writer import Written
from ucpstore.storage import Storage
from ucpstore.tree import Node, externalize

Raw = bytes  # Outcome has a field named bytes


@dataclass(frozen=True, slots=True)
class Outcome:
    """A committed save: its generation, and the arrays, objects and bytes of all ranks."""

    generation: int
    arrays: int
    objects: int
    bytes: int

    def to_bytes(self) -> Raw:
        return canonical(asdict(self))

    @classmethod
    def from_bytes(cls, data: Raw) -> Outcome:
        return cls(**json.loads(data))


class Commit:
    """One save on rank 0, from its mark to its record."""

    def __init__(
        self,
        storage: Storage,
        mark: WorkMark,
        generation: int,
        older: Sequence[int],
        documents: Mapping[str, bytes],
        tree: Node,
        options: Options,
        *,
        compressed: bool,
    ) -> None:
        self.storage = storage
        self.mark = mark
        self.path = layout.step_path(mark.step, mark.save_id)
        self.generation = generation
        self._older = older
        self._tree, self._leaves = externalize(tree)
        self._documents = dict(documents)
        for path, data in self._leaves.items():
            self._documents[path] = bytes_document(path, bytes_grid(len(data), options))
        self._options = options
        self._compressed = compressed
        self._record_sent = False

    @staticmethod
    def begin(
        storage: Storage,
        step: int,
        *,
        overwrite: bool,
        documents: Mapping[str, bytes],
        tree: Node,
        options: Options,
        compressed: bool,
    ) -> Commit:
        """Refuse what the store or the step forbids, then write the mark.

        `documents` are those of all arrays by path, but for those of large leaves of the tree;
        `compressed` says whether any of them has a compressor.
        Raises StepExistsError where the step is committed and `overwrite` is False.
        """
        older = catalog.generations(storage).get(step, [])
        if older and not overwrite:
            raise StepExistsError(
                f"step {step} is already committed in {storage.url}; save another step, or pass "
                "overwrite=True to replace it once the new one is whole"
            )
        mark = new_mark(step)
        generation = older[-1] + 1 if older else 1
        commit = Commit(
            storage, mark, generation, older, documents, tree, options, compressed=compressed
        )
        commit._check_paths()
        catalog.create_store(storage)
        try:
            storage.put(layout.work_key(mark.save_id), mark.to_bytes())
            storage.sync(layout.WORK_PREFIX)
        except BaseException:
            end(mark)
            commit.clean_up()
            raise
        return commit

    def _check_paths(self) -> None:
        unlike_case = find_clash(self._documents, ignore_case=True)
        if unlike_case is None:
            return  # then they do not clash where case counts either
        clash = find_clash(self._documents)
        if clash is None:
            self.storage.check_writable()
            if self.storage.case_insensitive:
                clash = unlike_case
        if clash is not None:
            raise UnsupportedError(
                f"{clash[0]} and {clash[1]} cannot both be stored in {self.storage.url}: one path "
                "holds the other, or they differ only by case and the file system ignores it; "
                "rename one of them"
            )

    def finish(self, written: Sequence[Written], metadata: Node, array_bytes: int) -> Outcome:
        """Write all documents and the record; `written` is what each rank reports.

        Raises StepExistsError where another job committed this generation first.
        """
        total = sum(written, Written(0, 0, 0))
        for path, data in self._leaves.items():
            grid = bytes_grid(len(data), self._options)
            total += write_bytes(self.storage, self.path, path, data, grid, self._options)
            self._put(path, self._documents[path])
        entries = self._write_groups()
        record = CommitRecord(
            step=self.mark.step,
            generation=self.generation,
            save_id=self.mark.save_id,
            created=datetime.now(UTC).isoformat(timespec="seconds"),
            world_size=len(written),
            writer=f"ucpstore {ucpstore.__version__}",
            arrays=len(self._documents),
            bytes=array_bytes,
            documents=tuple(entries),
            arrays_crc32c=arrays_crc32c(self._documents.items()),
            metadata=metadata,
            features=(*FEATURES, CODECS) if self._compressed else FEATURES,
        )
        self.storage.sync(f"{self.path}/")
        self._put_record(record)
        self._refuse_superseded()
        self._tidy()
        return Outcome(self.generation, len(self._documents), total.objects, total.bytes)

    def _put(self, path: str, document: bytes) -> None:
        self.storage.put(f"{self.path}/{path}/{layout.DOCUMENT}", document)

    def _write_groups(self) -> list[DocumentEntry]:
        """Write the groups of dicts and items, then the step group; their entries in the record."""
        for path in groups_of(self._documents):
            if "/" in path:
                self._put(path, PLAIN)
        items: dict[str, dict[str, bytes]] = {}
        root_arrays = {}
        for path, document in self._documents.items():
            item, _, inner = path.partition("/")
            if inner:
                items.setdefault(item, {})[inner] = document
            else:
                root_arrays[path] = document
        entries = []
        for item in sorted(items):
            raw = build_item(items[item])
            self._put(item, raw)
            entries.append(DocumentEntry.of(f"{item}/{layout.DOCUMENT}", raw))
        raw = build_step(self._tree, root_arrays)
        if catalog.create_certain(self.storage, layout.step_key(self.path), raw) != raw:
            raise StorageError(
                f"the save of step {self.mark.step} to {self.storage.url} took longer than the "
                "age limit of unfinished saves and was pruned; save again"
            )
        return [DocumentEntry.of(layout.DOCUMENT, raw), *entries]

    def _put_record(self, record: CommitRecord) -> None:
        key = layout.commit_key(record.step, record.generation)
        raw = record.to_bytes()
        self._record_sent = True
        try:
            found = catalog.create(self.storage, key, raw)
        except OutcomeUnknownError as error:
            # The put may still be on its way: the data has to stay.
            raise OutcomeUnknownError(
                f"the commit of step {record.step} was sent but not answered: {error}"
            ) from error
        except StorageError:
            self._record_sent = False
            raise
        if found != raw:
            self._record_sent = False
            raise self._lost()

    def _lost(self) -> StepExistsError:
        return StepExistsError(
            f"step {self.mark.step} was committed to {self.storage.url} by another job while this "
            "save ran; its step stands, and this one is not kept"
        )

    def _refuse_superseded(self) -> None:
        """Raise StepExistsError where a newer generation than the one just committed is there.

        Others may have committed this generation, replaced it by the next and removed it while
        this save ran; the number was free again then, but no reader will look at it.
        """
        try:
            newest = catalog.generations(self.storage).get(self.mark.step, [0])[-1]
        except (StorageError, OSError):
            return  # the record is there, which is what was asked for
        if newest > self.generation:
            with contextlib.suppress(StorageError, OSError):
                self.storage.delete([layout.commit_key(self.mark.step, self.generation)])
                self._record_sent = False
            raise self._lost()

    def _tidy(self) -> None:
        """Remove what the new generation replaces, and the mark.

        The step is committed: what fails here is left for a later save or prune, and the mark
        stays to tell of it.
        """
        try:
            if self._older:
                catalog.delete_generations(self.storage, self.mark.step, self._older)
            self.storage.delete([layout.work_key(self.mark.save_id)])
        except (StorageError, OSError):
            pass

    def clean_up(self) -> None:
        """After a failure that all ranks know of: remove what this save wrote, its mark last.

        Keeps everything where the record was sent and may exist.
        """
        if self._record_sent:
            return
        try:
            self.storage.delete_tree(f"{self.path}/")
            self.storage.delete([layout.work_key(self.mark.save_id)])
        except (StorageError, OSError):
            pass

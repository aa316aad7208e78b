"""Prove that committed steps are whole: every document, every object, on request every byte.

The record is checked by its own checksum, the step's documents against the record, everything else
in the step's folder against those documents, from one listing of the folder. Nothing is written.

A chunk's checksum says that its bytes are those that were written, not that they were written
there: whole objects of one array, or of arrays cut alike, that changed places are not found.
"""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import closing, suppress
from dataclasses import dataclass

from ucpstore import catalog
from ucpstore.catalog import StepRef
from ucpstore.errors import CorruptError, FormatError, StepNotFoundError
from ucpstore.format import layout
from ucpstore.format.marks import Tag
from ucpstore.format.record import CommitRecord
from ucpstore.manage.findings import Findings, Problem
from ucpstore.manage.stepcheck import StepCheck
from ucpstore.options import Options
from ucpstore.progress import Progress, ProgressCallback, check_progress
from ucpstore.storage import Storage

_TRIES = 3


@dataclass(frozen=True, slots=True)
class VerifyReport:
    """What was looked at, and what is wrong with it.

    `data` says whether objects were read. `steps` are those that were checked, `too_new` those that
    this version cannot check, by the keys of their records. `documents`, `arrays` and `objects`
    count what was compared; `bytes` is the size of the objects, of which `bytes_read` were compared
    with their checksums.
    """

    url: str
    data: bool
    steps: tuple[int, ...]
    problems: tuple[Problem, ...]
    too_new: tuple[Problem, ...]
    documents: int
    arrays: int
    objects: int
    bytes: int
    bytes_read: int

    @property
    def ok(self) -> bool:
        """Whether nothing is wrong. A step that is too new is not known to be wrong."""
        return not self.problems


def verify(
    storage: Storage,
    step: int | None = None,
    *,
    data: bool = False,
    options: Options | None = None,
    progress: ProgressCallback | None = None,
) -> VerifyReport:
    """Check a step, or all committed steps and all tags where `step` is None.

    Always: the fixed documents of the store, the records, the metadata documents byte for byte,
    presence and size of every object (of compressed ones presence and index), and what does not
    belong. With `data` also every chunk and index against its checksum, within the byte budget of
    `options`. `progress` is told a `ProgressEvent` for each phase and, at most every 0.1 s, in
    between; an error that it raises ends the verification.

    Damage is reported, not raised. Raises StepNotFoundError where there is no store or no such
    step, FormatError where the store or the step asked for is too new, and StorageError.
    """
    with closing(Progress("verify")) as told:
        told.follow(check_progress(progress))
        return _Verifier(storage, data, options or Options.from_environment(), told).run(step)


class _Verifier:
    """One call of `verify`."""

    def __init__(self, storage: Storage, data: bool, options: Options, progress: Progress) -> None:
        self._storage = storage
        self._data = data
        self._options = options
        self._progress = progress
        self._findings = Findings(progress)
        self._too_new: list[Problem] = []

    def run(self, step: int | None) -> VerifyReport:
        number = None if step is None else layout.check_step(step)
        with suppress(CorruptError):  # told among the fixed documents
            catalog.require_store(self._storage)
        found = catalog.generations(self._storage)
        self._progress.phase("records", total_objects=len(found) if number is None else 1)
        self._check_fixed()
        if number is None:
            self._check_names()
            refs = [self._newest(each, found[each]) for each in sorted(found)]
        elif number in found:
            refs = [self._newest(number, found[number], alone=True)]
        else:
            raise StepNotFoundError(catalog.absence(self._storage, number, found))
        findings = self._findings
        whole = [ref for ref in refs if ref is not None]
        checked = [ref.record.step for ref in whole if self._check_step(ref)]
        self._progress.flush()
        if number is not None and whole and not checked:
            raise StepNotFoundError(
                f"step {number} in {self._storage.url} was deleted or overwritten while it was "
                "verified; verify it again"
            )
        return VerifyReport(
            url=self._storage.url,
            data=self._data,
            steps=tuple(checked),
            problems=tuple(sorted(findings.problems)),
            too_new=tuple(self._too_new),
            documents=findings.documents,
            arrays=findings.arrays,
            objects=findings.objects,
            bytes=findings.bytes,
            bytes_read=findings.bytes_read,
        )

    def _check_fixed(self) -> None:
        for key, content in catalog.FIXED_DOCUMENTS.items():
            self._findings.document(key, self._get(key), content)

    def _check_names(self) -> None:
        """Check tags, and that nothing but records lies among the records."""
        for entry in self._storage.list(layout.COMMITS_PREFIX):
            if entry.key != layout.COMMITS_KEY and layout.parse_commit(entry.key) is None:
                self._findings.problem(
                    entry.key, "is not the name of a commit record, so it is not read; remove it"
                )
        for entry in self._storage.list(layout.TAGS_PREFIX):
            if entry.key != layout.TAGS_KEY:
                self._check_tag(entry.key)

    def _check_tag(self, key: str) -> None:
        name = layout.parse_tag(key)
        raw = self._get(key)
        if raw is None:
            return  # removed since it was listed
        self._findings.documents += 1
        try:
            if Tag.from_bytes(raw, key).name != name:
                self._findings.problem(key, "is not the tag of its name; set the tag again")
        except (CorruptError, FormatError) as error:
            self._findings.problem(key, error)

    def _newest(self, step: int, numbers: Sequence[int], *, alone: bool = False) -> StepRef | None:
        """The newest generation of a step, or None where its record is unusable or gone.

        Where a save or a delete was cut short, older generations are there too; of these only the
        record is looked at. Raises StepNotFoundError where the step is gone and the only one.
        """
        for _ in range(_TRIES):
            keys = [layout.commit_key(step, number) for number in numbers]
            found = {key: self._get(key) for key in keys}
            present = {key: raw for key, raw in found.items() if raw is not None}
            if len(present) == len(found):
                break
            # Deleted or overwritten since it was listed: look again.
            numbers = catalog.generations(self._storage).get(step, [])
        if alone and not present:
            raise StepNotFoundError(
                catalog.absence(self._storage, step, catalog.generations(self._storage))
            )
        self._findings.documents += len(present)
        self._progress.add(0)
        refs = [self._record(key, raw, alone) for key, raw in present.items()]
        return refs[-1] if refs else None

    def _record(self, key: str, raw: bytes, alone: bool) -> StepRef | None:
        try:
            return StepRef(CommitRecord.from_bytes(raw, key), raw)
        except CorruptError as error:
            self._findings.problem(key, error)
        except FormatError as error:
            if alone:
                raise
            self._too_new.append(Problem(key, str(error).removeprefix(f"{key} ")))
        return None

    def _check_step(self, ref: StepRef) -> bool:
        """Check a step; False, and no word of problems, where it was deleted meanwhile."""
        problems = self._findings.problems
        before = len(problems)
        StepCheck(self._storage, ref, self._findings, self._options).run(data=self._data)
        if len(problems) > before:
            key = layout.commit_key(ref.record.step, ref.record.generation)
            if self._get(key) != ref.raw:
                del problems[before:]
                return False
        return True

    def _get(self, key: str) -> bytes | None:
        try:
            return self._storage.get(key)
        except FileNotFoundError:
            return None

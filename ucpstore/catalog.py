"""Which steps a store has, and their checked documents.

A step exists when a commit record of it does; its newest generation is the step. Everything else
in a store is either named by such a record or invisible here.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from dataclasses import dataclass

from ucpstore.arrays.metadata import ArrayMetadata
from ucpstore.arrays.packed import ADVICE, decode_chunk, slot_bytes
from ucpstore.errors import (
    CorruptError,
    FormatError,
    OutcomeUnknownError,
    StepNotFoundError,
    StorageError,
)
from ucpstore.format import layout
from ucpstore.format.documents import COMMITS, ROOT, STEPS, TAGS, WORK, Json
from ucpstore.format.marks import refusal
from ucpstore.format.record import CommitRecord, DocumentEntry
from ucpstore.format.step import StepDocument, parse_item, parse_step
from ucpstore.geometry import Grid
from ucpstore.storage import Storage, read_into

FIXED_DOCUMENTS: Mapping[str, bytes] = {
    layout.ROOT_KEY: ROOT,
    layout.COMMITS_KEY: COMMITS,
    layout.STEPS_KEY: STEPS,
    layout.TAGS_KEY: TAGS,
    layout.WORK_KEY: WORK,
}


def generations(storage: Storage) -> dict[int, list[int]]:
    """All committed steps and their generations, each list rising. One listing.

    Where it finds none the root is looked at: FormatError for a place that is no store, or one of
    a newer version. An empty place and a damaged root have no steps.
    """
    found = _listed(storage)
    if not found:
        error = refusal(_root(storage), storage.url)
        if isinstance(error, (StepNotFoundError, FormatError)):
            raise FormatError(str(error))
    return found


def _listed(storage: Storage) -> dict[int, list[int]]:
    found: dict[int, list[int]] = {}
    for entry in storage.list(layout.COMMITS_PREFIX):
        parsed = layout.parse_commit(entry.key)
        if parsed is not None:
            found.setdefault(parsed[0], []).append(parsed[1])
    for numbers in found.values():
        numbers.sort()
    return found


def _root(storage: Storage) -> bytes | None:
    try:
        return storage.get(layout.ROOT_KEY)
    except FileNotFoundError:
        return None


def require_store(storage: Storage) -> None:
    """Raise what `refusal` says of this place; StepNotFoundError too where there is nothing.

    A store whose root is missing passes: `verify` tells of it, and its steps can be read.
    """
    raw = _root(storage)
    if raw == ROOT:
        return
    committed = bool(_listed(storage))
    error = refusal(raw, storage.url, committed=committed)
    if error is not None:
        raise error
    if not committed:
        raise StepNotFoundError(
            f"there is no checkpoint store at {storage.url}; check the URL, or save a step first"
        )


def create_store(storage: Storage) -> None:
    """Make the fixed groups where they are absent; FormatError where something else lies there."""
    storage.check_writable()
    absent = []
    # All are looked at first: nothing is added to a place that is something else.
    for key in FIXED_DOCUMENTS:
        try:
            check_fixed(storage, key, storage.get(key))
        except FileNotFoundError:
            absent.append(key)
    for key in absent:
        check_fixed(storage, key, create_certain(storage, key, FIXED_DOCUMENTS[key]))


def create(storage: Storage, key: str, content: bytes) -> bytes:
    """Put an object if absent; what is there afterwards, `content` or the bytes of another writer.

    A lost answer is read back. Empty where another's was there and has gone. Raises StorageError
    where the object was surely not written, and OutcomeUnknownError where it may appear yet.
    """
    refusal: StorageError | None = None
    try:
        storage.put_if_absent(key, content)
        return content
    except FileExistsError:
        pass  # another's, or the first of two deliveries of this put
    except StorageError as error:
        refusal = error
    try:
        found = storage.get(key)
        if refusal is not None and found == content:
            # It is there, but its name need not be durable.
            storage.sync(key[: key.rfind("/") + 1])
    except FileNotFoundError:
        if refusal is None:
            return b""
        raise refusal from None
    except StorageError as error:
        raise OutcomeUnknownError(
            f"{key} was sent to {storage.url}, and whether it is there cannot be seen: {error}"
        ) from refusal or error
    return found


def create_certain(storage: Storage, key: str, content: bytes) -> bytes:
    """`create` of what may be left behind: an unknown outcome is a plain StorageError."""
    try:
        return create(storage, key, content)
    except OutcomeUnknownError as error:
        raise StorageError(
            f"cannot tell whether {key} was written to {storage.url}, before anything was "
            f"committed; try again ({error})"
        ) from error


def check_fixed(storage: Storage, key: str, found: bytes) -> None:
    """Refuse a fixed document that is not what this package writes."""
    if key == layout.ROOT_KEY:
        error = refusal(found, storage.url)
        if error is not None:
            raise FormatError(str(error))
    elif found != FIXED_DOCUMENTS[key]:
        raise FormatError(
            f"{key} in {storage.url} is not the one of a ucpstore store: something else lies "
            "there, a newer version wrote it, or it is damaged; use an empty folder or prefix"
        )


@dataclass(frozen=True, slots=True)
class StepRef:
    """A committed step: its newest generation and its record, as bytes too."""

    record: CommitRecord
    raw: bytes

    @property
    def path(self) -> str:
        """The folder of its data."""
        return self.record.path


def find_step(storage: Storage, step: int | None) -> StepRef:
    """The record of a step, or of the newest committed one where `step` is None.

    Raises StepNotFoundError, listing what there is, and saying so where the step is unfinished.
    """
    for again in (False, True, True):
        found = _listed(storage)
        if step is None and found:
            number = max(found)
        elif step is not None and step in found:
            number = step
        else:
            if again and step is not None:
                raise StepNotFoundError(
                    f"step {step} in {storage.url} was deleted while it was read"
                )
            error = None if found else refusal(_root(storage), storage.url)
            if error is not None:
                raise error
            raise StepNotFoundError(absence(storage, step, found))
        key = layout.commit_key(number, found[number][-1])
        try:
            raw = storage.get(key)
        except FileNotFoundError:
            continue  # overwritten or deleted since it was listed: look again
        return StepRef(CommitRecord.from_bytes(raw, key), raw)
    raise StorageError(
        f"step {step} in {storage.url} is listed but its record cannot be read; "
        "try again, or load another step"
    )


def absence(storage: Storage, step: int | None, found: Mapping[int, Collection[int]]) -> str:
    """What to say where `step` (any where None) is not among the committed ones."""
    steps = sorted(found)
    if not steps and _root(storage) is None:
        absent = "no committed step" if step is None else f"step {step} is not"
        return (
            f"{absent} in {storage.url}, where there is no checkpoint store; check the URL, or "
            "save a step first"
        )
    if not steps:
        have = "the store has no committed step"
    else:
        shown = ", ".join(map(str, steps[-8:]))
        have = f"committed are {shown}" + (f" and {len(steps) - 8} older" if steps[8:] else "")
    if step is None:
        return f"no committed step in {storage.url}; save one first"
    # Folders that a delete left may be listed for a while; they are empty.
    unfinished = (
        next(iter(storage.list(f"{layout.STEPS_PREFIX}{name}/")), None) is not None
        for name in storage.folders(layout.STEPS_PREFIX)
        if name.startswith(f"{step:010d}-")
    )
    if any(unfinished):
        return f"step {step} is not committed in {storage.url}: its save did not finish; {have}"
    return f"step {step} is not in {storage.url}; {have}"


def read_step_group(storage: Storage, ref: StepRef) -> StepDocument:
    """Read and check the document of the step's group, which holds the tree."""
    raw = read_document(storage, ref, ref.record.document(layout.DOCUMENT))
    return parse_step(raw, f"{ref.path}/{layout.DOCUMENT}")


def item_entries(ref: StepRef, items: Collection[str] | None = None) -> dict[str, DocumentEntry]:
    """The documents of those of the items that have one, all where None, by the item's path."""
    suffix = f"/{layout.DOCUMENT}"
    found = {
        entry.path.removesuffix(suffix): entry
        for entry in ref.record.documents
        if entry.path.endswith(suffix)
    }
    return found if items is None else {path: found[path] for path in found if path in items}


def read_items(
    storage: Storage, ref: StepRef, entries: Mapping[str, DocumentEntry], *, threads: int = 8
) -> dict[str, dict[str, Json]]:
    """Read and check the documents of items, by path: the metadata of their arrays by path."""
    with ThreadPoolExecutor(min(threads, max(1, len(entries)))) as pool:
        contents = list(pool.map(lambda each: read_document(storage, ref, each), entries.values()))
    return {
        f"{item}/{path}": metadata
        for (item, entry), raw in zip(entries.items(), contents, strict=True)
        for path, metadata in parse_item(raw, f"{ref.path}/{entry.path}").items()
    }


def read_document(storage: Storage, ref: StepRef, entry: DocumentEntry) -> bytes:
    """One document of a step, checked against the record before anyone parses it."""
    key = f"{ref.path}/{entry.path}"
    try:
        return entry.check(storage.get(key))
    except FileNotFoundError:
        raise missing(storage, ref, key) from None
    except CorruptError as error:
        raise CorruptError(f"{ref.path}/{error}") from None  # it names the path below the step's


def read_bytes(storage: Storage, ref: StepRef, path: str, metadata: ArrayMetadata) -> bytes:
    """The contents of a one-dimensional array of bytes of a step, each chunk verified.

    So large leaves of the tree are stored. Raises CorruptError, naming the key, for damage.
    """
    grid, dtype = metadata.grid, metadata.dtype
    if len(grid.shape) != 1 or dtype != "uint8" or metadata.codec is not None:
        packed = "" if metadata.codec is None else ", compressed"
        raise CorruptError(
            f"{path} should hold bytes, but is a {dtype} of shape {grid.shape}{packed}"
        )
    slot = slot_bytes(grid, 1)
    found = bytearray()
    for index in grid.object_indices():
        key = f"{ref.path}/{path}/{grid.key(index)}"
        raw = bytearray(grid.object_bytes(index, 1) - grid.index_bytes)
        try:
            read_into(storage, key, 0, memoryview(raw))
        except FileNotFoundError:
            raise missing(storage, ref, key) from None
        for number, start in enumerate(range(0, len(raw), slot)):
            chunk = memoryview(raw)[start : start + slot]
            found += decode_chunk(chunk, grid, dtype, key, number).data
        # The last chunk of an object that the array's edge cuts is padded.
        del found[grid.object_box(index).stop[0] :]
    return bytes(found)


def read_tail(storage: Storage, key: str, grid: Grid, size: int) -> bytes:
    """The index at the end of an object of `size` bytes; CorruptError where it has no room."""
    if size < grid.index_bytes:
        raise CorruptError(
            f"{key} should have at least the {grid.index_bytes} bytes of its index, found {size}; "
            f"{ADVICE}"
        )
    tail = bytearray(grid.index_bytes)
    read_into(storage, key, size - len(tail), memoryview(tail))
    return bytes(tail)


def missing(storage: Storage, ref: StepRef, key: str) -> Exception:
    """The error for an object of a step that is gone: deleted meanwhile, or damage."""
    record_key = layout.commit_key(ref.record.step, ref.record.generation)
    try:
        still = storage.get(record_key) == ref.raw
    except FileNotFoundError:
        still = False
    if not still:
        return StepNotFoundError(
            f"step {ref.record.step} in {storage.url} was deleted or overwritten while it was "
            "read; load again, or load another step"
        )
    return CorruptError(
        f"{key} is missing in {storage.url}, although step {ref.record.step} is committed; "
        "load another step, and run `ucpstore verify` to see what else is gone"
    )


def save_ids(storage: Storage, step: int, numbers: Iterable[int]) -> set[str]:
    """The saves that committed these generations of a step; damaged records are passed over."""
    found = set()
    for number in numbers:
        key = layout.commit_key(step, number)
        with suppress(FileNotFoundError, CorruptError, FormatError):
            found.add(CommitRecord.from_bytes(storage.get(key), key).save_id)
    return found


def delete_generations(storage: Storage, step: int, numbers: Iterable[int]) -> None:
    """Remove records of a step, lowest generation first, then the data of each.

    A record goes before its data, so that no reader meets a record without data.
    """
    paths = []
    for number in sorted(numbers):
        key = layout.commit_key(step, number)
        # Where the record cannot be read, nobody finds its data any more. The record has to go even
        # where it seems gone: were it there after all, an old step would come back when the newer
        # ones go.
        with suppress(FileNotFoundError, CorruptError, FormatError):
            paths.append(CommitRecord.from_bytes(storage.get(key), key).path)
        storage.delete([key])
    for path in paths:
        storage.delete_tree(f"{path}/")

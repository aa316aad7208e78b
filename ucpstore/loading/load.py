"""One load, from the call to the filled target: the three rounds that all ranks go through.

1. `resolve`: rank 0 picks the step, reads its record and documents, and hands them to all.
2. `ready`: every rank has checked its whole target against them and planned its reads; what does
   not fit is refused here, before the first byte of any target changes.
3. `done`: every rank has read, verified and applied its part.
"""

from __future__ import annotations

import json
import time
from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass

import torch

from ucpstore import catalog
from ucpstore.agree import Group, local_group
from ucpstore.arrays.metadata import parse
from ucpstore.catalog import Documents, StepRef
from ucpstore.describe import (
    ArrayInfo,
    Cast,
    Read,
    Target,
    match,
    refuse_unexpected,
    settle_unexpected,
)
from ucpstore.dtypes import itemsize
from ucpstore.errors import StateError, UcpstoreError
from ucpstore.format import layout
from ucpstore.format.documents import canonical
from ucpstore.format.paths import segment_of
from ucpstore.format.record import CommitRecord
from ucpstore.geometry import Box, Grid, Piece
from ucpstore.loading.reader import Reader, Request, requests
from ucpstore.loading.report import LoadReport
from ucpstore.options import Options
from ucpstore.storage import Storage
from ucpstore.tree import Node, inline
from ucpstore.tree.decode import decode
from ucpstore.tree.nodes import pairs_of


@dataclass(frozen=True, slots=True)
class LoadRequest:
    """The arguments of one call of `load`, checked one by one."""

    state: Mapping[str, object]
    step: int | None
    strict: bool
    cast: Cast

    @staticmethod
    def checked(state: object, step: object, strict: object, cast: Cast) -> LoadRequest:
        """Refuse arguments that are wrong by themselves, naming them."""
        if not isinstance(state, Mapping):
            raise StateError(
                f"state must be a dict from names to values, but it is a {type(state).__name__}; "
                "pass {'model': model, 'optim': optimizer} or the like"
            )
        if not isinstance(strict, bool):
            raise StateError(f"strict must be True or False, but it is {strict!r}")
        number = None if step is None else layout.check_step(step)
        return LoadRequest(state, number, strict, cast)


def load_state(
    storage: Storage,
    group: Group,
    request: Callable[[], LoadRequest],
    options: Options,
    *,
    collective: bool = True,
) -> LoadReport:
    """Fill the target in place; collective over `group` unless `collective` is False.

    `request` is called inside the first round, so that what it refuses is raised on all ranks.
    All ranks return, or all raise the first cause with its rank.
    """
    with (group if collective else local_group(1)[0]).call("load", options) as call:
        load = _Load(storage, group, request, options)
        answer = call.round(
            "resolve", load.arrive, load.resolve, timeout_s=options.arrive_timeout_s
        )
        unexpected = call.round(
            "ready",
            lambda: load.prepare(answer),
            load.compare,
            timeout_s=options.report_timeout_s,
        )
        call.round("done", load.read, lambda _: b"", timeout_s=options.report_timeout_s)
        return load.report(json.loads(unexpected))


class _Load:
    """The state of one load on one rank, from round to round."""

    def __init__(
        self,
        storage: Storage,
        group: Group,
        make_request: Callable[[], LoadRequest],
        options: Options,
    ) -> None:
        self.storage = storage
        self.group = group
        self.options = options
        self._make_request = make_request
        self.request: LoadRequest
        self.seconds: dict[str, float] = {}
        self._since = time.perf_counter()
        self.ref: StepRef
        self.target: Target
        self.items: list[str] = []
        self.todo: list[Request] = []
        self.bytes_read = 0
        self.metadata_bytes = 0

    def _end(self, phase: str) -> None:
        now = time.perf_counter()
        self.seconds[phase] = now - self._since
        self._since = now

    def arrive(self) -> bytes:
        """What this rank asks for: the step, and the items of its target."""
        request = self.request = self._make_request()
        self.items = [segment_of(key, request.state) for key in request.state]
        return canonical({"step": request.step, "strict": request.strict, "items": self.items})

    def resolve(self, payloads: list[bytes]) -> bytes:
        """On rank 0: the record and the documents of all items that some rank asks for."""
        asked = [json.loads(payload) for payload in payloads]
        for name in ("step", "strict"):
            for rank, other in enumerate(asked):
                if other[name] != asked[0][name]:
                    raise StateError(
                        f"load: every rank must pass the same {name}: rank 0 has "
                        f"{asked[0][name]!r}, rank {rank} has {other[name]!r}"
                    )
        items = {item for each in asked for item in each["items"]}
        ref = catalog.find_step(self.storage, self.request.step)
        documents = catalog.read_documents(
            self.storage, ref, items.__contains__, threads=self.options.threads
        )
        opened = Opened.of(ref, documents)
        large = self._read_large(opened, items)
        self.metadata_bytes = len(ref.raw) + documents.size
        return _pack(ref, documents, large)

    def _read_large(self, opened: Opened, items: Collection[str]) -> dict[str, bytes]:
        """The large leaves of the asked items, which lie in arrays of bytes."""
        found: dict[str, bytes] = {}

        def fetch(path: str) -> bytes:
            grid = opened.grids[path]
            tensor = torch.empty(grid.shape, dtype=torch.uint8)
            pieces = (Piece(Box.whole(grid.shape), Box.whole(grid.shape)),)
            Reader(self.storage, opened.ref, self.options).run(
                list(requests(Read(path, tensor, pieces, "uint8"), grid))
            )
            found[path] = bytes(tensor.numpy().data)
            return found[path]

        opened.inlined(items, fetch)
        return found

    def prepare(self, answer: bytes) -> bytes:
        """Check the whole target, plan the reads; nothing of the target changes."""
        self.ref, documents, large = _unpack(answer)
        self._end("resolve")
        opened = Opened.of(self.ref, documents)
        self.target = match(
            self.request.state,
            opened.inlined(self.items, large.__getitem__),
            opened.infos,
            strict=self.request.strict,
            cast=self.request.cast,
            group_ranks={rank: n for n, rank in enumerate(self.group.global_ranks)},
            rank=self.group.rank,
        )
        self.todo = [
            request
            for read in self.target.reads
            for request in requests(read, opened.grids[read.path])
        ]
        self._end("plan")
        return canonical([self.target.items, self.target.unexpected])

    def compare(self, payloads: list[bytes]) -> bytes:
        """On rank 0: saved names that no rank has a place for, which `strict` refuses."""
        unexpected = settle_unexpected(json.loads(payload) for payload in payloads)
        if self.request.strict:
            refuse_unexpected(unexpected)
        return canonical(unexpected)

    def read(self) -> bytes:
        """Read, verify, copy, and then apply what is not a tensor."""
        reader = Reader(self.storage, self.ref, self.options)
        try:
            reader.run(self.todo)
            self.bytes_read = reader.bytes_read
            self._end("read")
            self.target.finish()
        except UcpstoreError as error:
            error.add_note(
                f"The target of this load of step {self.ref.record.step} is undefined now: load "
                "again before using it."
            )
            raise
        self._end("apply")
        return b""

    def report(self, unexpected: list[str]) -> LoadReport:
        """The outcome on this rank."""
        self._end("agree")
        needed = sum(
            piece.box.size * itemsize(read.dtype)
            for read in self.target.reads
            for piece in read.pieces
        )
        return LoadReport(
            url=self.storage.url,
            step=self.ref.record.step,
            items=self.target.items,
            skipped=self.target.skipped,
            missing=self.target.missing,
            unexpected=tuple(unexpected),
            bytes_needed=needed,
            bytes_read=self.bytes_read,
            metadata_bytes=self.metadata_bytes,
            seconds=self.seconds,
        )


@dataclass(frozen=True, slots=True)
class Opened:
    """The documents of a step, parsed."""

    ref: StepRef
    tree: Node
    grids: Mapping[str, Grid]
    infos: Mapping[str, ArrayInfo]

    @staticmethod
    def of(ref: StepRef, documents: Documents) -> Opened:
        """Parse checked documents."""
        step, arrays = catalog.parse_documents(documents)
        parsed = {path: parse(document, path) for path, document in arrays.items()}
        return Opened(
            ref,
            step.tree,
            {path: each.grid for path, each in parsed.items()},
            {path: ArrayInfo(each.grid.shape, each.dtype) for path, each in parsed.items()},
        )

    def inlined(self, items: Collection[str], fetch: Callable[[str], bytes]) -> Node:
        """The tree, the large leaves of the items with these paths put in their places."""
        pairs = pairs_of(self.tree)
        keys = dict.fromkeys(decode(key) for key, _ in pairs)
        return {
            "dict": [
                [key_node, inline(node, fetch) if segment_of(key, keys) in items else node]
                for key, (key_node, node) in zip(keys, pairs, strict=True)
            ]
        }


def _pack(ref: StepRef, documents: Documents, large: Mapping[str, bytes]) -> bytes:
    """Record and documents for the other ranks, as they are stored."""
    parts = [ref.raw, documents.step, *documents.items.values(), *large.values()]
    head = canonical(
        {
            "sizes": [len(part) for part in parts],
            "items": list(documents.items),
            "large": list(large),
        }
    )
    return b"".join([len(head).to_bytes(8, "little"), head, *parts])


def _unpack(data: bytes) -> tuple[StepRef, Documents, dict[str, bytes]]:
    start = 8 + int.from_bytes(data[:8], "little")
    head = json.loads(data[8:start])
    parts = []
    for size in head["sizes"]:
        parts.append(data[start : start + size])
        start += size
    raw, step, *rest = parts
    record = CommitRecord.from_bytes(raw, "the commit record handed on by rank 0")
    names = head["items"]
    return (
        StepRef(record, raw),
        Documents(step, dict(zip(names, rest, strict=False))),
        dict(zip(head["large"], rest[len(names) :], strict=True)),
    )

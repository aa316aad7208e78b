"""One load, from the call to the filled target: the three rounds that all ranks go through.

1. `resolve`: rank 0 picks the step, reads its record and documents, and hands them to all.
2. `ready`: every rank has checked its whole target against them and planned its reads; what does
   not fit is refused here, before the first byte of any target changes.
3. `done`: every rank has read, verified and applied its part.
"""

from __future__ import annotations

import json
import time
from collections.abc import Callable, Mapping
from contextlib import closing
from dataclasses import dataclass

from ucpstore import catalog
from ucpstore.agree import Group, local_group
from ucpstore.catalog import StepRef
from ucpstore.collector import collector_paused
from ucpstore.describe import (
    Cast,
    Target,
    check_state,
    match,
    refuse_unexpected,
    settle_unexpected,
)
from ucpstore.describe.patterns import check_patterns
from ucpstore.dtypes import itemsize
from ucpstore.errors import StateError
from ucpstore.format import layout
from ucpstore.format.documents import canonical
from ucpstore.loading.counts import ReadCounts
from ucpstore.loading.opened import item_name, open_handed, read_step
from ucpstore.loading.reader import Reader
from ucpstore.loading.report import LoadReport
from ucpstore.loading.requests import Request, Requests
from ucpstore.options import Options
from ucpstore.progress import Progress, ProgressCallback, check_progress
from ucpstore.spec import Spec, check_spec
from ucpstore.storage import Storage


@dataclass(frozen=True, slots=True)
class LoadRequest:
    """The arguments of one call of `load`, checked one by one."""

    state: Mapping[str, object]
    step: int | None
    strict: bool
    cast: Cast
    progress: ProgressCallback | None = None
    spec: Spec | None = None

    @staticmethod
    def checked(
        state: object,
        step: object,
        strict: object,
        cast: Cast,
        collective: object = True,
        progress: object = None,
        spec: object = None,
    ) -> LoadRequest:
        """Refuse arguments that are wrong by themselves, naming them."""
        state = check_state(state)
        if not isinstance(strict, bool):
            raise StateError(f"strict must be True or False, but it is {strict!r}")
        if not isinstance(collective, bool):
            raise StateError(f"collective must be True or False, but it is {collective!r}")
        number = None if step is None else layout.check_step(step)
        return LoadRequest(
            state,
            number,
            strict,
            check_patterns("cast", cast),
            check_progress(progress),
            check_spec(spec),
        )


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
    with (
        closing(Progress("load", group.rank)) as progress,
        (group if collective else local_group(1)[0]).call("load", options) as call,
    ):
        load = _Load(storage, group, request, options, progress)
        answer = call.round(
            "resolve", load.arrive, load.resolve, timeout_s=options.arrive_timeout_s
        )
        unexpected = call.round(
            "ready",
            lambda: load.prepare(answer),
            load.compare,
            timeout_s=options.report_timeout_s,
            commits=False,
        )
        try:
            total = call.round(
                "done",
                load.read,
                lambda payloads: canonical(sum(map(json.loads, payloads))),
                timeout_s=options.report_timeout_s,
                commits=False,
            )
        except BaseException as error:
            # On every rank: those that did not fail have changed their targets as well.
            error.add_note(
                f"The target of this load of step {load.ref.record.step} is undefined now: load "
                "again before using it."
            )
            raise
        return load.report(json.loads(unexpected), json.loads(total))


class _Load:
    """The state of one load on one rank, from round to round."""

    def __init__(
        self,
        storage: Storage,
        group: Group,
        make_request: Callable[[], LoadRequest],
        options: Options,
        progress: Progress,
    ) -> None:
        self.storage = storage
        self.group = group
        self.options = options
        self.progress = progress
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
        self.progress.follow(request.progress)
        self.progress.phase("resolve", step=request.step)
        self.items = [item_name(key) for key in request.state]
        return canonical({"step": request.step, "strict": request.strict, "items": self.items})

    @collector_paused()
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
        answer, self.metadata_bytes = read_step(self.storage, ref, items, self.options)
        return answer

    @collector_paused()
    def prepare(self, answer: bytes) -> bytes:
        """Check the whole target, plan the reads; nothing of the target changes."""
        opened = open_handed(answer)
        self.ref = opened.ref
        self._end("resolve")
        self.progress.phase("plan", step=self.ref.record.step)
        self.target = match(
            self.request.state,
            opened.tree,
            opened.infos,
            strict=self.request.strict,
            cast=self.request.cast,
            group_ranks={rank: n for n, rank in enumerate(self.group.global_ranks)},
            rank=self.group.rank,
            spec=self.request.spec,
        )
        requests = Requests()
        self.todo = [
            request
            for read in self.target.reads
            for request in requests.of(read, opened.arrays[read.path])
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
        """Read, verify, copy, and then apply what is not a tensor; the bytes that were read."""
        done = ReadCounts(self.progress, self.todo).done if self.progress.followed else None
        reader = Reader(self.storage, self.ref, self.options, done)
        reader.run(self.todo)
        self.bytes_read = reader.bytes_read
        self._end("read")
        self.progress.phase("apply")
        self.target.finish()
        self._end("apply")
        self.progress.phase("agree")
        # Now, since an error of the callback has to reach all ranks.
        self.progress.flush()
        return canonical(self.bytes_read)

    def report(self, unexpected: list[str], total_bytes_read: int) -> LoadReport:
        """The outcome on this rank."""
        self._end("agree")
        needed = sum(read.elements * itemsize(read.dtype) for read in self.target.reads)
        return LoadReport(
            url=self.storage.url,
            step=self.ref.record.step,
            items=self.target.items,
            skipped=self.target.skipped,
            missing=self.target.missing,
            unexpected=tuple(unexpected),
            arrays=len({read.path for read in self.target.reads}),
            bytes_needed=needed,
            bytes_read=self.bytes_read,
            total_bytes_read=total_bytes_read,
            metadata_bytes=self.metadata_bytes,
            seconds=self.seconds,
        )

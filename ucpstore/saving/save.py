"""One save, from the call to the commit: the four rounds that all ranks go through together.

1. `begin`: every rank brings digests of what it wants to save.
2. `structure`: one rank of each new class sends its description; rank 0 checks everything that can
   be refused, then makes the first write, the mark of this save.
3. `ready`: every rank has planned and has seen the mark, so all see the same storage. Tensors of
   one name on several meshes, which the plan tells, are compared.
4. `commit`: every rank has written; rank 0 writes the documents and the commit record.
"""

from __future__ import annotations

import json
import os
import threading
import time
from collections.abc import Callable, Sequence
from contextlib import closing
from dataclasses import dataclass

from ucpstore import catalog
from ucpstore.agree import Call, Group
from ucpstore.collector import collector_paused
from ucpstore.describe import LocalState, describe
from ucpstore.errors import OutcomeUnknownError, UcpstoreError
from ucpstore.exchange import exchanger_of
from ucpstore.format import layout
from ucpstore.format.documents import canonical
from ucpstore.format.marks import WorkMark
from ucpstore.geometry import RankClass, merge, specs_from_bytes, specs_to_bytes
from ucpstore.options import Options, codec_for
from ucpstore.plan import RankPlan, SavePlan, plan_save
from ucpstore.progress import Progress
from ucpstore.saving import arrival as arrivals
from ucpstore.saving.arrival import Arrival, Invitation, PerRankArrival, PerRankRows, digest
from ucpstore.saving.commit import Commit, Outcome
from ucpstore.saving.documents import plan_documents, settle_codecs, write_array_documents
from ucpstore.saving.mark import check_mark, end
from ucpstore.saving.perrank import rows_documents, rows_size, write_rows
from ucpstore.saving.replicas import compared, joined_digests, replica_digests
from ucpstore.saving.report import SaveReport
from ucpstore.saving.request import SaveRequest
from ucpstore.saving.writer import Written, write_objects
from ucpstore.storage import Storage
from ucpstore.tree import merge_nodes
from ucpstore.tree.names import check_paths

KEPT_PLANS = 8
"""Plans that a process keeps, by structure; a second save of the same structure plans nothing."""

_plans: dict[str, SavePlan] = {}
_plans_lock = threading.Lock()
os.register_at_fork(
    before=_plans_lock.acquire,
    after_in_parent=_plans_lock.release,
    after_in_child=_plans_lock.release,
)


def save_state(
    storage: Storage, group: Group, request: Callable[[], SaveRequest], options: Options
) -> SaveReport:
    """Save and commit; collective over `group`.

    `request` is called inside the first round, so that what it refuses is raised on all ranks.
    All ranks return, or all raise the first cause with its rank.
    """
    with closing(Progress("save", group.rank)) as progress, group.call("save", options) as call:
        return _Save(storage, group, call, options, progress).run(request)


@dataclass(frozen=True, slots=True)
class _Structure:
    """What rank 0 tells after the second round: descriptions, if new, and this save's mark."""

    mark: WorkMark
    rows: tuple[PerRankRows, ...]
    arrays: tuple[str, ...]

    def to_bytes(self) -> bytes:
        return canonical(
            {
                "mark": self.mark.to_bytes().decode(),
                "rows": [row.to_json() for row in self.rows],
                "arrays": self.arrays,
            }
        )

    @staticmethod
    def from_bytes(data: bytes) -> _Structure:
        fields = json.loads(data)
        mark = WorkMark.from_bytes(fields["mark"].encode(), "the mark of this save")
        rows = tuple(PerRankRows.from_json(row) for row in fields["rows"])
        return _Structure(mark, rows, tuple(fields["arrays"]))


class _Save:
    """One save on one rank; its attributes are what a round leaves to later ones."""

    def __init__(
        self, storage: Storage, group: Group, call: Call, options: Options, progress: Progress
    ) -> None:
        self.storage = storage
        self.group = group
        self.call = call
        self.options = options
        self.progress = progress
        self.seconds: dict[str, float] = {}
        self._since = time.perf_counter()
        self.request: SaveRequest
        self.state: LocalState
        self.specs = b""
        self.tree = b""
        self.replicas: dict[str, str] = {}
        self.written = Written(0, 0, 0)
        self._kept: dict[str, SavePlan] = {}
        """Plans of earlier saves, as they were when this rank arrived: others may push them out."""
        # On rank 0 alone:
        self.arrived: list[Arrival] = []
        self.commit: Commit | None = None

    def run(self, make_request: Callable[[], SaveRequest]) -> SaveReport:
        """Go through all rounds."""
        late = self.options.report_timeout_s
        answer = self.call.round(
            "begin",
            lambda: self._arrive(make_request()),
            self._invite,
            timeout_s=self.options.arrive_timeout_s,
        )
        invitation = Invitation.from_bytes(answer)
        try:
            answer = self.call.round(
                "structure",
                lambda: self._contribution(invitation),
                lambda sent: self._open(invitation, sent),
                timeout_s=late,
                commits=False,
            )
            structure = _Structure.from_bytes(answer)
            self._end("begin")
            self.call.round(
                "ready",
                lambda: self._ready(invitation, structure),
                _compare_joined,
                timeout_s=late,
                commits=False,
            )
            return self._write(invitation, structure)
        except BaseException:
            if self.commit is not None:
                self.commit.clean_up()
            raise
        finally:
            if self.commit is not None:
                end(self.commit.mark)

    def _end(self, phase: str) -> None:
        now = time.perf_counter()
        self.seconds[phase] = now - self._since
        self._since = now

    @property
    def _comparison(self) -> str:
        """Names what was compared: the structure, among the ranks of this group."""
        return digest(repr(self.group.global_ranks).encode() + self.specs)

    # Round 1

    @collector_paused()
    def _arrive(self, request: SaveRequest) -> bytes:
        self.request = request
        self.progress.follow(request.progress)
        self.progress.phase("describe", step=request.step)
        self.state = describe(
            request.state,
            per_rank=request.per_rank,
            cast=request.cast,
            codec_of=lambda name: codec_for(name, self.options),
            group_ranks={rank: n for n, rank in enumerate(self.group.global_ranks)},
            rank=self.group.rank,
            spec=request.spec,
        )
        self.state = settle_codecs(self.state, self.options)
        self.specs = specs_to_bytes([array.spec for array in self.state.arrays])
        self.tree = canonical(self.state.tree)
        structure = digest(self.specs)
        if self.call.size > 1:
            self.replicas = replica_digests(
                self.state.arrays, self._comparison, request.check_replicas
            )
        with _plans_lock:
            self._kept = dict(_plans)
        self._end("describe")
        self.progress.phase("begin")
        return Arrival(
            step=request.step,
            overwrite=request.overwrite,
            options=digest(repr((self.options, request.check_replicas)).encode()),
            metadata=digest(canonical(request.metadata)),
            arrays=structure,
            tree=digest(self.tree),
            replicas=digest(canonical(self.replicas)),
            planned=tuple(self._kept),
            per_rank=tuple(
                PerRankArrival(d.path, d.axis, d.index, d.count, len(d.data), digest(d.data))
                for d in self.state.per_rank
            ),
        ).to_bytes()

    def _invite(self, payloads: list[bytes]) -> bytes:
        self.arrived = [Arrival.from_bytes(payload) for payload in payloads]
        return arrivals.invite(self.arrived).to_bytes()

    # Round 2

    def _contribution(self, invitation: Invitation) -> bytes:
        sends: dict[str, object] = {}
        if invitation.send_arrays and _first_of(invitation.arrays, self.call.rank):
            sends["arrays"] = self.specs.decode()
        if _first_of(invitation.trees, self.call.rank):
            sends["tree"] = self.tree.decode()
        if _first_of(invitation.replicas, self.call.rank):
            sends["replicas"] = self.replicas
        return canonical(sends)

    @collector_paused()
    def _open(self, invitation: Invitation, payloads: list[bytes]) -> bytes:
        """On rank 0: refuse what can be refused, then write the mark of this save."""
        sent = [json.loads(payload) for payload in payloads]
        arrays: tuple[str, ...] = ()
        if invitation.send_arrays:
            arrays = tuple(sent[ranks[0]]["arrays"] for ranks in invitation.arrays)
        # First, since other shapes or dtypes make other values too.
        plan = self._plan(invitation, arrays)
        arrivals.compare_replicas(
            {ranks[0]: sent[ranks[0]]["replicas"] for ranks in invitation.replicas}
        )
        trees = [(ranks[0], json.loads(sent[ranks[0]]["tree"])) for ranks in invitation.trees]
        tree = merge_nodes(trees)
        if len(trees) > 1:
            check_paths(tree)
        rows = arrivals.per_rank_rows(self.arrived)
        self.commit = Commit.begin(
            self.storage,
            self.request.step,
            overwrite=self.request.overwrite,
            documents={**plan_documents(plan), **rows_documents(rows, self.options)},
            tree=tree,
            options=self.options,
            compressed=any(array.codec is not None for array, _ in plan.arrays),
        )
        return _Structure(self.commit.mark, rows, arrays).to_bytes()

    def _plan(self, invitation: Invitation, arrays: Sequence[str]) -> SavePlan:
        plan = self._kept.get(invitation.plan)
        if plan is None:
            classes = [
                RankClass(ranks, specs_from_bytes(text.encode()))
                for ranks, text in zip(invitation.arrays, arrays, strict=True)
            ]
            plan = plan_save(merge(classes), self.call.size, self.options)
            self._kept[invitation.plan] = plan
            with _plans_lock:
                while len(_plans) >= KEPT_PLANS:
                    _plans.pop(next(iter(_plans)))
                _plans[invitation.plan] = plan
        return plan

    # Round 3

    @collector_paused()
    def _ready(self, invitation: Invitation, structure: _Structure) -> bytes:
        self.progress.phase("plan")
        plan = self._plan(invitation, structure.arrays)
        check_mark(self.storage, structure.mark)
        joined = {array.path for array, _ in plan.arrays if array.joined}
        found = joined_digests(
            self.state.arrays, joined, self._comparison, self.request.check_replicas
        )
        self._end("plan")
        return canonical(found)

    # Round 4

    def _write(self, invitation: Invitation, structure: _Structure) -> SaveReport:
        plan = self._plan(invitation, structure.arrays)
        try:
            answer = self.call.round(
                "commit",
                lambda: self._write_all(plan, structure),
                lambda payloads: self._commit(plan, structure, payloads),
                timeout_s=self.options.report_timeout_s,
            )
            outcome = Outcome.from_bytes(answer)
        except OutcomeUnknownError as error:
            outcome = self._look(plan, structure.mark, error)
        if self.request.check_replicas != "never":
            compared(self._comparison)
        self._end("commit")
        return SaveReport(
            url=self.storage.url,
            step=structure.mark.step,
            generation=outcome.generation,
            path=layout.step_path(structure.mark.step, structure.mark.save_id),
            arrays=outcome.arrays,
            objects=self.written.objects,
            bytes=self.written.bytes,
            exchanged_bytes=self.written.exchanged_bytes,
            total_objects=outcome.objects,
            total_bytes=outcome.bytes,
            seconds=self.seconds,
        )

    def _write_all(self, plan: SavePlan, structure: _Structure) -> bytes:
        prefix = layout.step_path(structure.mark.step, structure.mark.save_id)
        local = {array.spec.path: array for array in self.state.arrays}
        with collector_paused():
            part = plan.rank(self.call.rank)
        followed = self.progress.followed
        if followed:
            self._expect(plan, part, structure.rows)
        self.written = write_objects(
            self.storage,
            prefix,
            plan,
            part,
            local,
            self.call.rank,
            lambda: exchanger_of(
                self.call,
                self.options.report_timeout_s,
                transfer_s=self.options.silence_timeout_s,
            ),
            self.options,
            (lambda write: self.progress.add(plan.object_bytes(write))) if followed else None,
        )
        rows = write_rows(
            self.storage, prefix, self.call.rank, structure.rows, self.state.per_rank, self.options
        )
        self.written += rows
        self.progress.add(rows.bytes, rows.objects)
        write_array_documents(self.storage, prefix, plan, part.metadata, self.options)
        self.storage.sync(f"{prefix}/")
        self.progress.phase("commit")
        # Now, since an error of the callback has to reach all ranks before the step exists.
        self.progress.flush()
        self._end("write")
        return self.written.to_bytes()

    def _expect(self, plan: SavePlan, part: RankPlan, rows: Sequence[PerRankRows]) -> None:
        """Begin the phase `write` with the bytes and objects that this rank is to put."""
        writes = [*part.writes, *(write for each in part.rounds for write in each.writes)]
        row_bytes, row_objects = rows_size(self.call.rank, rows, self.options)
        self.progress.phase(
            "write",
            total_bytes=sum(map(plan.object_bytes, writes)) + row_bytes,
            total_objects=len(writes) + row_objects,
        )

    def _commit(self, plan: SavePlan, structure: _Structure, payloads: list[bytes]) -> bytes:
        assert self.commit is not None
        reported = [Written.from_bytes(payload) for payload in payloads]
        array_bytes = plan.real_bytes + sum(sum(row.lengths) for row in structure.rows)
        return self.commit.finish(reported, self.request.metadata, array_bytes).to_bytes()

    def _look(self, plan: SavePlan, mark: WorkMark, lost: OutcomeUnknownError) -> Outcome:
        """Rank 0 is lost, or its commit was not answered: the record tells whether it is there."""
        try:
            record = catalog.find_step(self.storage, mark.step).record
        except (UcpstoreError, FileNotFoundError):
            record = None
        if record is None or record.save_id != mark.save_id:
            raise OutcomeUnknownError(
                f"whether step {mark.step} was committed to {self.storage.url} is not known, and "
                "there is no record of this save so far; look with "
                f"`ucpstore ls {self.storage.url}` before saving the step again ({lost})"
            ) from lost
        return Outcome(record.generation, record.arrays, plan.objects, record.bytes)


def _compare_joined(payloads: Sequence[bytes]) -> bytes:
    arrivals.compare_replicas({rank: json.loads(raw) for rank, raw in enumerate(payloads)})
    return b""


def _first_of(classes: arrivals.Classes, rank: int) -> bool:
    return any(ranks[0] == rank for ranks in classes)

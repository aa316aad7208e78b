"""The public face of a store: save, load, and what is in it."""

from __future__ import annotations

import logging
import os
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING

from ucpstore import catalog
from ucpstore.agree import Group, group_of
from ucpstore.errors import StateError
from ucpstore.loading import LoadReport, LoadRequest, load_state
from ucpstore.manage.delete import delete_step
from ucpstore.manage.open import Checkpoint, open_step
from ucpstore.options import Options
from ucpstore.saving import SaveHandle, SaveRequest, save_state
from ucpstore.storage import Storage, open_storage

if TYPE_CHECKING:
    from torch.distributed import ProcessGroup

    from ucpstore.describe import Cast
    from ucpstore.describe.patterns import SaveCast
    from ucpstore.progress import ProgressCallback
    from ucpstore.saving.request import CheckReplicas
    from ucpstore.spec import Spec

_log = logging.getLogger("ucpstore")
"""Has one line at INFO for each save and each load that succeeded, from rank 0 of its group."""


class CheckpointStore:
    """Checkpoints below one URL.

    `url` is a local path, `file://...`, `s3://bucket/prefix` or any URL that fsspec knows. For S3,
    `storage_options` are those of s3fs (`endpoint_url`, `key`, `secret`, `token`, `anon`, ...), and
    what is not given is looked up as the AWS tools do; for others, those of fsspec's file system.
    Nothing is read, written or checked until the first use.

    A store may be kept for the life of the process and used from several threads.
    """

    def __init__(
        self,
        url: str | os.PathLike[str],
        storage_options: Mapping[str, object] | None = None,
        *,
        options: Options | None = None,
    ) -> None:
        self._storage: Storage = open_storage(url, storage_options)
        self._options = options

    @property
    def url(self) -> str:
        """Where the store is; holds no secret."""
        return self._storage.url

    def __repr__(self) -> str:
        return f"CheckpointStore({self.url!r})"

    def save(
        self,
        state: Mapping[str, object],
        *,
        step: int,
        overwrite: bool = False,
        metadata: Mapping[str, object] | None = None,
        process_group: ProcessGroup | None = None,
        per_rank: Sequence[str] = (),
        check_replicas: CheckReplicas = None,
        cast: SaveCast = None,
        spec: Spec | None = None,
        progress: ProgressCallback | None = None,
        options: Options | None = None,
    ) -> SaveHandle:
        """Save `state` as `step`; see `ucpstore.save`."""
        used, problem = self._settle(options)
        group = group_of(process_group)

        def request() -> SaveRequest:
            if problem is not None:
                raise problem
            self._check_shared(group)
            return SaveRequest.checked(
                state, step, overwrite, metadata, per_rank, check_replicas, cast, progress, spec
            )

        report = save_state(self._storage, group, request, used)
        if group.rank == 0:
            _log.info("%s", report)
        return SaveHandle(report)

    def load(
        self,
        state: Mapping[str, object],
        *,
        step: int | None = None,
        strict: bool = True,
        cast: Cast = None,
        spec: Spec | None = None,
        process_group: ProcessGroup | None = None,
        collective: bool = True,
        progress: ProgressCallback | None = None,
        options: Options | None = None,
    ) -> LoadReport:
        """Load `step` into `state`; see `ucpstore.load`."""
        used, problem = self._settle(options)
        group = group_of(process_group)

        def request() -> LoadRequest:
            if problem is not None:
                raise problem
            if collective:
                self._check_shared(group)
            return LoadRequest.checked(state, step, strict, cast, collective, progress, spec)

        report = load_state(self._storage, group, request, used, collective=collective)
        if group.rank == 0 or not collective:
            _log.info("%s", report)
        return report

    def _check_shared(self, group: Group) -> None:
        if self._storage.one_process and group.size > 1 and not group.one_process:
            raise StateError(
                f"{self.url} is the memory of one process, which the other {group.size - 1} ranks "
                "do not see; give a folder or a bucket that all of them reach"
            )

    def _settle(self, options: object) -> tuple[Options, StateError | None]:
        """The options of a call, and what is wrong with them.

        That is raised inside the call: the environment of one machine may be at fault, and the
        ranks elsewhere have to hear of it.
        """
        chosen = self._options if options is None else options
        try:
            if chosen is None:
                return Options.from_environment(), None
            if isinstance(chosen, Options):
                return chosen, None
            raise StateError(
                f"options must be a ucpstore.Options, but it is {chosen!r}; "
                "pass e.g. ucpstore.Options(threads=4)"
            )
        except StateError as error:
            return Options(), error

    def steps(self) -> list[int]:
        """The committed steps, rising. One listing."""
        return sorted(catalog.generations(self._storage))

    def latest(self) -> int | None:
        """The newest committed step: the highest number; None where there is none."""
        return max(catalog.generations(self._storage), default=None)

    def open(self, step: int | None = None) -> Checkpoint:
        """A lazy view of a step (the newest where None) that reads what is asked for.

        Needs no process group and never communicates.
        """
        return open_step(self._storage, step, self._options or Options.from_environment())

    def delete(self, step: int) -> None:
        """Delete a step: the records of all its generations, then their data.

        Raises StepNotFoundError where it is not committed, and InProgressError while a save of
        this step is running. Call it from one process.
        """
        delete_step(self._storage, step, self._options or Options.from_environment())

    def close(self) -> None:
        """Let go of connections."""
        self._storage.close()


def save(
    url: str | os.PathLike[str],
    state: Mapping[str, object],
    *,
    step: int,
    overwrite: bool = False,
    metadata: Mapping[str, object] | None = None,
    process_group: ProcessGroup | None = None,
    per_rank: Sequence[str] = (),
    check_replicas: CheckReplicas = None,
    cast: SaveCast = None,
    spec: Spec | None = None,
    progress: ProgressCallback | None = None,
    storage_options: Mapping[str, object] | None = None,
    options: Options | None = None,
) -> SaveHandle:
    """Save `state` as checkpoint `step` of the store at `url`.

    Every rank of `process_group` (the default group where None, this process alone where there is
    none) must call it together. `state` is a nested dict of tensors, DTensors, modules,
    optimizers, objects with `state_dict` and `load_state_dict`, numpy arrays and plain Python
    values. It may be changed again once the call returns; the step exists from then on.

    `overwrite` replaces a step that exists once the new one is whole. `metadata` is plain JSON of
    at most 64 KiB, kept in the commit record. `per_rank` are patterns of names whose values differ
    by rank, as `PerRank`. `check_replicas` compares what several ranks hold: None plain tensors
    and tensors of one name on several meshes (large ones on the first save of a structure),
    "always" every replica, "never" none.

    `cast` maps name patterns to the dtypes in which arrays are stored,
    `{"optim.exp_avg.*": torch.bfloat16}`; the first that matches counts. It loses what the narrower
    dtype does not hold, stays within a kind (float to float, int to int), and a load into the
    original dtype needs `cast` as well. Scalars in the tree, as an optimizer's `step`, keep theirs,
    and the state itself does not change. `options.codecs` compress arrays. A pattern of any of
    these that matches nothing is no error.

    `spec` says how tensors that are no DTensors lie over the ranks, where they are not whole on
    each rank that has them: tensor parallelism by hand, pipeline stages, fused or padded tensors;
    see `ucpstore.Spec`.

    `progress` is a function that is told a `ProgressEvent` when a phase of this rank begins and
    ends, and at most every 0.1 s in between; ranks may differ in it. It is called on a thread of
    the save's own, never twice at once. An error that it raises is an error of this rank: the save
    fails on all ranks and nothing is committed. Rank 0 logs one line at INFO to the logger
    `ucpstore` once the step is saved.

    On failure all ranks raise the first cause, with its rank, and no step appears. Raises
    StepExistsError, StateError, UnsupportedError, StorageError, RankMissingError and, where rank 0
    is lost while it commits, OutcomeUnknownError.
    """
    store = CheckpointStore(url, storage_options)
    return store.save(
        state,
        step=step,
        overwrite=overwrite,
        metadata=metadata,
        process_group=process_group,
        per_rank=per_rank,
        check_replicas=check_replicas,
        cast=cast,
        spec=spec,
        progress=progress,
        options=options,
    )


def load(
    url: str | os.PathLike[str],
    state: Mapping[str, object],
    *,
    step: int | None = None,
    strict: bool = True,
    cast: Cast = None,
    spec: Spec | None = None,
    process_group: ProcessGroup | None = None,
    collective: bool = True,
    progress: ProgressCallback | None = None,
    storage_options: Mapping[str, object] | None = None,
    options: Options | None = None,
) -> LoadReport:
    """Fill `state` in place from checkpoint `step` (the newest where None) of the store at `url`.

    Every rank of `process_group` must call it together, unless `collective` is False: then each
    process loads by itself. The arrangement may be any other than the one that saved. An item (a
    top-level entry) that is not in `state` is left alone; everything below the items that are is
    `strict`: all names must be there on both sides. Without `strict` the report lists what did not
    match. `cast` are patterns of names whose dtype may differ from the stored one (never float to
    integer).

    `spec` is that of this job, as in `save`; the one that saved may have been any other.

    `progress` is told how far this rank is, and rank 0 logs the outcome, as in `save`.

    Names, shapes and dtypes are checked on all ranks before anything of any target changes. After
    an error while reading, the target is undefined. Raises StepNotFoundError, MismatchError,
    CorruptError, StorageError and RankMissingError.
    """
    store = CheckpointStore(url, storage_options)
    return store.load(
        state,
        step=step,
        strict=strict,
        cast=cast,
        spec=spec,
        process_group=process_group,
        collective=collective,
        progress=progress,
        options=options,
    )

"""The arguments of one call of `save`."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Literal

from ucpstore.describe import check_state
from ucpstore.describe.patterns import SaveCast, check_casts, check_patterns
from ucpstore.errors import StateError
from ucpstore.format.layout import check_step
from ucpstore.format.record import check_metadata
from ucpstore.progress import ProgressCallback, check_progress
from ucpstore.spec import Spec, check_spec
from ucpstore.tree import Node

CheckReplicas = Literal["always", "never"] | None


@dataclass(frozen=True, slots=True)
class SaveRequest:
    """The arguments of one call of `save`, checked one by one."""

    state: Mapping[str, object]
    step: int
    overwrite: bool
    metadata: Node
    per_rank: tuple[str, ...]
    check_replicas: CheckReplicas
    cast: tuple[tuple[str, str], ...] = ()
    """Name patterns and names of the dtypes in which tensors are stored."""
    progress: ProgressCallback | None = None
    """This rank's own: ranks may have different ones, and some none."""
    spec: Spec | None = None

    @staticmethod
    def checked(
        state: object,
        step: object,
        overwrite: object,
        metadata: object,
        per_rank: object,
        check_replicas: CheckReplicas,
        cast: SaveCast = None,
        progress: object = None,
        spec: object = None,
    ) -> SaveRequest:
        """Raise StateError, naming the argument, for what is wrong by itself."""
        state = check_state(state)
        if not isinstance(overwrite, bool):
            raise StateError(f"overwrite must be True or False, but it is {overwrite!r}")
        if check_replicas not in (None, "always", "never"):
            raise StateError(
                f"check_replicas must be None, 'always' or 'never', but it is {check_replicas!r}"
            )
        return SaveRequest(
            state,
            check_step(step),
            overwrite,
            check_metadata({} if metadata is None else metadata),
            check_patterns("per_rank", per_rank),
            check_replicas,
            check_casts(cast),
            check_progress(progress),
            check_spec(spec),
        )

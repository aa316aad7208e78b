"""The two calls of DeepSpeed scripts, over a store; `ucpstore.save(url, engine, step=n)` is enough.

DeepSpeed is not imported: an engine comes from a job that has it.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from ucpstore.describe import check_state
from ucpstore.store import load, save

if TYPE_CHECKING:
    from ucpstore.loading import LoadReport
    from ucpstore.saving import SaveHandle


def save_checkpoint(
    engine: Any,
    url: str,
    *,
    step: int | None = None,
    client_state: dict[str, object] | None = None,
    **options: Any,
) -> SaveHandle:
    """Save an engine, as its step `engine.global_steps` by default; all ranks call it together.

    `client_state` goes to the item `client`. `options` are those of `ucpstore.save`.
    """
    state = dict(check_state(engine))
    if client_state is not None:
        state["client"] = client_state
    return save(url, state, step=engine.global_steps if step is None else step, **options)


def load_checkpoint(
    engine: Any,
    url: str,
    *,
    step: int | None = None,
    client_state: dict[str, object] | None = None,
    **options: Any,
) -> LoadReport:
    """Fill an engine, and `client_state` where given, from a step, by default the last one.

    All ranks call it together. `options` are those of `ucpstore.load`.
    """
    state = dict(check_state(engine))
    if client_state is not None:
        state["client"] = client_state
    return load(url, state, step=step, **options)

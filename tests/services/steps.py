"""Steps in a storage, without a store's URL."""

from __future__ import annotations

from ucpstore import catalog
from ucpstore.agree import group_of
from ucpstore.catalog import StepRef
from ucpstore.options import Options
from ucpstore.saving import SaveRequest, save_state
from ucpstore.storage import Storage


def saved(storage: Storage, state: object, step: int = 1, *, overwrite: bool = False) -> StepRef:
    """The step, once this process alone has saved it."""
    save_state(
        storage,
        group_of(None),
        lambda: SaveRequest.checked(state, step, overwrite, None, (), None),
        Options(),
    )
    return catalog.find_step(storage, step)

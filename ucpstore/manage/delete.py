"""Delete steps."""

from __future__ import annotations

from ucpstore import catalog
from ucpstore.errors import InProgressError, StepNotFoundError
from ucpstore.format import layout
from ucpstore.options import Options
from ucpstore.saving.mark import alive, unfinished
from ucpstore.storage import Storage


def delete_step(storage: Storage, step: int, options: Options) -> None:
    """Remove the records of all generations of a step, lowest first, then their data.

    Raises StepNotFoundError where it is not committed, and InProgressError where a save of it may
    be running.
    """
    number = layout.check_step(step)
    found = catalog.generations(storage)
    if number not in found:
        raise StepNotFoundError(catalog.absence(storage, number, found))
    running = [
        mark
        for mark in unfinished(storage)
        if mark.step == number and alive(mark, options.unfinished_age_s)
    ]
    # A save whose record is there has nothing left to do but to remove its mark.
    over = catalog.save_ids(storage, number, found[number]) if running else set()
    for mark in running:
        if mark.save_id not in over:
            raise InProgressError(
                f"step {number} in {storage.url} is being saved (by process {mark.pid} on "
                f"{mark.host} since {mark.created}); wait for it to end, then delete the step"
            )
    catalog.delete_generations(storage, number, found[number])

"""The metadata documents of the arrays of a plan."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor

from ucpstore.arrays.metadata import array_document, to_bytes
from ucpstore.format import layout
from ucpstore.options import Options
from ucpstore.plan import SavePlan
from ucpstore.storage import Storage


def plan_documents(plan: SavePlan) -> dict[str, Mapping[str, object]]:
    """The metadata of all planned arrays, by path."""
    return {
        array.path: array_document(grid, array.dtype, array.dimension_names)
        for array, grid in plan.arrays
    }


def write_array_documents(
    storage: Storage, prefix: str, plan: SavePlan, numbers: Sequence[int], options: Options
) -> None:
    """Write the own documents of the planned arrays at these positions."""

    def write(number: int) -> None:
        array, grid = plan.arrays[number]
        document = array_document(grid, array.dtype, array.dimension_names)
        storage.put(f"{prefix}/{array.path}/{layout.DOCUMENT}", to_bytes(document))

    with ThreadPoolExecutor(options.threads, "ucpstore-write") as pool:
        for _ in pool.map(write, numbers):
            pass

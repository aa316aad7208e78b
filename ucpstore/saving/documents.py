"""The metadata documents of the arrays of a plan."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from ucpstore.arrays.compressors import MAX_CHUNK_BYTES, check_length, settle
from ucpstore.arrays.metadata import DocumentEncoder
from ucpstore.crew import Crew
from ucpstore.describe import LocalArray, LocalState
from ucpstore.dtypes import itemsize
from ucpstore.errors import UnsupportedError
from ucpstore.format import layout
from ucpstore.options import Options, codecs_of
from ucpstore.plan import SavePlan
from ucpstore.storage import Storage


def settle_codecs(state: LocalState, options: Options) -> LocalState:
    """The state, each array's codec with its whole configuration, as it is stored.

    Raises UnsupportedError for a codec of `options` that does not work here, named by an array or
    not: ranks that hold other arrays would fail, and this one has to as well.
    """
    for pattern, text in codecs_of(options):
        try:
            settle(text, 1)
        except UnsupportedError as error:
            raise UnsupportedError(f"option codecs[{pattern!r}]: {error}") from error
    return replace(state, arrays=tuple(_settled(array) for array in state.arrays))


def _settled(array: LocalArray) -> LocalArray:
    spec = array.spec
    if spec.codec is None:
        return array
    try:
        codec = settle(spec.codec, itemsize(spec.dtype))
    except UnsupportedError as error:
        raise UnsupportedError(f"{spec.path}: {error}") from error
    return replace(array, spec=replace(spec, codec=codec))


def plan_documents(plan: SavePlan) -> dict[str, bytes]:
    """The documents of all planned arrays, by path.

    Raises UnsupportedError for an array whose chunks are larger than compressors take, or of a
    length that its compressor does not.
    """
    for array, grid in plan.arrays:
        if array.codec is None:
            continue
        size = grid.chunk_bytes(itemsize(array.dtype))
        if size > MAX_CHUNK_BYTES:
            raise UnsupportedError(
                f"{array.path}: its chunks of {size} bytes are larger than the {MAX_CHUNK_BYTES} "
                "that can be compressed; use smaller chunks (chunk_bytes), or no codec"
            )
        try:
            check_length(array.codec, itemsize(array.dtype), size)
        except UnsupportedError as error:
            raise UnsupportedError(f"{array.path}: {error}") from error
    encode = DocumentEncoder().encode
    return {
        array.path: encode(grid, array.dtype, array.dimension_names, array.codec)
        for array, grid in plan.arrays
    }


def write_array_documents(
    storage: Storage, prefix: str, plan: SavePlan, numbers: Sequence[int], options: Options
) -> None:
    """Write the own documents of the planned arrays at these positions."""
    encode = DocumentEncoder().encode
    with Crew(options.threads or storage.requests, "ucpstore-write") as crew:
        for number in numbers:
            array, grid = plan.arrays[number]
            raw = encode(grid, array.dtype, array.dimension_names, array.codec)
            key = f"{prefix}/{array.path}/{layout.DOCUMENT}"
            crew.submit(storage.put, key, raw, size=len(raw))
        crew.wait()

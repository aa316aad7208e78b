"""Compressors: the codecs of zarr-python that turn bytes into fewer bytes, run from any thread.

A codec is named by JSON text as it stands in an array's metadata,
`{"name":"zstd","configuration":{"checksum":false,"level":0}}`. zarr is imported when one is used.
"""

from __future__ import annotations

import asyncio
import atexit
import difflib
import json
import os
import threading
import warnings
from collections.abc import Callable, Coroutine, Iterable, Mapping
from functools import lru_cache
from typing import TYPE_CHECKING

import numpy as np

from ucpstore.arrays.chunks import Bytes
from ucpstore.errors import UnsupportedError

if TYPE_CHECKING:
    from zarr.abc.buffer import Buffer
    from zarr.abc.codec import BytesBytesCodec, Codec
    from zarr.core.array_spec import ArraySpec
    from zarr.core.common import JSON

    _Batch = Iterable[tuple[Buffer | None, ArraySpec]]
    _Out = Iterable[Buffer | None]

KNOWN = (
    "blosc",
    "gzip",
    "zstd",
    "numcodecs.blosc",
    "numcodecs.bz2",
    "numcodecs.gzip",
    "numcodecs.lz4",
    "numcodecs.lzma",
    "numcodecs.shuffle",
    "numcodecs.zlib",
    "numcodecs.zstd",
)
"""Those that every zarr-python from 3.1.6 on has, for messages; others may be registered."""

MAX_CHUNK_BYTES = 0x7E000000
"""Larger chunks are more than several compressors take."""

_SAMPLE_BYTES = 1 << 16
_LENGTH_BYTES = 1 << 12
"""Lengths are tried modulo this: what a codec may ask of a length is that items divide it."""


def bound_bytes(size: int) -> int:
    """Most bytes that `size` bytes may become; `settle` refuses compressors that make more."""
    return size + size // 16 + 1024


class Compressor:
    """One codec for items of one size; thread-safe."""

    def __init__(self, codec: BytesBytesCodec, spec: ArraySpec, name: str) -> None:
        self._codec = codec
        self._spec = spec
        self.name = name

    def encode(self, data: Bytes) -> Bytes:
        """The compressed form of contiguous bytes."""
        return self._run(self._codec.encode, data)

    def decode(self, data: Bytes) -> Bytes:
        """What `encode` was given; raises whatever the codec does for anything else."""
        return self._run(self._codec.decode, data)

    def text(self) -> str:
        """The codec with its whole configuration, as in metadata."""
        return json.dumps(self._codec.to_dict(), separators=(",", ":"), sort_keys=True)

    def _run(self, action: Callable[[_Batch], Coroutine[None, None, _Out]], data: Bytes) -> Bytes:
        buffer = self._spec.prototype.buffer.from_array_like(data)
        (found,) = _wait(action([(buffer, self._spec)]))
        if found is None:
            raise ValueError(f"codec {self.name} gave nothing")
        array: Bytes = np.ascontiguousarray(found.as_numpy_array()).reshape(-1).view(np.uint8)
        return array


@lru_cache(maxsize=256)
def compressor(codec: str, itemsize: int) -> Compressor:
    """The compressor that JSON text names, tuned to items of `itemsize` bytes.

    Raises UnsupportedError, naming the codec, where zarr-python does not have it or refuses its
    configuration, and where it is none that turns bytes into bytes.
    """
    from zarr.abc.codec import BytesBytesCodec

    document = _parse(codec)
    name = str(document["name"])
    found = _codec_class(name)
    if not issubclass(found, BytesBytesCodec) or name == "crc32c":
        raise UnsupportedError(
            f"codec {name!r} is no compressor of bytes; use one such as {', '.join(KNOWN[:3])}"
        )
    spec = _spec(itemsize)
    with warnings.catch_warnings():
        # zarr tells with each numcodecs codec that it is no part of the Zarr specification; the
        # page about data types and codecs says so once.
        warnings.simplefilter("ignore")
        try:
            made = found.from_dict(document).evolve_from_array_spec(spec)
        except Exception as error:
            raise UnsupportedError(
                f"codec {name!r} does not take the configuration "
                f"{json.dumps(document.get('configuration', {}))}: {error}"
            ) from error
    return Compressor(made, spec, name)


@lru_cache(maxsize=256)
def settle(codec: str, itemsize: int) -> str:
    """The codec with its whole configuration, as it is stored, proved to work on a sample.

    Raises UnsupportedError as `compressor` does, and for a codec that fails, changes the sample, or
    makes it longer than `bound_bytes`.
    """
    made = compressor(codec, itemsize)
    try:
        _try(made, _SAMPLE_BYTES)
        text = made.text()
    except UnsupportedError:
        raise
    except Exception as error:
        raise UnsupportedError(
            f"codec {made.name!r} does not work here: {error}; install what it needs, or use "
            "another one"
        ) from error
    return text


def check_length(codec: str, itemsize: int, size: int) -> None:
    """Raise UnsupportedError where a codec that `settle` gave does not take `size` bytes.

    A shuffle of items larger than the array's own is such a one.
    """
    _check_length(codec, itemsize, _LENGTH_BYTES + size % _LENGTH_BYTES)


@lru_cache(maxsize=4096)
def _check_length(codec: str, itemsize: int, size: int) -> None:
    made = compressor(codec, itemsize)
    try:
        _try(made, size)
    except UnsupportedError:
        raise
    except Exception as error:
        raise UnsupportedError(
            f"codec {made.name!r} does not take chunks of this length: {error}; change its "
            "configuration, or use another one"
        ) from error


def _try(made: Compressor, size: int) -> None:
    """Encode and decode `size` bytes that do not shrink."""
    sample = np.random.default_rng(0).integers(0, 256, size, dtype=np.uint8)
    encoded = made.encode(sample)
    same = np.array_equal(made.decode(encoded), sample)
    if not same or encoded.size > bound_bytes(size):
        what = "gives other bytes back" if not same else "makes bytes that do not shrink far longer"
        raise UnsupportedError(f"codec {made.name!r} {what}; use another one")


def _parse(codec: str) -> dict[str, JSON]:
    try:
        document = json.loads(codec)
    except ValueError:
        document = None
    if not isinstance(document, Mapping) or not isinstance(document.get("name"), str):
        raise UnsupportedError(f"{codec!r} is no codec; name one such as {', '.join(KNOWN[:3])}")
    return {"configuration": {}, **document}


def _codec_class(name: str) -> type[Codec]:
    from zarr.registry import get_codec_class

    try:
        return get_codec_class(name)
    except KeyError:
        names = (*KNOWN, *(each.rpartition(".")[2] for each in KNOWN))
        near = difflib.get_close_matches(name, names, n=1)
        if near and near[0] not in KNOWN:
            near = [f"numcodecs.{near[0]}"]
        hint = f"; did you mean {near[0]!r}?" if near else f"; there is {', '.join(KNOWN)}."
        raise UnsupportedError(
            f"zarr-python knows no codec {name!r} here{hint} Other codecs come with packages that "
            "register them: install the one that has it"
        ) from None
    except Exception as error:  # its package is registered, but does not import
        raise UnsupportedError(
            f"codec {name!r} cannot be loaded: {error}; install what it needs"
        ) from error


@lru_cache
def _spec(itemsize: int) -> ArraySpec:
    """What a codec may ask about the array: only the size of its items matters to a compressor."""
    from zarr.buffer import default_buffer_prototype

    # They have no public name, but every codec's signature does.
    from zarr.core.array_spec import ArrayConfig, ArraySpec
    from zarr.dtype import Complex128, UInt8, UInt16, UInt32, UInt64

    kinds = {1: UInt8, 2: UInt16, 4: UInt32, 8: UInt64, 16: Complex128}
    return ArraySpec(
        shape=(1,),
        dtype=kinds[itemsize](),
        fill_value=0,
        config=ArrayConfig(order="C", write_empty_chunks=True),
        prototype=default_buffer_prototype(),
    )


_lock = threading.Lock()
_loops: list[tuple[int, asyncio.AbstractEventLoop]] = []
"""This process's event loop last; those of a parent stay, or they would complain when freed."""


def _wait(coroutine: Coroutine[None, None, _Out]) -> _Out:
    """Run one of zarr's coroutines. The caller's thread may have a running loop of its own."""
    return asyncio.run_coroutine_threadsafe(coroutine, _loop()).result()


def _loop() -> asyncio.AbstractEventLoop:
    with _lock:
        # A child forked from this process has the loop, but not the thread that runs it.
        if not _loops or _loops[-1][0] != os.getpid():
            loop = asyncio.new_event_loop()
            thread = threading.Thread(target=loop.run_forever, name="ucpstore-codec", daemon=True)
            thread.start()
            atexit.register(_end, os.getpid(), loop, thread)
            _loops.append((os.getpid(), loop))
        return _loops[-1][1]


def _end(pid: int, loop: asyncio.AbstractEventLoop, thread: threading.Thread) -> None:
    if pid == os.getpid():
        loop.call_soon_threadsafe(loop.stop)
        thread.join(5)
        if not loop.is_running():
            loop.close()


os.register_at_fork(
    before=_lock.acquire, after_in_parent=_lock.release, after_in_child=_lock.release
)

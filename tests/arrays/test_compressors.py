"""Compressors by name: which work, what is said of others, and where they may be called from."""

from __future__ import annotations

import asyncio
import json
import os
import subprocess
import sys
import threading

import numpy as np
import pytest
import zarr.registry
from zarr.codecs import ZstdCodec

from ucpstore.arrays.compressors import KNOWN, check_length, compressor, settle
from ucpstore.errors import UnsupportedError

DATA = np.arange(5000, dtype=np.uint8)


def codec(name: str, **configuration: object) -> str:
    return json.dumps({"name": name, "configuration": configuration})


@pytest.mark.parametrize("name", KNOWN)
def test_known_codecs_work_on_every_item_size(name: str) -> None:
    for itemsize in (1, 2, 4, 8, 16):
        full = settle(codec(name), itemsize)
        assert settle(full, itemsize) == full
        made = compressor(full, itemsize)
        assert made.name == name
        assert made.decode(made.encode(DATA[:4992])).tobytes() == DATA[:4992].tobytes()


def test_configurations_are_completed() -> None:
    assert json.loads(settle(codec("zstd", level=3), 4)) == {
        "name": "zstd",
        "configuration": {"level": 3, "checksum": False},
    }
    assert json.loads(settle(codec("blosc"), 8))["configuration"] == {
        "typesize": 8,
        "cname": "zstd",
        "clevel": 5,
        "shuffle": "shuffle",
        "blocksize": 0,
    }


@pytest.mark.parametrize(
    ("given", "message"),
    [
        (codec("zst"), "no codec 'zst' here; did you mean 'zstd'"),
        (codec("lz4"), "no codec 'lz4' here; did you mean 'numcodecs.lz4'"),
        (codec("my_own"), "no codec 'my_own' here; there is blosc, gzip, zstd"),
        (codec("zstd", level=99), "codec 'zstd' does not take the configuration .*99"),
        (codec("zstd", speed=1), "codec 'zstd' does not take the configuration .*speed"),
        (codec("numcodecs.bitround", keepbits=3), "codec 'numcodecs.bitround' is no compressor"),
        (codec("numcodecs.delta", dtype="i4"), "codec 'numcodecs.delta' is no compressor"),
        (codec("transpose", order=[0]), "codec 'transpose' is no compressor"),
        (codec("crc32c"), "codec 'crc32c' is no compressor"),
        ("zstd", "'zstd' is no codec"),
        ("[]", "is no codec"),
    ],
)
def test_what_cannot_be_used_is_named(given: str, message: str) -> None:
    with pytest.raises(UnsupportedError, match=message):
        settle(given, 4)


def test_lengths_that_a_codec_does_not_take() -> None:
    shuffle = settle(codec("numcodecs.shuffle", elementsize=4), 1)
    for size in (4, 8, 1 << 20, 4 * 4097):
        check_length(shuffle, 1, size)
    for size in (1, 6, (1 << 20) + 2, 4097):
        with pytest.raises(UnsupportedError, match="shuffle' does not take chunks of"):
            check_length(shuffle, 1, size)
    for name in KNOWN:
        check_length(settle(codec(name), 2), 2, 2 * 4097)


class Longer(ZstdCodec):
    """A codec that makes more of everything."""

    def _encode_sync(self, chunk_bytes, chunk_spec):  # type: ignore[no-untyped-def]
        return chunk_spec.prototype.buffer.from_bytes(chunk_bytes.to_bytes() * 2)


class Broken(ZstdCodec):
    """A codec whose package does not work."""

    def _encode_sync(self, chunk_bytes, chunk_spec):  # type: ignore[no-untyped-def]
        raise ImportError("no module named fast")


class Wrong(ZstdCodec):
    """A codec that loses something."""

    def _decode_sync(self, chunk_bytes, chunk_spec):  # type: ignore[no-untyped-def]
        whole = super()._decode_sync(chunk_bytes, chunk_spec)
        return chunk_spec.prototype.buffer.from_bytes(bytes(len(whole)))


@pytest.mark.parametrize(
    ("kind", "message"),
    [
        (Longer, "gives other bytes back|far longer|does not work"),
        (Broken, "codec 'zstd' does not work here: no module named fast; install"),
        (Wrong, "codec 'zstd' gives other bytes back"),
    ],
)
def test_a_sample_is_tried(
    monkeypatch: pytest.MonkeyPatch, kind: type[ZstdCodec], message: str
) -> None:
    monkeypatch.setattr(zarr.registry, "get_codec_class", lambda name: kind)
    given = codec("zstd", level=11 + len(kind.__name__))  # none that was cached
    with pytest.raises(UnsupportedError, match=message):
        settle(given, 1)
    compressor.cache_clear()


def test_they_run_where_a_loop_is_running_and_from_threads() -> None:
    made = compressor(codec("zstd"), 1)

    async def inside() -> bytes:
        return made.decode(made.encode(DATA)).tobytes()

    assert asyncio.run(inside()) == DATA.tobytes()
    found = []
    threads = [
        threading.Thread(target=lambda: found.append(made.decode(made.encode(DATA)).tobytes()))
        for _ in range(8)
    ]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert found == [DATA.tobytes()] * 8


def test_they_run_in_a_forked_child_and_end_with_the_process() -> None:
    script = (
        "import os, sys\n"
        "import numpy as np\n"
        "from ucpstore.arrays.compressors import compressor\n"
        'made = compressor(\'{"name":"zstd"}\', 1)\n'
        "data = np.zeros(1000, np.uint8)\n"
        "assert made.encode(data).size < 100\n"
        "child = os.fork()\n"
        "assert made.decode(made.encode(data)).size == 1000\n"
        "if child:\n"
        "    assert os.waitpid(child, 0)[1] == 0\n"
    )
    warn = ["-W", "error", "-W", "ignore::DeprecationWarning"]  # forking with threads
    done = subprocess.run(
        [sys.executable, *warn, "-c", script], capture_output=True, check=False, timeout=60
    )
    assert (done.returncode, done.stderr) == (0, b"")
    assert os.getpid()

"""How fast a file is read from the page cache into memory that begins at other places in a page.

    python -m benchmarks.aliasing

One line for each place where the read begins in the file, one column for each where the buffer
begins in memory, both in bytes from the start of a page; GB/s, the best of five. Half a page apart
is what buffers of ucpstore have at the start of an object
(docs/design/009-buffers-begin-in-the-middle-of-a-page.md).
"""

from __future__ import annotations

import os
import tempfile
import time

import numpy as np

MIB, PAGE = 1024 * 1024, 4096
FILE_BYTES, READ_BYTES = 64 * MIB, MIB
STARTS = (0, 4, 16, 64, 1000, 2048)
PLACES = (0, 4, 8, 16, 32, 64, 256, 1024, 2048, 3072, 4080)


def main() -> None:
    memory = np.ones(READ_BYTES + 2 * PAGE, np.uint8)
    first = -memory.ctypes.data % PAGE
    print("file \\ memory " + "".join(f"{place:7}" for place in PLACES))
    with tempfile.TemporaryFile(dir=".") as file:
        file.write(np.random.default_rng(0).bytes(FILE_BYTES + PAGE))
        file.flush()
        for start in STARTS:
            speeds = (
                rate(file.fileno(), start, memory[first + place :][:READ_BYTES]) for place in PLACES
            )
            print(f"{start:13} " + "".join(f"{speed:7.1f}" for speed in speeds))


def rate(descriptor: int, start: int, buffer: np.ndarray) -> float:
    """GB/s of reading the whole file into one buffer, again and again."""
    best = float("inf")
    for _ in range(5):
        began = time.perf_counter()
        for at in range(0, FILE_BYTES, READ_BYTES):
            os.preadv(descriptor, [buffer.data], start + at)
        best = min(best, time.perf_counter() - began)
    return FILE_BYTES / best / 1e9


if __name__ == "__main__":
    main()

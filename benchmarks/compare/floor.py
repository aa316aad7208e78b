"""What the requests of a load from S3 cost by themselves, whoever sends them.

Bare obstore, as many ranks and threads as in the comparison: whole objects, the same bytes in
ranges of one chunk, as a load under another arrangement needs them, and small objects.
"""

from __future__ import annotations

import argparse
import json
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from statistics import median

import torch.distributed as dist

from benchmarks.compare.ranks import join
from benchmarks.compare.systems import MIB, client, timed

OBJECT, CHUNK = 4 * MIB, 1 * MIB
SMALL, SMALL_BYTES = 132, 8 * 1024
"""Of a transformer with 22 layers, the norms and their moments; each rank reads all of them."""


def rank_main(rank: int, port: int, arguments: argparse.Namespace) -> None:
    """What every rank runs; rank 0 writes the medians down."""
    import obstore

    join(rank, port, arguments.ranks)
    store, prefix = client(f"{arguments.url}/floor")
    count = arguments.mib * MIB // arguments.ranks // OBJECT
    large = [f"{prefix}/large-{rank}-{number}" for number in range(count)]
    small = [f"{prefix}/small-{number}" for number in range(SMALL)]
    for name in large:
        obstore.put(store, name, bytes(OBJECT), use_multipart=False)
    if rank == 0:
        for name in small:
            obstore.put(store, name, bytes(SMALL_BYTES), use_multipart=False)

    def whole(name: str) -> None:
        obstore.get(store, name).bytes()

    def ranges(name: str) -> None:
        for start in range(0, OBJECT, CHUNK):
            obstore.get_range(store, name, start=start, length=CHUNK)

    seconds: dict[str, list[float]] = {"whole": [], "ranges": [], "small": []}
    with ThreadPoolExecutor(4) as pool:
        for number in range(-1, arguments.rounds):
            for kind, action, names in (
                ("whole", whole, large),
                ("ranges", ranges, large),
                ("small", whole, small),
            ):
                took = timed(lambda action=action, names=names: list(pool.map(action, names)))
                if number >= 0:
                    seconds[kind].append(round(took, 4))
    if rank == 0:
        found = {
            "ranks": arguments.ranks,
            "mib": arguments.mib,
            "gets": SMALL * arguments.ranks,
            **{kind: median(each) for kind, each in seconds.items()},
        }
        print(json.dumps(found, indent=2))
        folder = Path(arguments.out)
        folder.mkdir(parents=True, exist_ok=True)
        (folder / "floor.json").write_text(json.dumps(found, indent=2) + "\n")
    dist.destroy_process_group()

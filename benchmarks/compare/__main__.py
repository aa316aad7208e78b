"""Compare ucpstore with DCP and a bare loop, side by side in one run, interleaved.

    python -m benchmarks.compare local            # 4 ranks, 1 GiB, below build/compare
    python -m benchmarks.compare s3               # 4 ranks, 256 MiB, on a SeaweedFS that it starts
    python -m benchmarks.compare floor            # what the requests of an S3 load cost at least
    python -m benchmarks.compare small            # 2 ranks, 2,000 arrays of 4 KiB, local disk
    python -m benchmarks.compare syncs            # 4 ranks: what is synced before the commit
                                                  # (needs strace)
    python -m benchmarks.compare page             # docs/performance.md and its plots, from all
                                                  # (needs matplotlib)

In every round each system saves into a fresh place, then loads it in the same arrangement,
resharded from rows to columns, the weights alone, and one slice. On local disk as many rounds of
loads follow for which the page cache is dropped each time (as root). The order of the systems
changes from round to round, the first round is not counted, and what was loaded is compared. Raw
times go to benchmarks/results/. `UCPSTORE_TEST_S3_ENDPOINT` names another S3 server, whose bucket
is made.
"""

from __future__ import annotations

import argparse
import contextlib
import os
import socket
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path

import torch.multiprocessing as mp

from benchmarks.compare import floor, ranks, small, syncs
from benchmarks.compare.report import write_page

ROOT = Path(__file__).parents[2]
RESULTS = ROOT / "benchmarks" / "results"


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("what", choices=("local", "s3", "floor", "small", "syncs", "page"))
    parser.add_argument("--rounds", type=int, default=7, help="counted rounds")
    parser.add_argument("--mib", type=int, help="size of the state of all ranks together")
    parser.add_argument("--ranks", type=int, help="4, or 2 for small")
    parser.add_argument("--folder", default="build/compare", help="where local rounds write")
    parser.add_argument("--out", default=str(RESULTS), help="where raw times go")
    arguments = parser.parse_args()
    if arguments.what == "page":
        write_page(Path(arguments.out))
        return
    arguments.ranks = arguments.ranks or (2 if arguments.what == "small" else 4)
    if arguments.what == "syncs":
        syncs.write_results(Path(arguments.out), arguments.ranks, arguments.mib or 256)
        return
    arguments.mib = arguments.mib or {"local": 1024, "small": 8}.get(arguments.what, 256)
    with contextlib.ExitStack() as stack:
        if arguments.what in ("s3", "floor"):
            arguments.url = stack.enter_context(s3_bucket())
        else:
            folder = Path(arguments.folder).resolve()
            folder.mkdir(parents=True, exist_ok=True)
            arguments.url = tempfile.mkdtemp(prefix="run-", dir=folder)
        with socket.socket() as probe:
            probe.bind(("127.0.0.1", 0))
            port = probe.getsockname()[1]
        main = {"small": small.rank_main, "floor": floor.rank_main}.get(
            arguments.what, ranks.rank_main
        )
        mp.start_processes(main, (port, arguments), nprocs=arguments.ranks, start_method="spawn")


@contextlib.contextmanager
def s3_bucket() -> Iterator[str]:
    """The URL of a new bucket; credentials and endpoint are put into the environment."""
    sys.path.insert(0, str(ROOT / "tests"))
    from services.seaweed import Seaweed, external_service

    server = Seaweed()
    external = external_service()
    service = external or server.start()
    try:
        os.environ.update(service.environment("admin"))
        yield f"s3://{service.create_bucket()}"
    finally:
        if external is None:
            server.stop()


if __name__ == "__main__":
    main()

"""Flat ranges cost little: writers, reads and bytes are counted by a proxy before the server."""

from __future__ import annotations

import math
from collections import Counter

import numpy as np
import pytest
from acceptance.flats import SHAPES, Sizes, Stored, load_row, range_of, runs, save_row
from ranks.harness import Ranks
from services.proxy import S3Proxy
from services.seaweed import S3Service

from ucpstore.storage import open_storage

ARRANGEMENTS: list[Sizes] = [
    {"dp": 1, "tp": 2},
    {"dp": 2, "tp": 2},
    {"dp": 3, "tp": 1},
    {"dp": 4, "tp": 1},
]


def stored_arrays(url: str, options: dict[str, object]) -> dict[str, Stored]:
    storage = open_storage(url, options)
    found = {}
    for entry in storage.list("steps/"):
        folder, _, last = entry.key.rpartition("/")
        name = folder.rpartition("/")[2]
        if last == "zarr.json" and name in SHAPES:
            found[name] = Stored.of(folder, storage.get(entry.key))
    assert found.keys() == SHAPES.keys()
    return found


def data(proxy: S3Proxy, method: str) -> Counter[str]:
    """How often each object that holds chunks was asked for."""
    return Counter(r.path.split("/run/")[1] for r in proxy.requests(method) if "/c." in r.path)


@pytest.mark.parametrize("source", ARRANGEMENTS, ids=str)
def test_flat_ranges_write_once_read_nothing_and_load_little_more(
    ranks: Ranks, s3: S3Service, s3_bucket: str, proxy: S3Proxy, source: Sizes
) -> None:
    url = f"s3://{s3_bucket}/run"
    counting = s3.options("writer", proxy.endpoint)
    exchanged = ranks.run(math.prod(source.values()), save_row, url, counting, source)
    arrays = stored_arrays(url, s3.options("writer"))

    written = data(proxy, "PUT")
    whole = {name: np.arange(math.prod(shape)) for name, shape in SHAPES.items()}
    assert written.keys() == {key for n, each in arrays.items() for key in each.objects(whole[n])}
    assert {*written.values()} == {1}, "an object with two writers"
    assert not data(proxy, "GET"), "data was read during a save"
    assert (sum(exchanged) > 0) == (source["dp"] > 1), "cuts of ranges share objects, blocks do not"
    for rank, sent in enumerate(exchanged):
        found = [(run, arrays[name]) for name, run in runs(source, rank)]
        assert sent <= sum(min(run.nbytes, 2 * each.object_bytes) for run, each in found)

    for target in ARRANGEMENTS:
        proxy.log.clear()
        loaded = ranks.run(math.prod(target.values()), load_row, url, counting, target)
        assert all(equal for equal, _ in loaded), target
        touched = set()
        for rank, (_, read) in enumerate(loaded):
            _, _, held = range_of(target, rank)
            assert read == sum(arrays[name].chunk_bytes(each) for name, each in held.items())
            touched |= {key for name, each in held.items() for key in arrays[name].objects(each)}
            if source["tp"] == target["tp"]:
                found = [(run, arrays[name]) for name, run in runs(target, rank)]
                assert read <= sum(
                    run.nbytes + 2 * run.row_bytes(each.chunk) for run, each in found
                )
        assert data(proxy, "GET").keys() == touched
        on_wire = sum(r.sent for r in proxy.requests("GET") if "/c." in r.path)
        assert on_wire == sum(read for _, read in loaded), "the report counts what crossed the wire"

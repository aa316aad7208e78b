"""Loads read what the target needs and little more, counted by a proxy in front of the server."""

from __future__ import annotations

from collections import Counter

import pytest
import torch
from acceptance.reading import load_split, save_split
from ranks.harness import Ranks
from services.proxy import S3Proxy
from services.seaweed import S3Service

import ucpstore

BOUND = 1.05
F32 = torch.float32
BF16 = torch.bfloat16


def data_bytes(proxy: S3Proxy) -> int:
    """Bytes of objects that hold chunks, as they crossed the wire."""
    return sum(r.sent for r in proxy.requests("GET") if "/c." in r.path)


def check_no_range_twice(proxy: S3Proxy, ranks: int) -> None:
    """No range of an object is asked for more often than there are ranks."""
    asked = Counter((r.path, r.range) for r in proxy.requests("GET") if "/c." in r.path)
    assert max(asked.values(), default=0) <= ranks


@pytest.mark.parametrize(
    ("count", "shape", "source", "target", "dtype"),
    [
        # the same arrangement, where the grid keeps the cuts
        (2, (2048, 2048), 0, 0, F32),
        (4, (4096, 4096), 0, 0, BF16),
        (4, (4096, 4096), 1, 1, F32),
        # rows to columns
        (2, (2048, 2048), 0, 1, F32),
        (4, (2048, 2048), 0, 1, F32),
        (2, (4096, 8192), 0, 1, F32),
        (4, (4096, 8192), 0, 1, F32),
    ],
)
def test_bytes_read_are_bytes_needed(
    ranks: Ranks,
    s3: S3Service,
    s3_bucket: str,
    proxy: S3Proxy,
    count: int,
    shape: tuple[int, ...],
    source: int,
    target: int,
    dtype: torch.dtype,
) -> None:
    url, shapes = f"s3://{s3_bucket}/run", {"w": shape}
    ranks.run(count, save_split, url, s3.options("writer"), shapes, source, dtype)
    options = s3.options("reader", proxy.endpoint)
    found = ranks.run(count, load_split, url, options, shapes, target, dtype)
    assert all(equal for _, _, equal in found)
    needed = sum(each for each, _, _ in found)
    read = data_bytes(proxy)
    assert read == sum(each for _, each, _ in found), "the report counts what crossed the wire"
    assert needed <= read <= BOUND * needed
    check_no_range_twice(proxy, 1 if source == target else count)


def test_only_the_asked_items_are_read(s3: S3Service, s3_bucket: str, proxy: S3Proxy) -> None:
    model = torch.nn.Linear(600, 700)
    optimizer = torch.optim.AdamW(model.parameters())
    model(torch.ones(600)).sum().backward()
    optimizer.step()
    url = f"s3://{s3_bucket}/run"
    ucpstore.save(
        url, {"model": model, "optim": optimizer}, step=1, storage_options=s3.options("writer")
    )
    options = s3.options("reader", proxy.endpoint)
    report = ucpstore.load(url, {"model": torch.nn.Linear(600, 700)}, storage_options=options)
    assert report.skipped == ("optim",)
    assert proxy.count(path_part="/optim/") == 0
    assert proxy.count("GET", "/model/") > 0


def test_opening_a_store_of_100_steps_and_reading_a_slice_costs_few_requests(
    s3: S3Service, s3_bucket: str, proxy: S3Proxy
) -> None:
    url = f"s3://{s3_bucket}/run"
    store = ucpstore.CheckpointStore(url, s3.options("writer"))
    weight = torch.arange(1_000_000, dtype=F32).reshape(1000, 1000)
    for step in range(99):
        store.save({"model": {"layers.0.wq.weight": weight[:2]}}, step=step)
    store.save({"model": {"layers.0.wq.weight": weight}}, step=99)
    reader = ucpstore.CheckpointStore(url, s3.options("reader", proxy.endpoint))
    part = reader.open()["model"]["layers.0.wq.weight"][3:5, 7]  # type: ignore[index]
    assert part.tolist() == [3007.0, 4007.0]
    assert len(proxy.log) <= 6, [f"{r.method} {r.path}" for r in proxy.log]

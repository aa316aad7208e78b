"""Rank functions of the memory tests: save and load a state four times the budget, and measure."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from pathlib import Path

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Shard
from torch.distributed.tensor import empty as dtensor_empty

import ucpstore

SHAPES = {"large": (65536, 4096), "uneven": (40003, 4096), "narrow": (26001, 4096)}
"""Float32, 2.01 GiB; over two ranks `large` is cut where objects end, the others are not."""


def state(dim: int) -> dict[str, DTensor]:
    """The arrays, split along `dim`; all of their memory has been touched."""
    mesh = init_device_mesh("cpu", (dist.get_world_size(),))
    found = {}
    for number, (name, shape) in enumerate(SHAPES.items()):
        tensor = dtensor_empty(*shape, device_mesh=mesh, placements=[Shard(dim)])
        tensor.to_local().fill_(number + 1)
        found[name] = tensor
    return found


def peak_above_start(action: Callable[[], object]) -> int:
    """Bytes by which the resident set grew at its peak while `action` ran (VmHWM)."""
    Path("/proc/self/clear_refs").write_text("5")
    before = _status("VmRSS")
    action()
    return _status("VmHWM") - before


def _status(name: str) -> int:
    lines = Path("/proc/self/status").read_text().splitlines()
    return next(int(line.split()[1]) * 1024 for line in lines if line.startswith(name + ":"))


def measure(url: str) -> Mapping[str, int]:
    """Bytes of the rank's state, and the peaks of a first save, a second, and two loads."""
    peaks = _measure_rows(url)
    columns = state(1)
    peaks["load resharded"] = peak_above_start(lambda: ucpstore.load(url, {"m": columns}))
    for number, tensor in enumerate(columns.values()):
        assert torch.all(tensor.to_local() == number + 1)
    return peaks


def _measure_rows(url: str) -> dict[str, int]:
    rows = state(0)
    return {
        "state": sum(tensor.to_local().nbytes for tensor in rows.values()),
        "first save": peak_above_start(lambda: ucpstore.save(url, {"m": rows}, step=1)),
        "second save": peak_above_start(lambda: ucpstore.save(url, {"m": rows}, step=2)),
        "load": peak_above_start(lambda: ucpstore.load(url, {"m": rows})),
    }


def measure_full_tensor(url: str) -> int:
    """The peak of a save that gathers an array whole, as one that is not sharded would."""
    kept = state(0)

    def gather_and_save() -> None:
        whole = kept["large"].full_tensor()
        ucpstore.save(url, {"m": {"large": whole[:16]}}, step=3, check_replicas="never")

    return peak_above_start(gather_and_save)

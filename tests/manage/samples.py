"""A small store with everything that a step can hold, made once and copied for every test."""

from __future__ import annotations

import shutil
from pathlib import Path

import torch

import ucpstore
from ucpstore.storage import Storage, open_storage

STEPS = (100, 200)


def make_store(folder: Path) -> None:
    """Two steps, the second saved twice: objects with and without index, every kind of leaf."""
    torch.manual_seed(1)
    model = torch.nn.Sequential(torch.nn.Linear(24, 16), torch.nn.Linear(16, 8))
    optim = torch.optim.AdamW(model.parameters(), lr=0.001)
    model(torch.ones(2, 24)).sum().backward()
    optim.step()
    state = {
        "model": model,
        "optim": optim,
        "large": {"table": torch.arange(600_000, dtype=torch.float32).reshape(600, 1000)},
        "ema": torch.full((3, 5), 2.0, dtype=torch.bfloat16),
        "scheduler": {"last_epoch": 7, "milestones": [10, 20], "best": float("inf")},
        "vocabulary": b"word" * 20_000,
        "rng": ucpstore.PerRank(torch.Generator().manual_seed(3)),
    }
    ucpstore.save(folder, state, step=100, metadata={"loss": 0.5})
    ucpstore.save(folder, state, step=200)
    ucpstore.save(folder, state, step=200, overwrite=True, metadata={"loss": 0.25, "run": "a"})


def copy_store(made: Path, folder: Path) -> Path:
    """A copy that a test may damage."""
    return shutil.copytree(made, folder)


def opened(folder: Path) -> Storage:
    return open_storage(folder)


def step_folder(folder: Path, step: int) -> Path:
    """The folder of a step's only save."""
    (found,) = folder.glob(f"steps/{step:010d}-*")
    return found


def flip(path: Path, position: int, bit: int = 0) -> None:
    """Flip one bit of a file in place."""
    raw = bytearray(path.read_bytes())
    raw[position] ^= 1 << bit
    path.write_bytes(raw)

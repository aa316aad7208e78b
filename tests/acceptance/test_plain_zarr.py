"""What was saved is plain Zarr: other tools read it bit for bit, without ucpstore."""

from __future__ import annotations

import os
import subprocess
import sys
import sysconfig
from pathlib import Path

import numpy as np
import pytest
import torch
from services.seaweed import S3Service
from torch import nn

import ucpstore

SCRIPT = Path(__file__).with_name("plain_readers.py")


def trained() -> tuple[nn.Module, torch.optim.Optimizer]:
    """A bfloat16 model with odd and large weights, whose moments are float32."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(700, 1031), nn.LayerNorm(1031), nn.Linear(1031, 1))
    model.register_buffer("scale", torch.tensor(2.5))
    optimizer = torch.optim.AdamW(model.parameters())
    model(torch.randn(4, 700)).square().sum().backward()
    optimizer.step()
    return model.to(torch.bfloat16), optimizer


def save(url: str, options: dict[str, object] | None = None) -> dict[str, np.ndarray]:
    """Save a mixed state; the raw bytes of every array by path, taken from torch."""
    model, optimizer = trained()
    tables = {"counts": torch.arange(12).reshape(3, 4), "empty": torch.zeros(0, 4)}
    ucpstore.save(
        url,
        {"model": model, "optim": optimizer, "tables": tables},
        step=7,
        storage_options=options,
    )
    found = {f"model/{name}": value for name, value in model.state_dict().items()}
    for name, parameter in model.named_parameters():
        for state in ("exp_avg", "exp_avg_sq"):
            found[f"optim/{state}/{name}"] = optimizer.state[parameter][state]
    found |= {f"tables/{name}": value for name, value in tables.items()}
    return {path: raw(value) for path, value in found.items()}


def raw(tensor: torch.Tensor) -> np.ndarray:
    return tensor.detach().contiguous().reshape(-1).view(torch.uint8).numpy()


def read(reader: str, place: str, reference: Path, python: list[str], **environment: str) -> int:
    done = subprocess.run(
        [*python, str(SCRIPT), reader, place, str(reference)],
        env={**os.environ, **environment},
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    return int(done.stdout)


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path, int]:
    """A store on disk, its reference bytes, and the number of its arrays."""
    folder = tmp_path_factory.mktemp("plain")
    reference = save(str(folder / "store"))
    np.savez(folder / "reference.npz", **reference)
    return folder / "store", folder / "reference.npz", len(reference)


@pytest.mark.parametrize("reader", ["with_zarr", "with_tensorstore", "with_xarray"])
def test_other_tools_read_every_array(checkpoint: tuple[Path, Path, int], reader: str) -> None:
    store, reference, count = checkpoint
    assert read(reader, str(store), reference, [sys.executable]) == count == 21


def test_zarr_reads_every_array_from_s3(s3: S3Service, s3_bucket: str, tmp_path: Path) -> None:
    url = f"s3://{s3_bucket}/run"
    reference = save(url, s3.options("writer"))
    np.savez(tmp_path / "reference.npz", **reference)
    environment = s3.environment("reader")
    found = read(
        "with_zarr_over_s3", url, tmp_path / "reference.npz", [sys.executable], **environment
    )
    assert found == len(reference)


def test_without_ucpstore_the_float32_items_open(
    checkpoint: tuple[Path, Path, int], tmp_path: Path
) -> None:
    store, reference, _ = checkpoint
    # An environment that has everything but ucpstore: links to all else that is installed.
    for entry in Path(sysconfig.get_path("purelib")).iterdir():
        if "ucpstore" not in entry.name and entry.suffix != ".pth":
            (tmp_path / entry.name).symlink_to(entry)
    python = [sys.executable, "-S"]
    found = read("with_zarr_float32_only", str(store), reference, python, PYTHONPATH=str(tmp_path))
    assert found == 14  # both moments of six parameters, and two tables


def test_a_changed_byte_would_show(checkpoint: tuple[Path, Path, int], tmp_path: Path) -> None:
    store, reference, _ = checkpoint
    with np.load(reference) as loaded:
        spoiled = {path: values.copy() for path, values in loaded.items()}
    spoiled["model/0.weight"][100] ^= 1
    np.savez(tmp_path / "spoiled.npz", **spoiled)
    with pytest.raises(AssertionError, match=r"model/0\.weight: the bytes differ"):
        read("with_zarr", str(store), tmp_path / "spoiled.npz", [sys.executable])

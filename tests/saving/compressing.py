"""What tests of compressed arrays save: tensors whose bits come from numpy alone, and codecs."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path

import numpy as np
import torch
from cases.tools import line
from torch.distributed.tensor import DTensor, Shard

import ucpstore
from ucpstore.options import Options

BLOSC = {"name": "blosc", "configuration": {"cname": "lz4", "clevel": 1}}
CODECS = (
    ("m.f32.none", None),
    ("m.f32.*", "zstd"),
    ("m.bf16", BLOSC),
    ("m.*6*", {"name": "gzip", "configuration": {"level": 1}}),  # not bf16, which came before
    ("m.c128", None),
    ("m.c*", "zstd"),  # never reached
    ("m.[bf]*", "numcodecs.lz4"),
)
STORED = {
    "f32.none": None,
    "f32.uneven": "zstd",
    "bf16": "blosc",
    "i64": "gzip",
    "bool": "numcodecs.lz4",
    "c128": None,
    "c16": "gzip",
    "f8": "numcodecs.lz4",
    "few": "numcodecs.lz4",
    "empty": None,
}
TENSORS: dict[str, tuple[torch.dtype, tuple[int, ...]]] = {
    "f32.none": (torch.float32, (9, 5)),
    "f32.uneven": (torch.float32, (513, 513)),  # over 3 ranks its cuts meet no chunk
    "bf16": (torch.bfloat16, (1030, 600)),
    "i64": (torch.int64, (700, 257)),
    "bool": (torch.bool, (1201, 1021)),
    "c128": (torch.complex128, (40, 3)),
    "f8": (torch.float8_e4m3fn, (1100, 1000)),
    "few": (torch.float32, (2, 3)),  # fewer rows than ranks
    "c16": (torch.complex128, (300, 301)),
    "empty": (torch.float32, (0, 4)),
}
"""Those above 1 MiB have several chunks; all have every bit pattern and, below, zeros."""


def values(name: str) -> torch.Tensor:
    """The full tensor of a name, from numpy alone: random bits, then zeros."""
    dtype, shape = TENSORS[name]
    if 0 in shape:
        return torch.zeros(shape, dtype=dtype)
    size = int(np.prod(shape)) * dtype.itemsize
    limit = 2 if dtype == torch.bool else 256
    raw = np.random.default_rng(len(name)).integers(0, limit, size, dtype=np.uint8)
    raw[size // 2 :] = 0
    return torch.from_numpy(raw).view(dtype).reshape(shape)


def split(full: torch.Tensor, dim: int) -> DTensor:
    """The rank's part along `dim`; replicated where the tensor has too few dimensions."""
    mesh = line()
    parts = full.chunk(mesh.size(), dim)
    empty = full.narrow(dim, 0, 0)
    part = parts[mesh.get_rank()] if mesh.get_rank() < len(parts) else empty
    return DTensor.from_local(
        part.contiguous(),
        mesh,
        [Shard(dim)],
        run_check=False,
        shape=full.shape,
        stride=full.stride(),
    )


class Scaled(torch.nn.Module):
    """Plain arrays: one without dimensions, one without elements, a small one."""

    def __init__(self, value: float) -> None:
        super().__init__()
        self.register_buffer("scale", torch.tensor(value))
        self.register_buffer("none", torch.zeros(0, 3))
        self.register_buffer("some", torch.arange(5) * int(value))


def save_rows(url: str, storage: Mapping[str, object] | None = None) -> int:
    """Save all tensors split by rows; bytes that were sent to other ranks."""
    state = {"m": {name: split(values(name), 0) for name in TENSORS}, "plain": Scaled(3.0)}
    options = Options(codecs=(*CODECS, ("plain.*", "zstd")))
    return (
        ucpstore.save(url, state, step=1, options=options, storage_options=storage)
        .result()
        .exchanged_bytes
    )


def chain(folder: Path, name: str) -> list[str]:
    """The codecs of chunks of one stored array, by its own document."""
    (path,) = folder.glob(f"steps/*/{name}/zarr.json")
    codecs = json.loads(path.read_bytes())["codecs"]
    if codecs[0]["name"] == "sharding_indexed":
        codecs = codecs[0]["configuration"]["codecs"]
    return [each["name"] for each in codecs]

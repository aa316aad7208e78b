"""The state of the golden stores: something of every kind, with values that are fixed for ever."""

from __future__ import annotations

from collections import Counter, OrderedDict, deque

import numpy as np
import torch
from torch import nn

import ucpstore


def ramp(*shape: int, dtype: torch.dtype = torch.float32) -> torch.Tensor:
    """Values that tell their place; the same in every version of torch."""
    count = int(np.prod(shape))
    return (torch.arange(count, dtype=torch.float64) * 0.25 - 3).reshape(shape).to(dtype)


class Model(nn.Module):
    """Tied weights, a buffer, a 0-d parameter."""

    def __init__(self, offset: float) -> None:
        super().__init__()
        self.embed = nn.Embedding(11, 4)
        self.head = nn.Linear(4, 11, bias=False)
        self.head.weight = self.embed.weight
        self.logit_scale = nn.Parameter(torch.tensor(offset))
        self.register_buffer("positions", torch.arange(5))
        with torch.no_grad():
            self.embed.weight.copy_(ramp(11, 4) + offset)


def optimizer_of(model: Model, offset: float) -> torch.optim.AdamW:
    """An optimizer whose state is put in place, not computed."""
    optimizer = torch.optim.AdamW(
        [
            {"params": [model.embed.weight], "lr": 0.125, "weight_decay": 0.5},
            {"params": [model.logit_scale], "lr": 0.25, "weight_decay": 0.0},
        ],
        betas=(0.75, 0.875),
    )
    for number, parameter in enumerate([model.embed.weight, model.logit_scale]):
        optimizer.state[parameter] = {
            "step": torch.tensor(7.0 + offset),
            "exp_avg": torch.full_like(parameter, number + offset, requires_grad=False),
            "exp_avg_sq": torch.full_like(parameter, number + 0.5 + offset, requires_grad=False),
        }
    return optimizer


DTYPES = (
    torch.bool, torch.uint8, torch.int8, torch.uint16, torch.int16, torch.uint32, torch.int32,
    torch.uint64, torch.int64, torch.float16, torch.bfloat16, torch.float32, torch.float64,
    torch.complex64, torch.complex128, torch.float8_e4m3fn, torch.float8_e5m2,
    torch.float8_e4m3fnuz, torch.float8_e5m2fnuz, torch.float8_e8m0fnu,
)  # fmt: skip


def dtype_tables() -> dict[str, torch.Tensor]:
    """One array of every dtype; the bytes 0 to 239 under each, but for booleans."""
    pattern = torch.arange(240, dtype=torch.uint8)
    tables = {}
    for dtype in DTYPES:
        raw = pattern % 2 if dtype is torch.bool else pattern
        tables[str(dtype).removeprefix("torch.")] = raw.clone().view(dtype)
    return tables


def values() -> dict[object, object]:
    """Leaves and containers that are not tensors."""
    return {
        "numbers": [0, -1, 2**70, 1.5, -0.0, float("inf"), float("nan"), 1 + 2j, True, None],
        "containers": {
            "tuple": (1, (2, [3])),
            "ordered": OrderedDict(b=1, a=2),
            "counter": Counter(aab=1, c=3),
            "deque": deque([1, 2], maxlen=3),
            "set": {3, 1, 2},
            "empty": {},
        },
        "texts": ["", "caf\u00e9", b"\x00\xff"],
        1: "an integer key",
        "1": "a string key of the same text",
        "torch": [torch.Size([2, 3]), torch.bfloat16, torch.device("cpu")],
        "scalar": torch.tensor(2.5),
        "numpy": np.float32(1.25),
        "long": "x" * 70_000,
        "data": bytes(range(256)) * 300,
    }


def state(*, blank: bool = False) -> dict[str, object]:
    """The golden state, or a target of the same structure with other values."""
    offset = 100.0 if blank else 0.0
    model = Model(offset)
    tables = {**dtype_tables(), "scalar": torch.tensor(3), "none": torch.zeros(0, 3)}
    large = ramp(600, 700, dtype=torch.bfloat16)
    if blank:
        tables = {name: torch.zeros_like(table) for name, table in tables.items()}
        large = torch.zeros_like(large)
    return {
        "model": model,
        "optim": optimizer_of(model, offset),
        "tables": tables,
        "large": {"cut": large, "uneven/name": large[:, ::2].contiguous()},
        "bias": torch.zeros(3) if blank else ramp(3),
        "values": {**dict.fromkeys(values()), "scalar": torch.tensor(0.0)} if blank else values(),
        "loader": ucpstore.PerRank({"position": 0 if blank else 17}),
    }

"""What the ranks run: a transformer under DeepSpeed that is saved and loaded by both systems.

The functions are called by name in pools of ranks that live for the whole run, so an engine stays
from one call to the next. Times are those of the slowest rank.
"""

from __future__ import annotations

import gc
import hashlib
import re
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import zero_job
from torch import nn
from torch.nn.functional import cross_entropy, scaled_dot_product_attention, silu

import ucpstore
from benchmarks.compare.systems import timed
from ucpstore.storage.files import sync_files

LAYERS, HIDDEN, INNER, HEADS, VOCABULARY = 8, 640, 1728, 10, 16384
TAG, UNIVERSAL = "saved", "universal"


class Block(nn.Module):
    """Attention and a gated layer, each behind a norm."""

    def __init__(self) -> None:
        super().__init__()
        self.attention_norm, self.ffn_norm = nn.RMSNorm(HIDDEN), nn.RMSNorm(HIDDEN)
        self.wq, self.wk, self.wv, self.wo = (
            nn.Linear(HIDDEN, HIDDEN, bias=False) for _ in range(4)
        )
        self.w1, self.w3 = (nn.Linear(HIDDEN, INNER, bias=False) for _ in range(2))
        self.w2 = nn.Linear(INNER, HIDDEN, bias=False)

    def forward(self, hidden: torch.Tensor) -> torch.Tensor:
        normed = self.attention_norm(hidden)
        heads = [
            each(normed).unflatten(-1, (HEADS, -1)).transpose(1, 2)
            for each in (self.wq, self.wk, self.wv)
        ]
        mixed = scaled_dot_product_attention(*heads, is_causal=True)
        hidden = hidden + self.wo(mixed.transpose(1, 2).flatten(2))
        normed = self.ffn_norm(hidden)
        return hidden + self.w2(silu(self.w1(normed)) * self.w3(normed))


class Transformer(nn.Module):
    """50 M parameters in 74 tensors; the head is the embedding."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(VOCABULARY, HIDDEN)
        self.layers = nn.ModuleList(Block() for _ in range(LAYERS))
        self.norm = nn.RMSNorm(HIDDEN)

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        hidden = self.embed(tokens)
        for layer in self.layers:
            hidden = layer(hidden)
        logits = self.norm(hidden) @ self.embed.weight.T
        return cross_entropy(logits.flatten(0, 1).float(), tokens.flatten())


_engine: Any = None


def _make(stage: int, seed: int, *, universal: bool = False) -> Any:
    """A fresh engine in the place of the last one."""
    global _engine
    with zero_job.quiet():
        if _engine is not None:
            _engine.destroy()
        _engine = None
        gc.collect()
        deepspeed = zero_job.started()
        torch.manual_seed(seed)
        config: dict[str, Any] = {
            "train_micro_batch_size_per_gpu": 1,
            "bf16": {"enabled": True},
            "optimizer": {"type": "AdamW", "params": {"lr": 1e-3, "torch_adam": True}},
            "zero_optimization": {"stage": stage},
        }
        if universal:
            config["checkpoint"] = {"load_universal": True}
        model = Transformer()
        _engine, *_ = deepspeed.initialize(
            model=model, model_parameters=model.parameters(), config=config
        )
    return _engine


def train(stage: int) -> dict[str, str]:
    """An engine that has trained, on the ranks that save; what is in it."""
    engine = _make(stage, seed=0)
    with zero_job.quiet():
        for step in range(2):
            generator = torch.Generator().manual_seed(10 * step + dist.get_rank())
            tokens = torch.randint(0, VOCABULARY, (1, 16), generator=generator)
            engine.backward(engine(tokens))
            engine.step()
    return told(stage)


def told(stage: int) -> dict[str, str]:
    """Digests of masters, moments and parameters, as DeepSpeed reports them, and counters."""
    masters, states, weights = zero_job.told_by(_engine, zero_job.Kind(stage))
    found = {f"master {name}": _digest(tensor) for name, tensor in masters.items()}
    found |= {f"parameter {name}": _digest(tensor) for name, tensor in weights.items()}
    for key, tensors in states.items():
        found |= {f"{key} {name}": _digest(tensor) for name, tensor in tensors.items()}
    inner = _engine.optimizer.optimizer
    steps = {float(state["step"]) for state in inner.state.values()}
    return {**found, "step": str(steps), "global_steps": str(_engine.global_steps)}


def _digest(tensor: torch.Tensor) -> str:
    data = tensor.detach().contiguous().reshape(-1).view(torch.uint8).numpy()
    return hashlib.sha1(data, usedforsecurity=False).hexdigest()


def save_ours(place: str) -> dict[str, float]:
    """ucpstore, with nothing set."""
    return {"save": timed(lambda: ucpstore.save(place, _engine, step=1))}


def save_theirs(place: str) -> dict[str, float]:
    """DeepSpeed's own call; then each rank syncs the files that it wrote."""

    def save() -> None:
        with zero_job.quiet():
            _engine.save_checkpoint(place, tag=TAG)

    seconds = {"save_checkpoint": timed(save), "fsync": timed(lambda: sync_files(_own(place)))}
    return {**seconds, "save": sum(seconds.values())}


def _own(place: str) -> list[str]:
    """What this rank wrote: the files with its number, rank 0 those without, and the folders."""
    rank, found = dist.get_rank(), []
    for path in [Path(place), *Path(place).rglob("*")]:
        number = re.search(r"zero_pp_rank_(\d+)_", path.name)
        if (int(number[1]) if number else 0) == rank:
            found.append(str(path))
    return found


def load_ours(place: str, stage: int) -> tuple[float, dict[str, str]]:
    """Into a fresh engine of other values; seconds, and what is in it."""
    engine = _make(stage, seed=1)
    return timed(lambda: ucpstore.load(place, engine)), told(stage)


def load_theirs(place: str, stage: int) -> tuple[float, dict[str, str]]:
    """The same by DeepSpeed, from the converted checkpoint."""
    engine = _make(stage, seed=1, universal=True)

    def load() -> None:
        with zero_job.quiet():
            found, _ = engine.load_checkpoint(place, tag=UNIVERSAL)
        assert found is not None, "DeepSpeed found no checkpoint"

    return timed(load), told(stage)

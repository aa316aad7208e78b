"""A small GPT in plain tensors, cut by hand over pipeline, data and tensor parallel ranks.

The cutting here is torch's and Python's own: it is what a specification's pieces are held against.
"""

from __future__ import annotations

import re
from collections.abc import Mapping

import torch
from torch import nn

import ucpstore
from ucpstore.spec import padded, renamed, replicate, scaled, shard, tied

LAYERS, WIDTH, HEADS, KV_HEADS, HEAD, FFN, VOCABULARY = 4, 24, 4, 4, 6, 20, 13

WHOLE: dict[str, tuple[int, ...]] = {
    "embed.weight": (VOCABULARY, WIDTH),
    **{
        f"layers.{number}.{name}": shape
        for number in range(LAYERS)
        for name, shape in {
            "norm.weight": (WIDTH,),
            "qkv.weight": ((HEADS + 2 * KV_HEADS) * HEAD, WIDTH),
            "out.weight": (WIDTH, HEADS * HEAD),
            "out.bias": (WIDTH,),
            "gate_up.weight": (2 * FFN, WIDTH),
            "down.weight": (WIDTH, FFN),
        }.items()
    },
    "norm.weight": (WIDTH,),
}


def values(salt: int) -> dict[str, torch.Tensor]:
    """The whole model: whole numbers, all different, so that a moved row or a scale shows."""
    made, start = {}, salt * 1_000_000
    for name, shape in WHOLE.items():
        count = torch.Size(shape).numel()
        made[name] = torch.arange(start, start + count, dtype=torch.float32).reshape(shape) * 4
        start += count
    return made


def own(name: str, whole: torch.Tensor, tp: int, at: int, *, state: bool) -> torch.Tensor:
    """What tensor parallel rank `at` of `tp` has of a tensor."""
    kind = re.sub(r"^layers\.\d+\.", "", name)
    if kind == "qkv.weight":
        sections = whole.split([HEADS * HEAD, KV_HEADS * HEAD, KV_HEADS * HEAD])
        return torch.cat([section.chunk(tp)[at] for section in sections])
    if kind == "gate_up.weight":
        return torch.cat([half.chunk(tp)[at] for half in whole.chunk(2)])
    if kind in ("out.weight", "down.weight"):
        return whole.chunk(tp, 1)[at].clone()
    if kind == "out.bias":
        return whole / tp if not state else whole.clone()
    if kind in ("embed.weight", "head.weight"):
        rows = -(-VOCABULARY // tp) * tp
        more = torch.cat([whole, torch.zeros(rows - VOCABULARY, WIDTH)])
        return more.chunk(tp)[at].clone()
    return whole.clone()


class Stage(nn.Module):
    """The parameters of one pipeline stage on one rank; layers are numbered within the stage."""

    def __init__(self, sizes: Mapping[str, int], at: Mapping[str, int]) -> None:
        super().__init__()
        self.sizes, self.at = sizes, at
        stages = sizes["pp"]
        names = {}
        for name in WHOLE:
            found = re.match(r"layers\.(\d+)\.(.*)", name)
            if found:
                stage, number = divmod(int(found[1]), LAYERS // stages)
                if stage == at["pp"]:
                    names[f"layers.{number}.{found[2]}"] = name
        if at["pp"] == 0:
            names["embed.weight"] = "embed.weight"
        if at["pp"] == stages - 1:
            names["norm.weight"] = "norm.weight"
            names["head.weight"] = "embed.weight"
        self.whole_names = names
        whole = {name: torch.empty(shape) for name, shape in WHOLE.items()}
        for name, whole_name in names.items():
            module, _, leaf = name.rpartition(".")
            holder: nn.Module = self
            for part in module.split("."):
                if part not in holder._modules:
                    holder.add_module(part, nn.Module())
                holder = holder._modules[part]  # type: ignore[assignment]
            local = self._local(name, whole[whole_name], state=False)
            holder.register_parameter(leaf, nn.Parameter(torch.full_like(local, -1.0)))
        if at["pp"] == 0 and stages == 1:
            self.head.weight = self.embed.weight

    def _local(self, name: str, whole: torch.Tensor, *, state: bool) -> torch.Tensor:
        return own(name, whole, self.sizes["tp"], self.at["tp"], state=state)

    def local(self, salt: int, *, state: bool = False) -> dict[str, torch.Tensor]:
        """This rank's part of `values(salt)` by own name."""
        whole = values(salt)
        return {
            name: self._local(name, whole[whole_name], state=state)
            for name, whole_name in self.whole_names.items()
        }


def spec(sizes: Mapping[str, int]) -> ucpstore.Spec:
    """One list of rules for every arrangement."""
    per_stage = LAYERS // sizes["pp"]

    def numbered(name: str, at: Mapping[str, int]) -> str:
        found = re.fullmatch(r"model\.layers\.(\d+)\.(.*)", name)
        assert found
        return f"model.layers.{int(found[1]) + at['pp'] * per_stage}.{found[2]}"

    layer = renamed(numbered)
    q, kv = HEADS * HEAD, KV_HEADS * HEAD
    vocabulary = [shard(0, "tp"), padded(0, VOCABULARY)]
    return ucpstore.Spec(
        sizes,
        {
            "model.embed.weight": vocabulary,
            "model.head.weight": [tied("model.embed.weight"), *vocabulary],
            "model.norm.weight": replicate("tp"),
            "model.layers.*.norm.weight": [layer, replicate("tp")],
            "model.layers.*.qkv.weight": [layer, shard(0, "tp", sections=(q, kv, kv), unit=HEAD)],
            "model.layers.*.out.weight": [layer, shard(1, "tp")],
            "model.layers.*.out.bias": [layer, scaled("tp")],
            "model.layers.*.gate_up.weight": [layer, shard(0, "tp", sections=(FFN, FFN))],
            re.compile(r"model\.layers\.\d+\.down\.weight"): [layer, shard(1, "tp")],
        },
        replicate=("dp",),
        unique=("pp",),
    )

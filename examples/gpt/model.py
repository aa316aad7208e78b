"""The network: the stage of a rank, its tensors cut over the axis `tp` as Megatron-LM cuts them.

With `Config(experts=...)` every second layer has a mixture of experts, spread over the axis `ep`.
"""

from __future__ import annotations

import zlib
from dataclasses import dataclass

import torch
import torch.nn.functional as F  # noqa: N812  # the name everyone knows it by
from torch import Tensor, nn

from gpt.data import SEQUENCES
from gpt.parallel import Arrangement, Axis, Place


@dataclass(frozen=True)
class Config:
    """Sizes. Queries have `heads` heads, which share `kv_heads` heads of keys and values.

    `experts` is the number of experts in each layer that has some; 0: no layer has.
    """

    layers: int = 4
    width: int = 32
    heads: int = 4
    kv_heads: int = 2
    head: int = 8
    ffn: int = 48
    vocabulary: int = 97
    tokens: int = 32
    experts: int = 0

    @property
    def qkv(self) -> tuple[int, int, int]:
        """Rows of the queries, keys and values in the fused projection."""
        return self.heads * self.head, self.kv_heads * self.head, self.kv_heads * self.head

    def rows(self, tp: int) -> int:
        """Rows of the embedding on each rank, the last of which may be padding."""
        return -(-self.vocabulary // tp)

    def has_experts(self, layer: int) -> bool:
        """Whether the layer of this global number is one with experts."""
        return self.experts > 0 and layer % 2 == 1

    def check(self, arrangement: Arrangement) -> None:
        """Refuse an arrangement that this model, or the batch that trains it, cannot have."""
        if (self.experts and self.experts < 3) or (self.experts == 0 and arrangement.ep > 1):
            raise ValueError(
                f"{self.experts} experts in a layer; a token goes to 2 of at least 3, and an "
                f"arrangement with ep (here {arrangement.ep}) needs some"
            )
        if self.experts and arrangement.zero == 3:
            # Dense parameters and experts are two rows, and one module is stored from one.
            raise ValueError("ZeRO-3 and experts do not go together here")
        for what, number, size in (
            ("layers", self.layers, arrangement.pp),
            ("heads of keys and values", self.kv_heads, arrangement.tp),
            ("heads", self.heads, arrangement.tp),
            ("units of the feed-forward network", self.ffn, arrangement.tp),
            ("experts", self.experts, arrangement.ep),
            ("tokens of a sequence", self.tokens, arrangement.sp),
            ("sequences of a batch", SEQUENCES, arrangement.dp),
        ):
            if number % size:
                raise ValueError(f"{number} {what} cannot be cut into {size} equal parts")


class Embedding(nn.Module):
    """Rows of the embedding on each rank; a token's row is one rank's."""

    def __init__(self, config: Config, place: Place) -> None:
        super().__init__()
        self.tp = place.tp
        self.weight = nn.Parameter(torch.empty(config.rows(place.tp.size), config.width))

    def forward(self, tokens: Tensor) -> Tensor:
        row = tokens - self.tp.place * len(self.weight)
        here = (row >= 0) & (row < len(self.weight))
        found = F.embedding(row.where(here, 0), self.weight)
        return self.tp.summed(found.masked_fill(~here.unsqueeze(-1), 0.0))


class Layer(nn.Module):
    """Attention and a feed-forward network, or a mixture of them; all end in a sum over `tp`."""

    def __init__(self, config: Config, place: Place, number: int) -> None:
        super().__init__()
        self.config, self.tp, self.sp = config, place.tp, place.sp
        width, tp = config.width, place.tp.size
        self.attention_norm = nn.RMSNorm(width, eps=1e-5)
        self.qkv = nn.Linear(width, sum(config.qkv) // tp, bias=False)
        self.out = nn.Linear(config.heads * config.head // tp, width)
        self.ffn_norm = nn.RMSNorm(width, eps=1e-5)
        self.ffn = (Mixture if config.has_experts(number) else FeedForward)(config, place)

    def forward(self, x: Tensor) -> Tensor:
        # Each rank adds its part of the bias of `out` before the sum: the bias divided by `tp`.
        x = x + self.tp.summed(self.out(self._attention(self.tp.copied(self.attention_norm(x)))))
        return x + self.ffn(self.ffn_norm(x))

    def _attention(self, x: Tensor) -> Tensor:
        """Heads of this rank for its part of the sequence, which sees all that is before it."""
        batch, own, _ = x.shape
        rows = [rows // self.tp.size for rows in self.config.qkv]
        q, k, v = (
            part.reshape(batch, own, -1, self.config.head).transpose(1, 2)
            for part in self.qkv(x).split(rows, -1)
        )
        at = torch.arange(own) + self.sp.place * own
        q, k = _rotated(q, at), _rotated(k, at)
        k, v = self.sp.joined(k, 2), self.sp.joined(v, 2)
        before = torch.arange(k.shape[2]) <= at.unsqueeze(1)
        seen = F.scaled_dot_product_attention(q, k, v, attn_mask=before, enable_gqa=True)
        return seen.transpose(1, 2).reshape(batch, own, -1)


class FeedForward(nn.Module):
    """SwiGLU."""

    def __init__(self, config: Config, place: Place) -> None:
        super().__init__()
        self.tp = place.tp
        self.gate_up = nn.Linear(config.width, 2 * config.ffn // place.tp.size, bias=False)
        self.down = nn.Linear(config.ffn // place.tp.size, config.width, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        gate, up = self.gate_up(self.tp.copied(x)).chunk(2, -1)
        return self.tp.summed(self.down(F.silu(gate) * up))


class Mixture(nn.Module):
    """Experts, of which each rank along `ep` has its own. A token goes to two, whoever has them.

    How much a token has of an expert is by how much that one's probability is above the third
    largest. So nothing jumps where the second and the third change places, and a run that rounds
    otherwise, as under another arrangement, stays near this one.
    """

    def __init__(self, config: Config, place: Place) -> None:
        super().__init__()
        self.ep = place.ep
        self.router = nn.Linear(config.width, config.experts, bias=False)
        own = config.experts // place.ep.size
        self.experts = nn.ModuleList(FeedForward(config, place) for _ in range(own))

    def forward(self, x: Tensor) -> Tensor:
        tokens = x.flatten(0, 1)
        weights = self.weights(tokens)
        # Each rank has its experts for the tokens of all ranks along `ep`, whose order is fixed.
        tokens = self.ep.joined(tokens, 0)
        weights = self.ep.share(self.ep.joined(weights, 0), 1)
        found = torch.zeros_like(tokens)
        for weight, expert in zip(weights.unbind(1), self.experts, strict=True):
            [chosen] = weight.nonzero(as_tuple=True)
            added = weight[chosen].unsqueeze(1) * expert(tokens[chosen])
            found = found.index_add(0, chosen, added)
        return self.ep.scattered(found).view_as(x)

    def weights(self, tokens: Tensor) -> Tensor:
        """Of each token (tokens, width) how much it has of each expert: (tokens, experts)."""
        probability = self.router(tokens).float().softmax(-1)
        third = probability.topk(3).values[:, 2:]
        return (probability - third).relu().to(tokens.dtype)


class Head(nn.Module):
    """The losses of this rank's tokens; rows of the vocabulary are cut as in the embedding."""

    def __init__(self, config: Config, place: Place) -> None:
        super().__init__()
        self.vocabulary, self.tp = config.vocabulary, place.tp
        self.norm = nn.RMSNorm(config.width, eps=1e-5)
        self.weight = nn.Parameter(torch.empty(config.rows(place.tp.size), config.width))

    def forward(self, x: Tensor, targets: Tensor) -> Tensor:
        logits = (self.tp.copied(self.norm(x)) @ self.weight.T).float()
        rows = len(self.weight)
        first = self.tp.place * rows
        padding = torch.arange(first, first + rows) >= self.vocabulary
        logits = logits.masked_fill(padding, -torch.inf)
        top = self.tp.maximum(logits.amax(-1))
        total = self.tp.summed((logits - top.unsqueeze(-1)).exp().sum(-1))
        row = targets - first
        here = (row >= 0) & (row < rows)
        found = logits.gather(-1, row.where(here, 0).unsqueeze(-1)).squeeze(-1)
        return total.log() + top - self.tp.summed(found.where(here, 0.0))


class Stage(nn.Module):
    """What one pipeline stage has, its layers numbered from 0, and so are its own experts."""

    def __init__(self, config: Config, place: Place) -> None:
        super().__init__()
        config.check(place.arrangement)
        last = place.pp.size - 1
        if place.pp.place == 0:
            self.embed = Embedding(config, place)
        first = place.pp.place * (config.layers // place.pp.size)
        numbers = range(first, first + config.layers // place.pp.size)
        self.layers = nn.ModuleList(Layer(config, place, number) for number in numbers)
        if place.pp.place == last:
            self.head = Head(config, place)
            if last == 0:
                self.head.weight = self.embed.weight
        with torch.no_grad():
            for name, parameter in self.named_parameters():
                parameter.copy_(_initial(config, _global_name(config, name, place), place.tp))


def _rotated(x: Tensor, at: Tensor) -> Tensor:
    """Rotary embedding of the positions `at`; `x` is (batch, heads, positions, head)."""
    half = x.shape[-1] // 2
    angle = at.unsqueeze(1) * 100.0 ** (-torch.arange(half) / half)
    cos, sin = angle.cos().to(x.dtype), angle.sin().to(x.dtype)
    left, right = x.chunk(2, -1)
    return torch.cat([left * cos - right * sin, right * cos + left * sin], -1)


# ---- first values, the same for every arrangement ------------------------------------------------


def whole_shapes(config: Config) -> dict[str, tuple[int, ...]]:
    """Names and shapes of the model that nobody has cut."""
    width = config.width
    ffn = {"gate_up.weight": (2 * config.ffn, width), "down.weight": (width, config.ffn)}
    found: dict[str, tuple[int, ...]] = {"embed.weight": (config.vocabulary, width)}
    for number in range(config.layers):
        layer = {
            "attention_norm.weight": (width,),
            "qkv.weight": (sum(config.qkv), width),
            "out.weight": (width, config.heads * config.head),
            "out.bias": (width,),
            "ffn_norm.weight": (width,),
        }
        if config.has_experts(number):
            layer["ffn.router.weight"] = (config.experts, width)
            for expert in range(config.experts):
                layer |= {f"ffn.experts.{expert}.{name}": shape for name, shape in ffn.items()}
        else:
            layer |= {f"ffn.{name}": shape for name, shape in ffn.items()}
        found |= {f"layers.{number}.{name}": shape for name, shape in layer.items()}
    return {**found, "head.norm.weight": (width,)}


def whole_tensor(config: Config, name: str) -> Tensor:
    """The first values of a whole tensor, drawn from its name."""
    shape = whole_shapes(config)[name]
    if name.endswith("norm.weight"):
        return torch.ones(shape)
    return (
        torch.randn(shape, generator=torch.Generator().manual_seed(zlib.crc32(name.encode()))) / 8
    )


def _global_name(config: Config, name: str, place: Place) -> str:
    if name == "head.weight":
        return "embed.weight"
    parts = name.split(".")
    if parts[0] == "layers":
        parts[1] = str(int(parts[1]) + place.pp.place * (config.layers // place.pp.size))
    if "experts" in parts:
        at = parts.index("experts") + 1
        parts[at] = str(int(parts[at]) + place.ep.place * (config.experts // place.ep.size))
    return ".".join(parts)


def _initial(config: Config, name: str, tp: Axis) -> Tensor:
    """This rank's block of a tensor."""
    whole = whole_tensor(config, name)
    if name == "embed.weight":
        more = config.rows(tp.size) * tp.size - config.vocabulary
        return tp.share(F.pad(whole, (0, 0, 0, more)))
    if name.endswith("qkv.weight"):
        return torch.cat([tp.share(section) for section in whole.split(config.qkv)])
    if name.endswith("gate_up.weight"):
        return torch.cat([tp.share(section) for section in whole.chunk(2)])
    if name.endswith(("out.weight", "down.weight")):
        return tp.share(whole, 1)
    if name.endswith("out.bias"):
        return whole / tp.size
    return whole

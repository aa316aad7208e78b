"""The state that all systems save: arrays with the shapes of a 1 B parameter transformer.

Weights are bfloat16, the two moments of each float32, all of them DTensors over one mesh axis.
"""

from __future__ import annotations

from collections.abc import Iterator

import torch
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Placement, Shard
from torch.distributed.tensor import empty as dtensor_empty

HIDDEN, INNER, VOCABULARY = 2048, 5632, 32000

Tree = dict[str, dict[str, DTensor]]
"""DTensors by item (`model`, `exp_avg`, `exp_avg_sq`) and name."""


def shapes(total_bytes: int) -> Iterator[tuple[str, tuple[int, ...]]]:
    """Names and shapes of parameters, as many as take up `total_bytes` with their moments."""
    left = total_bytes
    for name, shape in _model():
        size = 10  # bytes of one parameter: two of the weight, four of each moment
        for extent in shape:
            size *= extent
        if size <= left:
            left -= size
            yield name, shape


def _model() -> Iterator[tuple[str, tuple[int, ...]]]:
    for layer in range(22):
        prefix = f"layers.{layer}."
        for name in ("wq", "wk", "wv", "wo"):
            yield f"{prefix}attention.{name}.weight", (HIDDEN, HIDDEN)
        for name, shape in (
            ("w1", (INNER, HIDDEN)),
            ("w2", (HIDDEN, INNER)),
            ("w3", (INNER, HIDDEN)),
        ):
            yield f"{prefix}feed_forward.{name}.weight", shape
        for name in ("attention_norm", "ffn_norm"):
            yield f"{prefix}{name}.weight", (HIDDEN,)
    yield "embed.weight", (VOCABULARY, HIDDEN)


def build(total_bytes: int, mesh: DeviceMesh, *, columns: bool, fill: bool) -> Tree:
    """The state, split by rows, or by columns where an array has any.

    Filled with values that tell their place and their array; without `fill`, with -1, so that what
    a load leaves out shows.
    """
    tree: Tree = {"model": {}, "exp_avg": {}, "exp_avg_sq": {}}
    for number, (name, shape) in enumerate(shapes(total_bytes)):
        dim = 1 if columns and len(shape) > 1 else 0
        for item, dtype in (
            ("model", torch.bfloat16),
            ("exp_avg", torch.float32),
            ("exp_avg_sq", torch.float32),
        ):
            placements: list[Placement] = [Shard(dim)]
            tensor = dtensor_empty(*shape, dtype=dtype, device_mesh=mesh, placements=placements)
            local = tensor.to_local()
            if fill:
                local.copy_(_values(shape, dim, mesh, number))
            else:
                local.fill_(-1)
            tree[item][name] = tensor
    return tree


def _values(shape: tuple[int, ...], dim: int, mesh: DeviceMesh, number: int) -> torch.Tensor:
    """This rank's part of an array whose element (i, j) is a function of i, j and the array."""
    starts, extents = [0] * len(shape), list(shape)
    size = -(-shape[dim] // mesh.size())
    starts[dim] = min(mesh.get_local_rank() * size, shape[dim])
    extents[dim] = min(size, shape[dim] - starts[dim])
    axes = [
        torch.arange(start, start + extent, dtype=torch.float32)
        for start, extent in zip(starts, extents, strict=True)
    ]
    total = axes[0] * 31 + number
    return total if len(axes) == 1 else (total[:, None] + axes[1][None, :] * 7).remainder_(251)


def check(tree: Tree, total_bytes: int, mesh: DeviceMesh, *, columns: bool) -> None:
    """Raise where a value is not what `build` gives."""
    expected = build(total_bytes, mesh, columns=columns, fill=True)
    for item, tensors in tree.items():
        for name, tensor in tensors.items():
            if not torch.equal(tensor.to_local(), expected[item][name].to_local()):
                raise AssertionError(f"{item} {name}: loaded values differ")


def local_bytes(tree: Tree) -> int:
    """Bytes that this rank holds."""
    return sum(t.to_local().nbytes for tensors in tree.values() for t in tensors.values())


SLICED = ("model", "layers.0.attention.wq.weight", 64)
"""Item, name and number of rows of the slice that is read alone."""


def first_rows(tree: Tree) -> torch.Tensor:
    """The values of the slice, on rank 0, which holds them."""
    item, name, rows = SLICED
    return tree[item][name].to_local()[:rows].clone()

"""Field cases of saving: B02 to B10."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
import torch
import torch.distributed as dist
from cases.tools import attempt, bits, line, refuse_load, same, sharded, stored_bytes
from cases.tools import whole as gathered
from ranks.harness import Ranks
from torch import nn
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor, Shard

import ucpstore

# B02, B03: fewer elements than ranks.


class OneByOne(nn.Module):
    """Two parameters of one element each."""

    def __init__(self, weight: float, bias: float) -> None:
        super().__init__()
        self.linear = nn.Linear(1, 1)
        nn.init.constant_(self.linear.weight, weight)
        nn.init.constant_(self.linear.bias, bias)


def trained_pair(weight: float, bias: float, *, train: bool) -> tuple[nn.Module, nn.Module]:
    model = OneByOne(weight, bias)
    if dist.is_initialized():
        fully_shard(model, mesh=line())
    optimizer = torch.optim.Adam(model.parameters(), lr=0.25)
    if train:
        for parameter in model.parameters():
            parameter.grad = torch.ones_like(parameter)
        optimizer.step()
    return model, optimizer


def everything(model: nn.Module, optimizer: torch.optim.Optimizer) -> dict[str, bytes]:
    found = {}
    for name, parameter in model.named_parameters():
        found[name] = bits(gathered(parameter))
        for key, value in optimizer.state[parameter].items():
            found[f"{key} {name}"] = bits(gathered(value))
    return found


def save_one_element(url: str) -> dict[str, bytes]:
    model, optimizer = trained_pair(3.5, -1.0, train=True)
    one = sharded(torch.tensor([3.5]), line())
    ucpstore.save(url, {"model": model, "optim": optimizer, "one": one}, step=1)
    return everything(model, optimizer)


def load_one_element(url: str) -> tuple[dict[str, bytes], torch.Tensor, tuple[int, ...]]:
    model, optimizer = trained_pair(0.0, 0.0, train=False)
    one = torch.zeros(1)
    if dist.is_initialized():
        one = sharded(one, line())
    ucpstore.load(url, {"model": model, "optim": optimizer, "one": one})
    local = one.to_local() if isinstance(one, DTensor) else one
    return everything(model, optimizer), gathered(one), tuple(local.shape)


def test_b02_one_element_parameters_and_their_moments_reshard(ranks: Ranks, tmp_path: Path) -> None:
    url = str(tmp_path / "s")
    saved = ranks.run(4, save_one_element, url)
    assert saved[0]["linear.weight"] == bits(torch.tensor([3.25]))
    assert set(saved[0]) >= {f"{k} linear.bias" for k in ("step", "exp_avg", "exp_avg_sq")}
    for size in (1, 2, 3, 4):
        loaded = [load_one_element(url)] if size == 1 else ranks.run(size, load_one_element, url)
        for rank, (values, one, local) in enumerate(loaded):
            assert values == saved[0]
            assert same(one, torch.tensor([3.5]))
            assert local == ((1,) if rank == 0 else (0,))


def save_rows(url: str, tensor: torch.Tensor) -> None:
    ucpstore.save(url, {"m": {"a": sharded(tensor, line())}}, step=1)


def load_rows(url: str, like: torch.Tensor) -> tuple[torch.Tensor, tuple[int, ...]]:
    target = sharded(torch.zeros_like(like), line())
    ucpstore.load(url, {"m": {"a": target}})
    return gathered(target), tuple(target.to_local().shape)


@pytest.mark.parametrize(
    ("shape", "rows"), [((6,), [2, 2, 2, 0]), ((5, 3), [2, 2, 1, 0]), ((3, 2), [1, 1, 1, 0])]
)
def test_b03_six_elements_on_four_ranks_come_back_on_the_same_four(
    ranks: Ranks, tmp_path: Path, shape: tuple[int, ...], rows: list[int]
) -> None:
    url, tensor = str(tmp_path / "s"), torch.randn(shape)
    ranks.run(4, save_rows, url, tensor)
    loaded = ranks.run(4, load_rows, url, tensor)
    assert [local[0] for _, local in loaded] == rows
    assert all(same(full, tensor) for full, _ in loaded)
    target = torch.zeros(shape)
    ucpstore.load(url, {"m": {"a": target}})
    assert same(target, tensor)


# B04: the same key holds different plain values on each rank.


def save_different(url: str, kind: str) -> tuple[str, list[int]]:
    rank = dist.get_rank()
    values = {
        "tensor": torch.tensor([2.0 * rank, 2.0 * rank + 1]),
        "large": torch.full((600_000,), float(rank)),
        "array": np.array([rank, 7]),
        "shape": torch.zeros(2 + rank),
        "dtype": torch.zeros(2, dtype=[torch.float32, torch.bfloat16][rank]),
        "type": [torch.zeros(2), 0][rank],
        "0-d": torch.tensor(float(rank)),
        "python": rank,
        "one-ulp": torch.nextafter(torch.tensor([1.0]), torch.tensor([1.0 + rank])),
    }
    text = attempt(lambda: ucpstore.save(url, {"m": {"weight": values[kind]}}, step=1))
    dist.barrier()
    return text, ucpstore.CheckpointStore(url).steps()


@pytest.mark.parametrize(
    "kind", ["tensor", "large", "array", "shape", "dtype", "type", "0-d", "python", "one-ulp"]
)
def test_b04_plain_values_that_differ_between_ranks_are_refused(
    ranks: Ranks, tmp_path: Path, kind: str
) -> None:
    for text, steps in ranks.run(2, save_different, str(tmp_path / "s"), kind):
        assert steps == []
        assert text.startswith("StateError: ")
        assert "weight" in text
        assert "ank 0" in text or "anks 0 and 1" in text
        assert "PerRank" in text


def save_mixed(url: str) -> tuple[str, list[int]]:
    """A plain tensor on rank 0, a DTensor of the same shape on rank 1."""
    whole, mesh = torch.arange(4.0), line()
    tensor = sharded(whole, mesh) if dist.get_rank() else whole
    text = attempt(lambda: ucpstore.save(url, {"m": {"weight": tensor}}, step=1))
    dist.barrier()
    return text, ucpstore.CheckpointStore(url).steps()


def test_b04_plain_on_one_rank_and_sharded_on_the_other(ranks: Ranks, tmp_path: Path) -> None:
    for text, steps in ranks.run(2, save_mixed, str(tmp_path / "s")):
        assert "m/weight" in text
        assert steps == []


def per_rank_round_trip(url: str, by_pattern: bool) -> tuple[torch.Tensor, torch.Tensor]:
    value = torch.tensor([2 * dist.get_rank(), 2 * dist.get_rank() + 1])
    state: object = value if by_pattern else ucpstore.PerRank(value)
    pattern = ("m.weight",) if by_pattern else ()
    ucpstore.save(url, {"m": {"weight": state}}, step=1, per_rank=pattern)
    own = ucpstore.PerRank(torch.zeros(2, dtype=torch.int64))
    ucpstore.load(url, {"m": {"weight": own}})
    return value, own.value


@pytest.mark.parametrize("by_pattern", [False, True])
def test_b04_per_rank_gives_each_rank_its_own_back(
    ranks: Ranks, tmp_path: Path, by_pattern: bool
) -> None:
    results = ranks.run(2, per_rank_round_trip, str(tmp_path / "s"), by_pattern)
    assert [loaded.tolist() for _, loaded in results] == [[0, 1], [2, 3]]
    assert all(same(saved, loaded) for saved, loaded in results)


# B06: a small view of a big storage.


def test_b06_a_slice_is_stored_without_its_storage(tmp_path: Path) -> None:
    big = torch.randn(100, 100, 100, dtype=torch.float64)
    views = {
        "slice": big[0],
        "column": big[:, 3, 5],
        "strided": big[::10, ::10, ::10],
        "numpy": big.numpy()[1, :50],
    }
    for name, view in views.items():
        url = tmp_path / name
        ucpstore.save(url, {"a": view, "m": {"a": view}}, step=1)
        stored = stored_bytes(url)
        assert stored < 200_000
        saved = torch.as_tensor(view)
        for target in ({"a": torch.zeros_like(saved)}, {"m": {"a": torch.zeros_like(saved)}}):
            ucpstore.load(url, target)
            found = target.get("a", target.get("m"))
            assert same(found["a"] if isinstance(found, dict) else found, saved)


# B07: strides.


def strided() -> dict[str, torch.Tensor]:
    values = torch.complex(torch.randn(3, 4), torch.randn(3, 4))
    return {
        "channels_last": torch.randn(4, 8, 3, 3).to(memory_format=torch.channels_last),
        "channels_last_3d": torch.randn(2, 3, 4, 2, 2).to(memory_format=torch.channels_last_3d),
        "transposed": torch.randn(6, 4).t(),
        "every third": torch.arange(20)[::3],
        "expanded": torch.randn(1, 5).expand(4, 5),
        "expanded whole": torch.tensor(2.5).expand(3, 2),
        "bfloat16 transposed": torch.randn(6, 4).bfloat16().t(),
        "conjugated": values.conj(),
        "negated": values.conj().imag,
        "real": values.real,
        "empty transposed": torch.zeros(3, 0, 2).transpose(0, 2),
        "large transposed": torch.randn(700, 900).t(),
    }


def test_b07_strided_tensors_are_stored_in_logical_order(tmp_path: Path) -> None:
    saved = strided()
    ucpstore.save(tmp_path, {"m": saved}, step=1)
    plain = {name: torch.zeros(value.shape, dtype=value.dtype) for name, value in saved.items()}
    ucpstore.load(tmp_path, {"m": plain})
    assert [name for name in saved if not same(plain[name], saved[name])] == []


def test_b07_loading_keeps_the_strides_of_the_target(tmp_path: Path) -> None:
    saved = torch.randn(4, 8, 3, 3)
    ucpstore.save(tmp_path, {"m": {"w": saved, "v": torch.arange(12.0).reshape(3, 4)}}, step=1)
    base = torch.full((10, 8), -1.0)
    target = {
        "w": torch.zeros(4, 8, 3, 3).to(memory_format=torch.channels_last),
        "v": base[1:7:2, 1::2],
    }
    strides = {name: value.stride() for name, value in target.items()}
    ucpstore.load(tmp_path, {"m": target})
    assert {name: value.stride() for name, value in target.items()} == strides
    assert target["w"].is_contiguous(memory_format=torch.channels_last)
    assert same(target["w"], saved)
    assert base[1:7:2, 1::2].tolist() == [[0, 1, 2, 3], [4, 5, 6, 7], [8, 9, 10, 11]]
    assert int((base == -1).sum()) == 80 - 12


def test_b07_numpy_strides_and_byte_orders(tmp_path: Path) -> None:
    values = np.arange(12, dtype=np.int32).reshape(3, 4)
    saved = {
        "fortran": np.asfortranarray(values),
        "reversed": values[::-1, ::-1],
        "big-endian": values.astype(">i4"),
        "broadcast": np.broadcast_to(values[0], (3, 4)),
    }
    ucpstore.save(tmp_path, {"m": saved}, step=1)
    target = {
        "fortran": np.zeros((3, 4), np.int32, order="F"),
        "reversed": np.zeros((3, 4), np.int32)[::-1, ::-1],
        "big-endian": np.zeros((3, 4), ">i4"),
        "broadcast": np.zeros((3, 4), np.int32),
    }
    ucpstore.load(tmp_path, {"m": target})
    for name, value in target.items():
        assert value.tolist() == saved[name].tolist(), name
    assert target["fortran"].flags.f_contiguous
    assert target["big-endian"].dtype == np.dtype(">i4")


def test_b07_an_expanded_target_is_refused(tmp_path: Path) -> None:
    ucpstore.save(tmp_path, {"m": {"w": torch.randn(4, 5)}}, step=1)
    refuse_load(tmp_path, {"m": {"w": torch.zeros(1, 5).expand(4, 5)}}, "m.w", "contiguous()")


def transposed_local(url: str, values: torch.Tensor) -> tuple[torch.Tensor, tuple[int, ...]]:
    mesh = line()
    mine = values.chunk(2)[dist.get_rank()]
    local = mine.t().contiguous().t()
    assert local.stride() == (1, mine.shape[0])
    tensor = DTensor.from_local(local, mesh, [Shard(0)], run_check=False)
    ucpstore.save(url, {"m": {"w": tensor}}, step=1)
    target = DTensor.from_local(torch.zeros(2, 3).t(), mesh, [Shard(0)], run_check=False)
    ucpstore.load(url, {"m": {"w": target}})
    return gathered(target), target.to_local().stride()


def test_b07_a_dtensor_with_a_transposed_local_part(ranks: Ranks, tmp_path: Path) -> None:
    values = torch.randn(6, 2)
    for full, stride in ranks.run(2, transposed_local, str(tmp_path / "s"), values):
        assert same(full, values)
        assert stride == (1, 3)


# B08: empty tensors, all at address 0.


def empties() -> dict[str, torch.Tensor]:
    return {
        "A": torch.tensor([]),
        "B": torch.tensor([]),
        "C": torch.zeros(3, 0, 2),
        "D": torch.zeros(0, 4, dtype=torch.bfloat16),
    }


def test_b08_empty_tensors_are_not_tied(tmp_path: Path) -> None:
    ucpstore.save(tmp_path, {"m": empties(), **empties()}, step=1)
    opened = ucpstore.CheckpointStore(tmp_path).open()
    assert sorted(opened["m"]) == ["A", "B", "C", "D"]
    for name, value in empties().items():
        for array in (opened["m"][name], opened[name]):
            assert array.shape == tuple(value.shape)
            assert array.dtype == value.dtype
            assert array.path.endswith(name)
    target = empties()
    ucpstore.load(tmp_path, {"m": target})
    assert all(same(target[name], value) for name, value in empties().items())
    target["A"].resize_(3).fill_(1)
    assert target["B"].shape == (0,)


def test_b08_saving_and_loading_leave_storages_resizable(tmp_path: Path) -> None:
    state = {"m": {"a": torch.ones(3), "b": torch.tensor(2.0)}}
    own = torch.ones(4)
    ucpstore.save(tmp_path, {**state, "own": ucpstore.PerRank([own])}, step=1)
    ucpstore.load(tmp_path, state)
    for tensor in (*state["m"].values(), own):
        tensor.untyped_storage().resize_(64)


class Empties(nn.Module):
    """Two parameters without elements, and two of one element."""

    def __init__(self) -> None:
        super().__init__()
        self.a, self.b = nn.Parameter(torch.zeros(0, 3)), nn.Parameter(torch.zeros(0, 3))
        self.c, self.d = nn.Parameter(torch.tensor([1.0])), nn.Parameter(torch.tensor([2.0]))


def save_empty_shards(url: str) -> list[tuple[int, ...]]:
    model = Empties()
    fully_shard(model, mesh=line())
    ucpstore.save(url, {"model": model}, step=1)
    return [tuple(parameter.to_local().shape) for parameter in model.parameters()]


def test_b08_empty_local_shards_are_not_tied(ranks: Ranks, tmp_path: Path) -> None:
    shapes = ranks.run(3, save_empty_shards, str(tmp_path / "s"))
    assert shapes[2] == [(0, 3), (0, 3), (0,), (0,)]
    opened = ucpstore.CheckpointStore(tmp_path / "s").open()
    assert {name: array.shape for name, array in opened["model"].items()} == {
        "a": (0, 3),
        "b": (0, 3),
        "c": (1,),
        "d": (1,),
    }
    model = Empties()
    nn.init.zeros_(model.c)
    nn.init.zeros_(model.d)
    ucpstore.load(tmp_path / "s", {"model": model})
    assert (model.c.item(), model.d.item()) == (1.0, 2.0)


# B09: 0-d tensors.


def zero_dim() -> dict[str, torch.Tensor]:
    return {
        "step": torch.tensor(7.0),
        "flag": torch.tensor(True),
        "big": torch.tensor(2**40),
        "bf16": torch.tensor(1.5, dtype=torch.bfloat16),
        "nan": torch.tensor(float("nan")),
        "minus": torch.tensor(-0.0, dtype=torch.float64),
        "complex": torch.tensor(complex(-0.0, 2)),
    }


class Scaled(nn.Module):
    """A 0-d parameter and 0-d buffers of several dtypes."""

    def __init__(self) -> None:
        super().__init__()
        self.scale = nn.Parameter(torch.tensor(2.5))
        for name, value in zero_dim().items():
            self.register_buffer(name, value)


def zero_dim_round_trip(url: str) -> list[str]:
    model = Scaled()
    ucpstore.save(url, {"model": model, "m": zero_dim(), **zero_dim()}, step=1)
    other = Scaled()
    target = {name: torch.zeros_like(value) for name, value in zero_dim().items()}
    for tensor in [*other.parameters(), *other.buffers()]:
        tensor.detach().zero_()
    top = {name: torch.zeros_like(value) for name, value in zero_dim().items()}
    state = {"model": other, "m": dict(target), **top}
    ucpstore.load(url, state)
    wrong = [f"model {k}" for k, v in other.named_buffers() if not same(v, zero_dim()[k])]
    wrong += [f"m {k}" for k, v in zero_dim().items() if not same(state["m"][k], v)]
    wrong += [k for k, v in zero_dim().items() if not same(state[k], v)]
    wrong += [f"not in place: {k}" for k in target if state["m"][k] is not target[k]]
    wrong += [] if same(other.scale, torch.tensor(2.5)) else ["scale"]
    return wrong


def test_b09_zero_dim_tensors_stay_zero_dim(ranks: Ranks, tmp_path: Path) -> None:
    assert zero_dim_round_trip(str(tmp_path / "one")) == []
    assert ranks.run(2, zero_dim_round_trip, str(tmp_path / "two")) == [[], []]


def test_b09_one_element_and_zero_dim_are_different_shapes(tmp_path: Path) -> None:
    ucpstore.save(tmp_path, {"m": {"a": torch.tensor(7.0), "b": torch.tensor([7.0])}}, step=1)
    text = refuse_load(tmp_path, {"m": {"a": torch.zeros(1), "b": torch.zeros(())}}, "m.a", "m.b")
    assert text.count("()") == 2


# B10: tied parameters.


class Tied(nn.Module):
    """An embedding and a head that may share one weight."""

    def __init__(self, *, tied: bool) -> None:
        super().__init__()
        self.emb = nn.Embedding(11, 4)
        self.head = nn.Linear(4, 11, bias=False)
        if tied:
            self.head.weight = self.emb.weight

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        return self.head(self.emb(tokens))


def tied_run(seed: int, *, tied: bool, train: bool) -> tuple[Tied, torch.optim.Optimizer]:
    torch.manual_seed(seed)
    model = Tied(tied=tied)
    if dist.is_initialized():
        fully_shard(model, mesh=line())
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.1)
    if train:
        model(torch.arange(11)).square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()
    return model, optimizer


def tied_round_trip(url: str) -> dict[str, object]:
    model, optimizer = tied_run(1, tied=True, train=True)
    ucpstore.save(url, {"model": model, "optim": optimizer}, step=1)
    other, again = tied_run(2, tied=True, train=False)
    report = ucpstore.load(url, {"model": other, "optim": again})
    return {
        "names": (report.missing, report.unexpected),
        "tied": other.head.weight is other.emb.weight,
        "weight": same(gathered(other.emb.weight), gathered(model.emb.weight)),
        "states": len(again.state),
        "moments": all(
            same(gathered(value), gathered(optimizer.state[model.emb.weight][key]))
            for key, value in again.state[other.emb.weight].items()
        ),
        "keys": sorted(again.state[other.emb.weight]),
        "saved": bits(gathered(model.emb.weight)),
    }


@pytest.mark.parametrize("size", [1, 2])
def test_b10_a_tied_model_stays_tied(ranks: Ranks, tmp_path: Path, size: int) -> None:
    url = str(tmp_path / "s")
    found = [tied_round_trip(url)] if size == 1 else ranks.run(size, tied_round_trip, url)
    for each in found:
        saved = each.pop("saved")
        assert each == {
            "names": ((), ()),
            "tied": True,
            "weight": True,
            "states": 1,
            "moments": True,
            "keys": ["exp_avg", "exp_avg_sq", "step"],
        }
    opened = ucpstore.CheckpointStore(url).open()["model"]
    assert list(opened) == ["emb.weight", "head.weight"]
    assert opened["head.weight"].path == opened["emb.weight"].path
    untied, optimizer = tied_run(3, tied=False, train=False)
    ucpstore.load(url, {"model": untied, "optim": optimizer})
    assert untied.head.weight is not untied.emb.weight
    assert bits(untied.head.weight) == bits(untied.emb.weight) == saved
    states = [optimizer.state[p] for p in (untied.emb.weight, untied.head.weight)]
    assert bits(states[0]["exp_avg"]) == bits(states[1]["exp_avg"])
    assert states[0]["exp_avg"] is not states[1]["exp_avg"]


def test_b10_untied_values_into_a_tied_model_are_refused(tmp_path: Path) -> None:
    model, optimizer = tied_run(1, tied=False, train=True)
    ucpstore.save(tmp_path, {"model": model, "optim": optimizer}, step=1)
    tied, _ = tied_run(2, tied=True, train=False)
    refuse_load(tmp_path, {"model": tied}, "model.emb.weight", "model.head.weight", "tied")
    refuse_load(tmp_path, {"model": tied}, "model.head.weight", strict=False)
    tied, optimizer = tied_run(2, tied=True, train=True)
    refuse_load(tmp_path, {"model": tied, "optim": optimizer}, "model.head.weight")


def test_b10_names_that_share_only_part_of_their_memory(tmp_path: Path) -> None:
    base = torch.arange(12.0)
    parts = {"whole": base, "first": base[:6], "rows": base.view(3, 4), "again": base}
    ucpstore.save(tmp_path, {"m": parts}, step=1)
    target = {name: torch.zeros_like(value) for name, value in parts.items()}
    ucpstore.load(tmp_path, {"m": target})
    assert all(same(target[name], value) for name, value in parts.items())
    opened = ucpstore.CheckpointStore(tmp_path).open()["m"]
    names = {name: array.path.rsplit("/")[-1] for name, array in opened.items()}
    assert names == {"whole": "whole", "first": "first", "rows": "rows", "again": "whole"}
    refuse_load(tmp_path, {"m": parts}, "overlap")

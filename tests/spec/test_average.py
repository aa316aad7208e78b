"""Replicas that have drifted apart: their mean is stored, of parameters and moments alike."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from ranks.harness import Ranks
from torch import nn

import ucpstore
from ucpstore import Options, Spec
from ucpstore.spec import average, replicate, shard, tied, unique

LARGE = (900, 700)


def drifted(shape: tuple[int, ...], dtype: torch.dtype, rank: int, salt: int) -> torch.Tensor:
    generator = torch.Generator().manual_seed(100 * rank + salt)
    return torch.randn(shape, generator=generator, dtype=torch.float64).to(dtype)


def mean(shape: tuple[int, ...], dtype: torch.dtype, ranks: range, salt: int) -> torch.Tensor:
    total = torch.zeros(shape, dtype=torch.float64)
    for rank in ranks:
        total += drifted(shape, dtype, rank, salt)
    return (total / len(ranks)).to(dtype)


class Net(nn.Module):
    def __init__(self, rank: int) -> None:
        super().__init__()
        self.large = nn.Parameter(drifted(LARGE, torch.float32, rank, 1))
        self.small = nn.Parameter(drifted((5, 3), torch.bfloat16, rank, 2))
        self.same = nn.Parameter(drifted((3,), torch.float32, 0, 3))
        self.one = nn.Parameter(drifted((), torch.float32, rank, 4))


def job(rank: int) -> tuple[Net, torch.optim.SGD]:
    net = Net(rank)
    optim = torch.optim.SGD(net.parameters(), lr=0.1, momentum=0.9)
    for salt, parameter in enumerate(net.parameters(), 11):
        shape = tuple(parameter.shape)
        optim.state[parameter] = {
            "momentum_buffer": drifted(shape, parameter.dtype, rank, salt),
            "step": torch.tensor(3.0),
        }
    return net, optim


def spec(size: int) -> Spec:
    return Spec({"dp": size}, {"model.*": average("dp")})


def save(url: str) -> None:
    net, optim = job(dist.get_rank())
    rules = spec(dist.get_world_size())
    before = net.large.detach().clone()
    options = Options(budget_bytes=16 * 2**20)
    ucpstore.save(url, {"model": net, "optim": optim}, step=1, spec=rules, options=options)
    assert torch.equal(net.large, before), "the job's own values stay as they are"


@pytest.mark.parametrize("size", [1, 2, 3])
def test_the_mean_of_all_is_stored_bit_for_bit(ranks: Ranks, tmp_path: Path, size: int) -> None:
    url = str(tmp_path / "s")
    ranks.run(size, save, url)
    step, everyone = ucpstore.CheckpointStore(url).open(), range(size)
    expected = {
        "model/large": mean(LARGE, torch.float32, everyone, 1),
        "model/small": mean((5, 3), torch.bfloat16, everyone, 2),
        "model/same": drifted((3,), torch.float32, 0, 3),
        "model/one": mean((), torch.float32, everyone, 4),
        "optim/momentum_buffer/large": mean(LARGE, torch.float32, everyone, 11),
        "optim/momentum_buffer/small": mean((5, 3), torch.bfloat16, everyone, 12),
        "optim/momentum_buffer/same": mean((3,), torch.float32, everyone, 13),
        "optim/momentum_buffer/one": mean((), torch.float32, everyone, 14),
    }
    if size == 1:  # then a 0-d state is a value of the tree, as without a specification
        del expected["optim/momentum_buffer/one"]
    for path, value in expected.items():
        item, _, name = path.partition("/")
        assert torch.equal(step[item][name].read(), value), path


def save_blocks(url: str) -> None:
    """Two tensor parallel halves, each averaged over two data parallel ranks."""
    rank = dist.get_rank()
    dp, tp = divmod(rank, 2)
    local = drifted((6, 4), torch.float32, rank, 5)
    rules = Spec({"dp": 2, "tp": 2}, {"m.w": [shard(1, "tp"), average("dp")]})
    ucpstore.save(url, {"m": {"w": local}}, step=1, spec=rules)
    target = torch.empty(6, 4)
    ucpstore.load(url, {"m": {"w": target}}, spec=rules)
    both = (drifted((6, 4), torch.float32, other, 5) for other in (tp, 2 + tp))
    assert torch.equal(target, (sum(each.double() for each in both) / 2).float()), (dp, tp)


def test_blocks_are_averaged_over_their_own_holders(ranks: Ranks, tmp_path: Path) -> None:
    ranks.run(4, save_blocks, str(tmp_path / "s"))


def refused(url: str) -> str:
    rules = Spec({"dp": 2}, {"m.w": average("dp"), "m.v": replicate("dp")})
    try:
        ucpstore.save(url, {"m": {"w": torch.arange(3)}}, step=1, spec=rules)
    except ucpstore.UnsupportedError as error:
        return str(error)
    return "saved"


def test_whole_numbers_are_not_averaged(ranks: Ranks, tmp_path: Path) -> None:
    for told in ranks.run(2, refused, str(tmp_path / "s")):
        assert "m.w: rule 'm.w': average is for floats of 16 bits and more" in told
        assert "the tensor has dtype int64" in told
    assert not (tmp_path / "s").exists()


def disagree(url: str) -> str:
    rule = average("dp") if dist.get_rank() else replicate("dp")
    try:
        ucpstore.save(url, {"m": {"w": torch.ones(3)}}, step=1, spec=Spec({"dp": 2}, {"m.w": rule}))
    except ucpstore.StateError as error:
        return str(error)
    return "saved"


def test_ranks_must_agree_whether_to_average(ranks: Ranks, tmp_path: Path) -> None:
    for told in ranks.run(2, disagree, str(tmp_path / "s")):
        assert "m/w: ranks disagree about its mean" in told


def save_tied(url: str) -> list[float]:
    """The embedding of the first stage and the head of the last are one tensor, drifted over dp."""
    rank = dist.get_rank()
    name = "eh"[rank // 2]
    rules = Spec(
        {"pp": 2, "dp": 2},
        {
            "m.e": [unique("pp"), average("dp")],
            "m.h": [tied("m.e"), unique("pp"), average("dp")],
        },
    )
    net = nn.Module()
    net.register_parameter(name, nn.Parameter(torch.full((2,), 1.0 + 2 * (rank % 2))))
    ucpstore.save(url, {"m": net}, step=1, spec=rules)
    with torch.no_grad():
        net.get_parameter(name).zero_()
    ucpstore.load(url, {"m": net}, spec=rules)
    return net.get_parameter(name).tolist()


def test_tied_replicas_are_averaged_and_not_compared(ranks: Ranks, tmp_path: Path) -> None:
    assert ranks.run(4, save_tied, str(tmp_path / "s")) == [[2.0, 2.0]] * 4

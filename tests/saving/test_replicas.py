"""Values that several ranks hold under one name: replicas, or different tensors by mistake."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from ranks.harness import Ranks
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Replicate, Shard

import ucpstore
from ucpstore.manage.open import Item
from ucpstore.saving import replicas

ROWS = 600


def outcome(url: str, tensor: torch.Tensor, step: int = 1) -> str:
    try:
        ucpstore.save(url, {"m": {"w": tensor}}, step=step)
    except ucpstore.StateError as error:
        return str(error)
    finally:
        dist.barrier()
    return "saved"


def save_on_two_meshes(url: str, kind: str, values: tuple[float, ...]) -> list[str]:
    """One save for each of `values`: of a tensor that lies on `dp` alone of a mesh (ep=2, dp=2).

    The first of the two `dp` meshes holds zeros, the second the value.
    """
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("ep", "dp"))
    at, dp = mesh.get_local_rank("ep"), mesh["dp"]
    found = []
    for step, value in enumerate(values, 1):
        rows = 4 if kind == "small" else ROWS
        local = torch.full((rows, 1024), value if at else 0.0)
        tensor: torch.Tensor = local
        if kind != "plain on one" or at == 0:
            is_whole = kind == "plain on one"
            placement = Replicate() if is_whole else Shard(0)
            tensor = DTensor.from_local(local, dp, [placement], run_check=False)
        found.append(outcome(url, tensor, step))
    return found


@pytest.mark.parametrize("kind", ["small", "large", "plain on one"])
def test_different_tensors_of_one_name_on_two_meshes_are_refused(
    ranks: Ranks, tmp_path: Path, kind: str
) -> None:
    for told in ranks.run(4, save_on_two_meshes, str(tmp_path / "s"), kind, (1.0,)):
        assert "m/w: ranks 0 and 2 hold different values" in told[0]
    assert ucpstore.CheckpointStore(tmp_path / "s").steps() == []
    assert not list((tmp_path / "s" / "work").glob("*/"))


@pytest.mark.parametrize(("kind", "second"), [("small", "different values"), ("large", "saved")])
def test_replicas_on_two_meshes_are_saved_and_small_ones_compared_every_time(
    ranks: Ranks, tmp_path: Path, kind: str, second: str
) -> None:
    url = str(tmp_path / "s")
    for told in ranks.run(4, save_on_two_meshes, url, kind, (0.0, 1.0)):
        assert told[0] == "saved"
        assert second in told[1]
    stored = ucpstore.CheckpointStore(url).open(1)["m"]
    assert isinstance(stored, Item)
    assert torch.equal(stored["w"].read(), torch.zeros(stored["w"].shape))


def test_a_process_on_its_own_compares_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    def never(*_: object) -> str:
        raise AssertionError("there is nothing to compare with")

    monkeypatch.setattr(replicas, "_digest", never)
    ucpstore.save("memory://alone", {"m": {"w": torch.ones(4)}}, step=1, check_replicas="always")


def save_in_part_and_whole(url: str) -> str:
    """Rank 2 has another tensor than ranks 0 and 1, who save first without it and then with it."""
    rank = dist.get_rank()
    tensor = torch.full((ROWS, 1024), float(rank == 2))
    some = dist.new_group([0, 1])
    if rank < 2:
        ucpstore.save(url, {"m": {"w": tensor}}, step=1, process_group=some)
    return outcome(url, tensor, 2)


def test_a_save_by_some_of_the_ranks_is_no_comparison_of_all(ranks: Ranks, tmp_path: Path) -> None:
    for told in ranks.run(3, save_in_part_and_whole, str(tmp_path / "s")):
        assert "m/w: ranks 0 and 2 hold different values" in told

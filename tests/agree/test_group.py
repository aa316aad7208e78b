"""Groups: which ranks take part, and what is refused."""

from __future__ import annotations

import subprocess
import sys

import pytest
import torch.distributed as dist
from ranks.harness import Ranks

from ucpstore.agree import group_of, local_group
from ucpstore.errors import AgreementError
from ucpstore.options import Options


def test_without_a_process_group_a_process_is_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("WORLD_SIZE", "8")
    monkeypatch.setenv("RANK", "5")
    group = group_of(None)
    assert (group.rank, group.size, group.global_ranks) == (0, 1, (0,))
    assert not group.distributed


def test_a_process_alone_does_not_import_torch() -> None:
    code = (
        "import sys; from ucpstore.agree import group_of; group_of(); print('torch' in sys.modules)"
    )
    shown = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert shown.stdout == "False\n"


def test_a_group_is_passed_through() -> None:
    group = local_group(3)[1]
    assert group_of(group) is group
    assert (group.rank, group.size, group.global_ranks) == (1, 3, (0, 1, 2))


def test_what_is_no_process_group_is_refused() -> None:
    with pytest.raises(AgreementError, match=r"but it is a int; of a DeviceMesh, pass mesh"):
        group_of(3)  # type: ignore[arg-type]
    with pytest.raises(AgreementError, match="not a member"):
        group_of(dist.GroupMember.NON_GROUP_MEMBER)


def facts_of_groups() -> tuple[object, ...]:
    world = group_of(None)
    some = dist.new_group([2, 0])
    facts: tuple[object, ...] = (world.rank, world.size, world.global_ranks, group_of() is world)
    if dist.get_rank() == 1:
        try:
            group_of(some)
        except AgreementError as error:
            return (*facts, str(error))
    member = group_of(some)
    return (*facts, (member.rank, member.size, member.global_ranks))


def test_members_know_their_place_and_others_are_refused(ranks: Ranks) -> None:
    facts = ranks.run(3, facts_of_groups)
    refusal = (
        "this process is not a member of the process group it was given; "
        "call it on the members only"
    )
    assert facts == [
        (0, 3, (0, 1, 2), True, (0, 2, (0, 2))),
        (1, 3, (0, 1, 2), True, refusal),
        (2, 3, (0, 1, 2), True, (1, 2, (0, 2))),
    ]


def group_without_a_store() -> str:
    from torch.distributed import distributed_c10d as c10d

    other = dist.new_group()
    backend, _ = c10d._world.pg_map[other]
    c10d._world.pg_map[other] = (backend, None)  # as the MPI backend leaves it
    try:
        group_of(other)
    except AgreementError as error:
        return str(error)
    return ""


def test_a_group_without_a_key_value_store_is_refused_with_advice(ranks: Ranks) -> None:
    for text in ranks.run(2, group_without_a_store):
        assert "(backend gloo) has no key-value store" in text
        assert "initialise torch.distributed with a TCPStore, as torchrun does" in text


def group_over_its_life() -> list[str]:
    options, seen = Options(), []
    for _ in range(2):
        group = dist.new_group()
        with group_of(group).call("save", options) as call:
            call.round("begin", lambda: b"", lambda answers: b"", timeout_s=20)
        dist.destroy_process_group(group)
        try:
            with group_of(group).call("save", options) as call:
                call.round("begin", lambda: b"", lambda answers: b"", timeout_s=20)
            seen.append("still usable")
        except AgreementError as error:
            seen.append(str(error).split(";")[0])
    return seen


def test_a_destroyed_group_is_refused(ranks: Ranks) -> None:
    expected = "the process group is not initialised, or was destroyed"
    assert ranks.run(2, group_over_its_life) == [[expected] * 2] * 2

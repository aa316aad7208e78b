"""Live DeepSpeed engines, saved and loaded across stages, sizes and kinds."""

from __future__ import annotations

from importlib import metadata
from pathlib import Path

import pytest
from ranks.harness import Ranks

try:
    metadata.version("deepspeed")  # ranks import it, which takes seconds
except metadata.PackageNotFoundError:
    pytest.skip("needs the extra `deepspeed`", allow_module_level=True)

from cells import run, sample  # beside this file
from other_jobs import (  # beside this file
    experts,
    load_from_other,
    load_other,
    refusals,
    refusals_on_nvme,
    round_trip_as_an_item,
    save_one_group,
    save_other,
    train_what_was_frozen,
    two_jobs,
    within_a_step,
    without_an_optimizer,
)
from zero_job import Kind, continue_run, differences, load_run, save_run  # beside this file

NAMES = {"embed.weight", "first.weight", "first.bias", "last.weight", "last.bias", "scale"}


def test_a_sample_of_the_pairs(zero_ranks: Ranks, tmp_path: Path) -> None:
    found = run(zero_ranks, sample(4, 6), tmp_path)
    assert len(found) == 6
    assert {pair: wrong for pair, wrong in found.items() if wrong} == {}


@pytest.mark.parametrize(
    ("source", "target"),
    [
        (Kind(1, round_robin=True), Kind(2)),
        (Kind(2), Kind(1, round_robin=True)),
        (Kind(3, persistent=1000), Kind(1, fp32_gradients=True)),
        (Kind(1, fp32_gradients=True), Kind(3, persistent=1000)),
        (Kind(0, fused=True), Kind(1)),
        (Kind(3), Kind(0, fused=True)),
        (Kind(0, "fp32"), Kind(2, "fp32", round_robin=True)),
        (Kind(3, "fp32"), Kind(1, "fp32")),
        (Kind(1, "fp32"), Kind(3, "fp32", persistent=1000)),
        (Kind(3, "fp32", persistent=1000), Kind(0, "fp32")),
    ],
    ids=str,
)
def test_kinds(zero_ranks: Ranks, tmp_path: Path, source: Kind, target: Kind) -> None:
    url = str(tmp_path / "s")
    saved = zero_ranks.run(2, save_run, url, source)[0]
    assert saved[0].keys() == saved[1]["exp_avg"].keys() == NAMES
    assert saved[2].keys() == NAMES | {"frozen.weight", "table"}
    for told, wrong in zero_ranks.run(3, load_run, url, target):
        assert differences(saved, told) == []
        assert wrong == []


def test_other_dtypes_keep_masters_and_moments(zero_ranks: Ranks, tmp_path: Path) -> None:
    """fp32 to bf16 and back: what is bf16 is its master's rounding, masters stay as they were."""
    url = str(tmp_path / "s")
    saved = zero_ranks.run(2, save_run, url, Kind(1))[0]
    for told, wrong in zero_ranks.run(2, load_run, url, Kind(3, "fp32")):
        assert [each for each in differences(saved, told) if "parameter" not in each] == []
        assert wrong == []


@pytest.mark.parametrize("kind", [Kind(1), Kind(3), Kind(0), Kind(2, warmup=True)], ids=str)
def test_training_goes_on_bit_for_bit(zero_ranks: Ranks, tmp_path: Path, kind: Kind) -> None:
    url = str(tmp_path / "s")
    zero_ranks.run(2, save_run, url, kind)
    assert zero_ranks.run(2, continue_run, url, kind) == [[True]] * 2


@pytest.mark.parametrize("sharded", [False, True], ids=["plain", "fsdp2"])
@pytest.mark.parametrize("kind", [Kind(1), Kind(3)], ids=str)
def test_jobs_without_deepspeed_load_an_engine_and_the_reverse(
    zero_ranks: Ranks, tmp_path: Path, kind: Kind, sharded: bool
) -> None:
    url, other = str(tmp_path / "engine"), str(tmp_path / "other")
    count = 3 if sharded else 1
    told = zero_ranks.run(2, save_one_group, url, kind)[0]
    assert zero_ranks.run(count, load_other, url, told, sharded) == [[]] * count
    zero_ranks.run(count, save_other, other, told, sharded)
    for found in zero_ranks.run(2, load_from_other, other, kind):
        assert differences(told, found) == []


def test_an_engine_as_an_item_and_by_the_names_of_deepspeed(
    zero_ranks: Ranks, tmp_path: Path
) -> None:
    found = zero_ranks.run(2, round_trip_as_an_item, str(tmp_path / "s"))
    assert found == [["epoch 7, seen 11, step 2, samples 4"]] * 2


@pytest.mark.parametrize("kind", [Kind(2), Kind(3)], ids=str)
def test_b22_an_engine_trains_what_was_frozen(
    zero_ranks: Ranks, tmp_path: Path, kind: Kind
) -> None:
    found = zero_ranks.run(2, train_what_was_frozen, str(tmp_path), kind)
    for message, missing, wrong in found:
        assert "(1 difference)" in message
        assert "not in the checkpoint: optim.frozen.weight" in message
        assert missing == ["optim.frozen.weight"]
        assert wrong == []


def test_what_has_no_form_is_refused(zero_ranks: Ranks, tmp_path: Path) -> None:
    url = tmp_path / "never"
    for found in zero_ranks.run(2, refusals, str(url)):
        assert "does not go together with a specification; leave spec out" in found[0]
        assert "its optimizer is a DeepSpeedZeroOptimizer of fp16" in found[1]
        assert "the names in a PipelineEngine are those of its stage" in found[2]
    assert not url.exists()


def test_parameters_on_nvme_are_refused(zero_ranks: Ranks, tmp_path: Path) -> None:
    url = tmp_path / "never"
    for found in zero_ranks.run(2, refusals_on_nvme, str(url)):
        assert "with states or parameters on NVMe" in found[0]
        assert "this rank's part has 1 elements in memory; parameters on NVMe" in found[1]
    assert not url.exists()


@pytest.mark.parametrize("stage", [0, 2, 3])
def test_engines_are_saved_and_loaded_between_steps(
    zero_ranks: Ranks, tmp_path: Path, stage: int
) -> None:
    text = "it has accumulated 1 of the 2 micro-batches of a step, whose gradients are not stored"
    url = str(tmp_path / "s")
    for found in zero_ranks.run(2, within_a_step, url, Kind(stage, accumulate=2)):
        assert text in found[0]
        assert text in found[1]
        assert found[2:] == ["1 steps, 0 micro-batches"]


@pytest.mark.parametrize("stage", [0, 3])
def test_engines_without_an_optimizer(zero_ranks: Ranks, tmp_path: Path, stage: int) -> None:
    for items in zero_ranks.run(2, without_an_optimizer, str(tmp_path / "s"), Kind(stage)):
        assert set(items) == {"model", "counters"}


@pytest.mark.parametrize(
    "kind", [Kind(0, fused=True), Kind(0), Kind(1), Kind(3)], ids=["fused", "0", "1", "3"]
)
def test_an_engine_on_a_part_of_the_ranks(zero_ranks: Ranks, tmp_path: Path, kind: Kind) -> None:
    """Its rows lie on the ranks of its own group, not on those of the default one."""
    assert zero_ranks.run(4, two_jobs, str(tmp_path / "s"), kind) == [[]] * 4


def test_experts_of_several_ranks_do_not_pass_for_replicas(
    zero_ranks: Ranks, tmp_path: Path
) -> None:
    url = tmp_path / "never"
    for found in zero_ranks.run(2, experts, str(url), 2):
        assert "model.moe.deepspeed_moe.experts.deepspeed_experts.0.weight: a parameter" in found
    assert not url.exists()
    assert zero_ranks.run(2, experts, str(tmp_path / "s"), 1) == ["saved"] * 2

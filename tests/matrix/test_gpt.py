"""A sample of the matrix on the GPT of the example, and what makes it fail."""

from __future__ import annotations

import random
from pathlib import Path

import pytest
import torch
from matrix.gpt_job import OTHERS, RESETS, SOURCE, TOLERANCE, run_row
from ranks.harness import Ranks

# After gpt_job, which says where it lies.
from gpt import checkpoint  # isort: skip
from gpt.model import Config, whole_shapes, whole_tensor  # isort: skip
from gpt.parallel import Arrangement  # isort: skip
from gpt.train import Trainer  # isort: skip

import ucpstore

ONE, TWO = random.Random(4).sample(OTHERS, 2)


@pytest.mark.timeout(900)
@pytest.mark.parametrize(("source", "targets"), [(SOURCE, (SOURCE, ONE)), (TWO, (SOURCE,))])
def test_state_comes_back_and_losses_go_on(
    ranks: Ranks, tmp_path: Path, source: str, targets: tuple[str, ...]
) -> None:
    for pair in run_row(ranks, source, targets, tmp_path):
        assert pair.wrong == ()
        assert pair.passed, pair


@pytest.mark.parametrize("reset", RESETS)
def test_what_is_reset_shows_in_the_losses(ranks: Ranks, tmp_path: Path, reset: str) -> None:
    [pair] = run_row(ranks, "tp2", ["dp2,zero3"], tmp_path, reset)
    assert pair.difference > 100 * TOLERANCE
    assert not pair.passed


def save_untrained(text: str, url: str) -> None:
    checkpoint.save(url, Trainer(Arrangement.parse(text)))


@pytest.mark.parametrize("source", ["tp2,pp2", "dp2,zero3"])
def test_arrays_are_the_tensors_that_nobody_has_cut(
    ranks: Ranks, tmp_path: Path, source: str
) -> None:
    url, config = str(tmp_path / "s"), Config()
    ranks.run(Arrangement.parse(source).ranks, save_untrained, source, url)
    model = ucpstore.CheckpointStore(url).open()["model"]
    names = whole_shapes(config)
    assert set(model) - {"head.weight"} == set(names)
    for name in names:
        assert torch.equal(model[name].read(), whole_tensor(config, name)), name


def refused(text: str, config: Config) -> str:
    try:
        Trainer(Arrangement.parse(text), config=config)
    except ValueError as error:
        return str(error)
    return "made"


def test_an_arrangement_that_the_model_cannot_have_is_refused(ranks: Ranks) -> None:
    found = ranks.run(2, refused, "tp2", Config(kv_heads=1))
    assert found == ["1 heads of keys and values cannot be cut into 2 equal parts"] * 2
    for text in ("tp2,tp4", "ep2", "tp2;dp2", "", "tp0", "zero4", "zero3,pp2"):
        with pytest.raises(ValueError, match=r"arrangement|together"):
            Arrangement.parse(text)
    assert str(Arrangement.parse(SOURCE)) == "pp2,dp2,tp2,zero1"

"""A sample of the matrix on the GPT of the example, and what makes it fail."""

from __future__ import annotations

import random
from pathlib import Path

import pytest
import torch
from matrix.gpt_job import (
    EXPERT_OTHERS,
    EXPERT_SOURCE,
    EXPERTS,
    MORE,
    OTHERS,
    RESETS,
    SOURCE,
    TOLERANCE,
    Row,
    run_row,
    trainer_of,
)
from ranks.harness import Ranks

# After gpt_job, which says where it lies.
from gpt import checkpoint  # isort: skip
from gpt.model import Config, Mixture, whole_shapes, whole_tensor  # isort: skip
from gpt.parallel import Arrangement, Place  # isort: skip
from gpt.train import Trainer  # isort: skip

import ucpstore

ONE, TWO = random.Random(4).sample(OTHERS, 2)
WIDEST = EXPERT_OTHERS[-1]


@pytest.mark.timeout(900)
@pytest.mark.parametrize(
    ("row", "more"),
    [
        (Row(SOURCE, (SOURCE, ONE)), MORE),
        (Row(TWO, (SOURCE,)), MORE),
        (Row(EXPERT_SOURCE, (WIDEST,), EXPERTS), MORE // 2),
        (Row(WIDEST, (EXPERT_SOURCE,), EXPERTS), MORE // 2),
    ],
    ids=lambda value: getattr(value, "source", None),
)
def test_state_comes_back_and_losses_go_on(
    ranks: Ranks, tmp_path: Path, row: Row, more: int
) -> None:
    for pair in run_row(ranks, row, tmp_path, more=more):
        assert pair.wrong == ()
        assert pair.passed, pair


@pytest.mark.parametrize(
    ("row", "what"),
    [(Row("tp2", ("dp2,zero3",)), "dense"), (Row("dp2,ep2,zero1", ("one",), EXPERTS), "experts")],
    ids=["dense", "experts"],
)
def test_what_is_reset_shows_in_the_losses(
    ranks: Ranks, tmp_path: Path, row: Row, what: str
) -> None:
    resets = [None, *((what, reset) for reset in RESETS)]
    pairs = run_row(ranks, row, tmp_path, more=10, resets=resets)
    for pair, reset in zip(pairs, resets, strict=True):
        assert pair.wrong == ()
        if reset is None:
            assert pair.passed, pair
        else:
            assert pair.difference > 100 * TOLERANCE, reset
            assert not pair.passed


def save_untrained(text: str, experts: int, url: str) -> None:
    with trainer_of(text, experts, torch.float32) as trainer:
        checkpoint.save(url, trainer)


@pytest.mark.parametrize(
    ("source", "experts"), [("tp2,pp2", 0), ("dp2,zero3", 0), ("tp2,pp2,dp2,ep2,zero1", 6)]
)
def test_arrays_are_the_tensors_that_nobody_has_cut(
    ranks: Ranks, tmp_path: Path, source: str, experts: int
) -> None:
    url, config = str(tmp_path / "s"), Config(experts=experts)
    ranks.run(Arrangement.parse(source).ranks, save_untrained, source, experts, url)
    model = ucpstore.CheckpointStore(url).open()["model"]
    names = whole_shapes(config)
    assert set(model) - {"head.weight"} == set(names)
    assert sum(".experts." in name for name in names) == 2 * 2 * experts
    for name in names:
        assert torch.equal(model[name].read(), whole_tensor(config, name)), name


def test_a_token_goes_to_the_two_likeliest_experts() -> None:
    torch.manual_seed(0)
    config = Config(experts=5)
    layer = Mixture(config, Place(Arrangement()))
    x = torch.randn(3, 7, config.width)
    for token, found in zip(x.flatten(0, 1), layer(x).flatten(0, 1), strict=True):
        probability = layer.router(token).softmax(-1)
        first, second, third = probability.argsort(descending=True)[:3]
        expected = (probability[first] - probability[third]) * layer.experts[first](token)
        expected += (probability[second] - probability[third]) * layer.experts[second](token)
        torch.testing.assert_close(found, expected)


def parts(text: str) -> dict[str, tuple[int, int, int]]:
    """Of each row of parameters: its length here, of how many parts this is one, and its length."""
    with trainer_of(text, EXPERTS) as trainer:
        return {
            name: (len(adam.row.values), adam.row.parts.size, len(adam.exp_avg))
            for name, adam in trainer.adams.items()
        }


def test_each_optimizer_state_is_on_one_of_the_ranks_with_its_parameters(ranks: Ranks) -> None:
    whole = parts("one")
    dense, experts = whole["dense"][0], whole["experts"][0]
    assert whole == {"dense": (dense, 1, dense), "experts": (experts, 1, experts)}
    # Two ranks have the same half of the experts, all four the same dense parameters.
    found = {"dense": (dense, 4, dense // 4), "experts": (experts // 2, 2, experts // 4)}
    assert ranks.run(4, parts, "dp4,ep2,zero1") == [found] * 4


def refused(text: str, config: Config) -> str:
    try:
        Trainer(Arrangement.parse(text), config=config)
    except ValueError as error:
        return str(error)
    return "made"


def test_an_arrangement_that_the_model_cannot_have_is_refused(ranks: Ranks) -> None:
    found = ranks.run(2, refused, "tp2", Config(kv_heads=1))
    assert found == ["1 heads of keys and values cannot be cut into 2 equal parts"] * 2
    found = ranks.run(2, refused, "dp2,ep2", Config(experts=5))
    assert found == ["5 experts cannot be cut into 2 equal parts"] * 2
    [found, _] = ranks.run(2, refused, "dp2,ep2", Config())
    assert found.startswith("0 experts in a layer")
    assert refused("one", Config(experts=2)).startswith("2 experts in a layer")
    assert refused("zero3", Config(experts=4)) == "ZeRO-3 and experts do not go together here"
    for text in ("tp2,tp4", "ep2", "dp2,ep4", "tp2;dp2", "", "tp0", "zero4", "zero3,pp2"):
        with pytest.raises(ValueError, match=r"arrangement|together"):
            Arrangement.parse(text)
    assert str(Arrangement.parse(SOURCE)) == "pp2,dp2,tp2,zero1"
    assert str(Arrangement.parse("tp2,dp4,ep2")) == "dp4,ep2,tp2"

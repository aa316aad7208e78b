"""Names that only the target has, or only the checkpoint."""

from __future__ import annotations

import pytest
import torch
from describe.engine import load, save

from ucpstore.describe import match, refuse_unexpected, settle_unexpected
from ucpstore.errors import MismatchError


def _abc(names: str) -> dict[str, torch.Tensor]:
    return {name: torch.full((2,), float(ord(name))) for name in names}


def test_b11_strict_lists_all_names_and_lenient_reports_them():
    checkpoint = save({"m": _abc("abc"), "optim": {"x": 1}})
    for names, text in (("ab", "not in the target: m.c"), ("abcd", "not in the checkpoint: m.d")):
        with pytest.raises(MismatchError, match=text):
            load({"m": _abc(names)}, checkpoint)
    target = {"m": {name: torch.zeros(2) for name in "abd"}}
    done = load(target, checkpoint, strict=False)
    assert (done.items, done.skipped) == (("m",), ("optim",))
    assert (done.missing, done.unexpected) == (("m.d",), ("m.c",))
    assert target["m"]["a"].tolist() == [97.0, 97.0]
    assert target["m"]["d"].tolist() == [0.0, 0.0]


def test_unexpected_names_are_settled_between_ranks():
    checkpoint = save({"m": _abc("abc")})
    stages = [
        match(
            {"m": _abc(names)}, checkpoint.tree, checkpoint.infos, group_ranks={0: 0, 1: 1}, rank=0
        )
        for names in ("a", "b")
    ]
    assert [stage.unexpected for stage in stages] == [("m.b", "m.c"), ("m.a", "m.c")]
    left = settle_unexpected([(stage.items, stage.unexpected) for stage in stages])
    assert left == ("m.c",)
    with pytest.raises(MismatchError, match=r"not in the target: m\.c"):
        refuse_unexpected(left)
    refuse_unexpected(())
    # a rank that leaves the item out has no say
    assert settle_unexpected([(("m",), ("m.c",)), (("x",), ())]) == ("m.c",)


def test_a_load_that_is_not_strict_warns_where_nothing_matches():
    checkpoint = save({"model": {"a.w": torch.ones(2), "b.w": torch.ones(2)}, "epoch": 3})

    def target(prefix: str, **more: object) -> dict[str, object]:
        return {"model": {f"{prefix}.w": torch.zeros(2), "x.b": torch.zeros(2)}, **more}

    with pytest.warns(
        UserWarning, match=r"model: strict=False, and .*none of its 2 .* model\.m\.w"
    ):
        done = load(target("m", epoch=0), checkpoint, strict=False)
    assert done.missing == ("model.m.w", "model.x.b")
    with pytest.warns(UserWarning, match=r"net: strict=False, .* has the items model, epoch; is"):
        load({"net": torch.zeros(2)}, checkpoint, strict=False)
    # without a warning, which would be an error
    found = target("a", optim={"lr": 1.0})
    load(found, checkpoint, strict=False)
    assert found["model"]["a.w"].tolist() == [1.0, 1.0]
    load({"epoch": 0}, checkpoint, strict=False)


def test_a_key_that_no_checkpoint_can_have_does_not_hinder_a_load_that_leaves_its_dict_out():
    checkpoint = save({"m": {"w": torch.ones(2)}})
    average = torch.zeros(2)
    target = {
        "m": {"w": torch.zeros(2), "ema": {object(): average}},
        "ema": {object(): average},
    }
    done = load(target, checkpoint, strict=False)
    assert done.missing == ("m.ema", "ema")
    assert target["m"]["w"].tolist() == [1.0, 1.0]
    assert average.tolist() == [0.0, 0.0]
    with pytest.raises(MismatchError, match=r"not in the checkpoint: m\.ema, ema\n"):
        load(target, checkpoint)

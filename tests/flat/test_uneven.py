"""Rows over tensor parallel blocks of different sizes."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence

import pytest
import torch
from spec.simulated import load, save

from ucpstore import Flat, Spec, UnsupportedError
from ucpstore.spec import shard

WHOLE = {"v": torch.arange(11.0), "w": torch.arange(100.0, 108.0)}
RULES = {"model.v": shard(0, "tp", size=11), "model.w": shard(0, "tp")}
OTHER = {"model.*": shard(0, "tp", sizes=(6, 3))}


def blocks(*names: str) -> list[dict[str, torch.Tensor]]:
    return [{name: WHOLE[name].chunk(2)[at] for name in names} for at in range(2)]


def states(
    of_tp: Sequence[Mapping[str, torch.Tensor]], dp: int, start: Mapping[str, int] | None = None
) -> tuple[list[dict[str, Flat]], list[torch.Tensor]]:
    """What each of dp x tp ranks has of its row, and the same once more to compare."""
    made, expected = [], []
    for rank in range(dp * 2):
        own = of_tp[rank % 2]
        offsets, stop = {}, 0
        for name, each in own.items():
            offsets[name] = stop if start is None else start[name]
            stop = offsets[name] + each.numel()
        row = torch.full((-(-stop // dp) * dp,), -7.0)
        for name, each in own.items():
            row[offsets[name] : offsets[name] + each.numel()] = each
        part = row.chunk(dp)[rank // 2].clone()
        shapes = {name: tuple(each.shape) for name, each in own.items()}
        made.append({"o": Flat(part, shapes, "dp", offsets=None if start is None else offsets)})
        expected.append(part.clone())
    return made, expected


@pytest.mark.parametrize(
    ("names", "dp", "start"),
    [
        (("v", "w"), 1, None),
        (("w", "v"), 1, None),
        (("w", "v"), 2, None),
        (("v",), 2, None),
        (("v", "w"), 2, {"v": 0, "w": 6}),
    ],
)
def test_rows_that_are_whole_or_begin_alike_may_be_uneven(names, dp, start) -> None:
    spec = Spec({"dp": dp, "tp": 2}, RULES, replicate=("dp",))
    own, expected = states(blocks(*names), dp, start)
    checkpoint = save(own, spec)
    for name in names:
        assert torch.equal(checkpoint.arrays[f"o/{name}"], WHOLE[name])
    for state in own:
        state["o"].tensor[state["o"].tensor != -7] = -1
    load(own, checkpoint, spec)
    for state, values in zip(own, expected, strict=True):
        assert torch.equal(state["o"].tensor, values)


def refused(action: Callable[[], object]) -> str:
    with pytest.raises(UnsupportedError) as caught:
        action()
    return str(caught.value)


def test_a_tensor_behind_an_uneven_one_begins_at_one_element_only_on_some_ranks() -> None:
    spec = Spec({"dp": 2, "tp": 2}, RULES, replicate=("dp",))
    own, _ = states(blocks("v", "w"), 2)
    text = refused(lambda: save(own, spec))
    assert text == (
        "o: model.w begins at 6 of the row on this rank, but elsewhere in rows of other blocks, "
        "for it lies behind model.v, which rule 'model.v' cuts in blocks of 5, 6 elements. Uneven "
        "blocks are supported where all rows have parts of one length and tensors that begin at "
        "the same elements: put that tensor last, leave equal gaps and pass offsets, or give it a "
        "row of its own, padded to the largest block"
    )


def test_rows_must_have_parts_of_one_length() -> None:
    uneven = [{"w": torch.arange(6.0)}, {"w": torch.arange(3.0)}]
    own, _ = states(uneven, 2)
    text = refused(lambda: save(own, Spec({"dp": 2, "tp": 2}, OTHER, replicate=("dp",))))
    assert text.startswith(
        "o: the row has 2 parts of 2 elements on this rank, but there is a larger block of "
        "model.w, which rule 'model.*' cuts in blocks of 3, 6 elements. Uneven blocks"
    )
    whole, expected = states(uneven, 1)
    spec = Spec({"dp": 1, "tp": 2}, OTHER)
    checkpoint = save(whole, spec)
    assert checkpoint.arrays["o/w"].tolist() == [0, 1, 2, 3, 4, 5, 0, 1, 2]
    for state in whole:
        state["o"].tensor.zero_()
    load(whole, checkpoint, spec)
    assert [state["o"].tensor.tolist() for state in whole] == [e.tolist() for e in expected]

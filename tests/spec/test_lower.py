"""Each constructor against cutting by hand: torch cuts the whole, the pieces must put it back."""

from __future__ import annotations

import itertools
import re
from collections.abc import Callable, Mapping, Sequence

import pytest
import torch
import torch.nn.functional as F  # noqa: N812

from ucpstore import Spec, StateError
from ucpstore.geometry import Flat, Partition, Split, fragments
from ucpstore.spec import (
    Lowered,
    Part,
    average,
    padded,
    renamed,
    replicate,
    scaled,
    shard,
    tied,
    unique,
)

At = Mapping[str, int]
ByHand = Callable[[torch.Tensor, At], torch.Tensor]
Rule = Part | Sequence[Part]


def places(axes: Mapping[str, int]) -> list[dict[str, int]]:
    every = itertools.product(*map(range, axes.values()))
    return [dict(zip(axes, at, strict=True)) for at in every]


def counted(shape: Sequence[int]) -> torch.Tensor:
    """A whole tensor, all elements different and above 0."""
    return torch.arange(1.0, torch.Size(shape).numel() + 1).reshape(tuple(shape))


def fused(whole: torch.Tensor, sections: Sequence[int], parts: int, at: int) -> torch.Tensor:
    return torch.cat([section.chunk(parts)[at] for section in whole.split(list(sections))])


def rows_padded(whole: torch.Tensor, rows: int) -> torch.Tensor:
    return F.pad(whole, (0, 0, 0, rows - whole.shape[0]))


CASES: dict[str, tuple[dict[str, int], Rule, tuple[int, ...], ByHand]] = {
    "replicate": ({"dp": 3}, replicate("dp"), (4, 3), lambda w, at: w),
    "replicate 0-d": ({"dp": 3}, replicate("dp"), (), lambda w, at: w),
    "rows": ({"tp": 4}, shard(0, "tp"), (8, 3), lambda w, at: w.chunk(4)[at["tp"]]),
    "columns": ({"tp": 2}, shard(-1, "tp"), (3, 8), lambda w, at: w.chunk(2, 1)[at["tp"]]),
    "the axis is in the midst": (
        {"a": 2, "tp": 3, "b": 2},
        [shard(0, "tp"), replicate("a", "b")],
        (6, 2),
        lambda w, at: w.chunk(3)[at["tp"]],
    ),
    "two dimensions": (
        {"dp": 2, "tp": 2},
        [shard(1, "tp"), shard(0, "dp")],
        (4, 6),
        lambda w, at: w.chunk(2)[at["dp"]].chunk(2, 1)[at["tp"]],
    ),
    "one dimension by two cuts, the first one outermost": (
        {"dp": 2, "tp": 3},
        [shard(0, "tp"), shard(0, "dp")],
        (12, 2),
        lambda w, at: w.chunk(3)[at["tp"]].chunk(2)[at["dp"]],
    ),
    "one dimension over two axes": (
        {"dp": 2, "tp": 3},
        shard(0, ("tp", "dp"), size=11),
        (11, 2),
        lambda w, at: w.split(2)[at["tp"] * 2 + at["dp"]],
    ),
    "uneven, by the rule of chunk": (
        {"tp": 4},
        shard(0, "tp", size=7),
        (7, 2),
        lambda w, at: w.chunk(4)[at["tp"]],
    ),
    "chunk leaves ranks without rows": (
        {"tp": 4},
        shard(0, "tp", size=5),
        (5, 2),
        lambda w, at: w.split([2, 2, 1, 0])[at["tp"]],
    ),
    "sizes": (
        {"tp": 3},
        shard(1, "tp", sizes=(3, 0, 4)),
        (2, 7),
        lambda w, at: w.split([3, 0, 4], 1)[at["tp"]],
    ),
    "gate and up": (
        {"tp": 4},
        shard(0, "tp", sections=(8, 8)),
        (16, 8),
        lambda w, at: fused(w, (8, 8), 4, at["tp"]),
    ),
    "grouped queries": (
        {"tp": 2},
        shard(0, "tp", sections=(8 * 2, 2 * 2, 2 * 2), unit=2),
        (24, 3),
        lambda w, at: fused(w, (16, 4, 4), 2, at["tp"]),
    ),
    "heads that two ranks share": (
        {"kv": 2, "copies": 2},
        [shard(0, "kv"), replicate("copies")],
        (8, 3),
        lambda w, at: w.chunk(2)[at["kv"]],
    ),
    "and their queries": (
        {"kv": 2, "copies": 2},
        shard(0, ("kv", "copies")),
        (16, 3),
        lambda w, at: w.chunk(4)[at["kv"] * 2 + at["copies"]],
    ),
    "experts fused by rows": (
        {"ep": 2, "tp": 2},
        [shard(0, "ep"), shard(1, "tp", sections=(6, 6))],
        (4, 12, 3),
        lambda w, at: torch.stack(
            [fused(each, (6, 6), 2, at["tp"]) for each in w.chunk(2)[at["ep"]]]
        ),
    ),
    "padded": (
        {"tp": 2},
        [shard(0, "tp"), padded(0, 7)],
        (7, 4),
        lambda w, at: rows_padded(w, 8).chunk(2)[at["tp"]],
    ),
    "padded by more than a part": (
        {"tp": 4},
        [padded(-2, 5), shard(0, "tp")],
        (5, 4),
        lambda w, at: rows_padded(w, 16).chunk(4)[at["tp"]],
    ),
    "padded, not cut": (
        {"dp": 2},
        [replicate("dp"), padded(0, 7)],
        (7, 2),
        lambda w, at: rows_padded(w, 64),
    ),
    "padded, uneven": (
        {"tp": 3},
        [shard(0, "tp", size=10), padded(0, 9)],
        (9, 2),
        lambda w, at: rows_padded(w, 10).chunk(3)[at["tp"]],
    ),
    "padded sections": (
        {"tp": 2},
        [shard(0, "tp", sections=(4, 4)), padded(0, 7)],
        (7, 2),
        lambda w, at: fused(rows_padded(w, 8), (4, 4), 2, at["tp"]),
    ),
    "scaled": ({"tp": 4}, scaled("tp"), (5,), lambda w, at: w / 4),
    "sharded and scaled": (
        {"tp": 2, "cp": 2},
        [shard(0, "tp"), scaled("cp")],
        (6,),
        lambda w, at: w.chunk(2)[at["tp"]] / 2,
    ),
    "nothing is said where nothing has several ranks": (
        {"tp": 1, "dp": 1},
        [],
        (3, 2),
        lambda w, at: w,
    ),
}


@pytest.mark.parametrize("case", CASES)
def test_pieces_put_the_whole_back(case: str) -> None:
    axes, rule, shape, by_hand = CASES[case]
    whole, spec = counted(shape), Spec(axes, {"w": rule})
    found = torch.zeros(shape)
    for rank, at in enumerate(places(axes)):
        own = by_hand(whole, at)
        lowered = spec.lower("w", tuple(own.shape), rank)
        assert (lowered.key, lowered.name, lowered.shape) == ("w", "w", shape)
        made = torch.zeros_like(own)
        for piece in fragments(lowered.partition, lowered.shape).get(rank, ()):
            values = own[piece.local.slices()] * lowered.scale
            there = found[piece.box.slices()]
            assert torch.equal(there, torch.zeros_like(there)) or torch.equal(there, values)
            found[piece.box.slices()] = values
            made[piece.local.slices()] = whole[piece.box.slices()] / lowered.scale
        assert torch.equal(made, own), at
    assert torch.equal(found, whole)


def lowered(axes: Mapping[str, int], rule: Rule, shape: Sequence[int], rank: int = 0) -> Lowered:
    return Spec(axes, {"*": rule}).lower("m.layers.0.w", tuple(shape), rank)


def test_partitions_span_the_ranks_of_the_whole_job() -> None:
    axes = {"pp": 2, "dp": 2, "tp": 2}
    rule = [shard(0, "tp"), unique("pp"), replicate("dp")]
    found = lowered(axes, rule, (4, 3), rank=6)
    assert found.partition == Partition((2, 2), (4, 6, 5, 7), (Split(0), None))
    assert (found.shape, found.alone, found.tied, found.scale) == ((8, 3), "pp=1", False, 1)
    assert found.rule == "'*'"


def test_axes_without_several_ranks_are_left_out_of_partitions() -> None:
    found = lowered({"pp": 1, "dp": 1, "tp": 2, "ep": 1}, [unique("pp"), replicate("tp")], (3,))
    assert found.partition == Partition((2,), (0, 1), (None,))
    assert found.alone == ""
    found = lowered({"pp": 1, "tp": 2, "ep": 1}, shard(0, "tp"), (3,))
    assert found.partition == Partition((2,), (0, 1), (Split(0),))


def test_means_are_asked_for_where_an_axis_has_several_ranks() -> None:
    rule = [average("dp"), shard(0, "tp")]
    found = lowered({"dp": 2, "tp": 2}, rule, (4,))
    assert found.mean
    assert found.partition == Partition((2, 2), (0, 2, 1, 3), (Split(0), None))
    assert not lowered({"dp": 1, "tp": 2}, rule, (4,)).mean


def test_padding_is_kept_beside_the_real_shape() -> None:
    found = lowered({"tp": 2}, [shard(0, "tp"), padded(0, 7)], (4, 3))
    assert (found.shape, found.partition.padded) == ((7, 3), (8, 3))
    exact = lowered({"tp": 2}, [shard(0, "tp"), padded(0, 8)], (4, 3))
    assert (exact.shape, exact.partition.padded) == ((8, 3), ())


def test_names_are_given_by_own_name_and_coordinates() -> None:
    def name(own: str, at: At) -> str:
        assert own == "m.layers.0.w"
        return f"m.layers.{at['pp'] * 4}.w"

    found = lowered({"pp": 2}, [renamed(name), unique("pp")], (3,), rank=1)
    assert (found.key, found.name, found.tied) == ("m.layers.4.w", "m.layers.4.w", False)
    both = lowered({"pp": 2}, [tied("m.e"), renamed(name), unique("pp")], (3,), rank=1)
    assert (both.key, both.name, both.tied) == ("m.layers.4.w", "m.e", True)


def test_flat_ranges_come_behind_the_other_cuts() -> None:
    spec = Spec({"dp": 2, "tp": 2}, {"w": shard(0, "tp")}, replicate=("dp",))
    found = spec.lower("w", (4, 3), 0, (("dp",), Flat(5, 10)))
    assert found.shape == (8, 3)
    assert found.partition == Partition((2, 2), (0, 2, 1, 3), (Split(0), Flat(5, 10)))
    with pytest.raises(StateError, match=r"shard and ucpstore.Flat both use the axis 'tp'"):
        spec.lower("w", (4, 3), 0, (("tp",), Flat(5, 10)))


TP = {"tp": 2}
REFUSED: dict[str, tuple[Mapping[str, int], Rule, tuple[int, ...], str]] = {
    "an axis that nothing is said of": (
        {"dp": 2, "tp": 2},
        shard(0, "tp"),
        (4,),
        "it does not say what the axis 'dp' of size 2 does; add replicate('dp'), unique('dp') or "
        "shard(dim, 'dp') to the rule, or name it once for all rules, Spec(..., replicate=('dp',))",
    ),
    "an axis that does two things": (
        TP,
        [shard(0, "tp"), unique("tp")],
        (4,),
        "shard and unique both use the axis 'tp'; an axis does one thing to a tensor",
    ),
    "an axis that cuts two dimensions": (
        TP,
        [shard(0, "tp"), shard(1, "tp")],
        (4, 4),
        "shard and shard both use the axis 'tp'",
    ),
    "a dimension that is not there": (
        TP,
        shard(2, "tp"),
        (4, 4),
        "it names dimension 2, but the tensor has shape (4, 4) on this rank",
    ),
    "a negative one": (TP, shard(-3, "tp"), (4, 4), "it names dimension -3"),
    "a dimension of a scalar": (TP, shard(0, "tp"), (), "the tensor has shape ()"),
    "a padded dimension that is not there": (
        TP,
        [replicate("tp"), padded(1, 2)],
        (4,),
        "it names dimension 1",
    ),
    "more real rows than there are": (
        TP,
        [shard(0, "tp"), padded(0, 9)],
        (4, 2),
        "padded(0, 9) says that 9 elements are real, but with its padding dimension 0 has 8 on all "
        "ranks together (4 on this one); is the real size or an axis wrong?",
    ),
    "padding twice": (
        TP,
        [shard(0, "tp"), padded(0, 7), padded(-2, 6)],
        (4, 2),
        "padded names dimension 0 twice",
    ),
    "sizes for another number of ranks": (
        TP,
        shard(0, "tp", sizes=(4, 4, 4)),
        (4,),
        "sizes has 3 parts, but tp has 2 coordinates; give one size for each",
    ),
    "a part of another size": (
        TP,
        shard(0, "tp", sizes=(3, 5)),
        (4,),
        "of 8 elements of dimension 0 coordinate 0 of tp=2 should hold 3, but this rank's tensor "
        "has 4",
    ),
    "a part of another size than chunk gives": (
        TP,
        shard(0, "tp", size=10),
        (4,),
        "of 10 elements of dimension 0 coordinate 0 of tp=2 should hold 5",
    ),
    "a part of other sections": (
        TP,
        shard(0, "tp", sections=(8, 8)),
        (16,),
        "of 16 elements of dimension 0 coordinate 0 of tp=2 should hold 8",
    ),
    "a section that the axis does not divide": (
        {"tp": 3},
        shard(0, "tp", sections=(9, 8)),
        (6,),
        "a section of 8 elements of dimension 0 cannot be cut over tp=3 in whole units of 1",
    ),
    "fewer heads than ranks": (
        {"tp": 4},
        shard(0, "tp", sections=(8 * 6, 2 * 6, 2 * 6), unit=6),
        (18,),
        "a section of 12 elements of dimension 0 cannot be cut over tp=4 in whole units of 6; "
        "choose a size of the axis that divides it. Where ranks share a head, so that the axis is "
        "larger than the number of heads, the fused tensor has no one order: keep query, key and "
        "value in tensors of their own",
    ),
    "a cut head": (
        TP,
        shard(0, "tp", unit=4),
        (6,),
        "6 elements of dimension 0 on this rank are no whole number of units of 4; choose a size "
        "of the axis that cuts between units, or give the parts as sizes=",
    ),
    "two cuts, one of them with sections": (
        {"dp": 2, "tp": 2},
        [shard(0, "tp", sections=(4, 4)), shard(0, "dp")],
        (2,),
        "dimension 0 is cut 2 times, and one of the cuts has size, sizes or sections; give it one "
        "cut over several axes, shard(dim, ('dp', 'tp'), ...)",
    ),
    "no name": (
        TP,
        [replicate("tp"), renamed(lambda name, at: "")],
        (4,),
        "the function of renamed gave '', which is no name",
    ),
}


@pytest.mark.parametrize("case", REFUSED)
def test_what_does_not_fit_is_refused(case: str) -> None:
    axes, rule, shape, words = REFUSED[case]
    with pytest.raises(StateError) as caught:
        lowered(axes, rule, shape)
    text = str(caught.value)
    assert re.match(r"m\.layers\.0\.w: (rule '\*'|the function)", text), text
    assert words in text

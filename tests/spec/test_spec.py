"""Specifications: which rule is whose, what a rank is told to hold, and proofs without the job."""

from __future__ import annotations

import pickle
import re
import time
from collections.abc import Callable, Mapping

import pytest
import torch
from spec import gpt
from torch import nn

from ucpstore import Spec, StateError
from ucpstore.geometry import ArraySpec, Partition, RankClass, merge
from ucpstore.spec import (
    average,
    check_spec,
    padded,
    renamed,
    replicate,
    scaled,
    shard,
    stacked,
    tied,
    unique,
)

At = Mapping[str, int]


def renumbered(name: str, at: At) -> str:
    return name.replace(".0.", f".{at['pp']}.")


def refused(action: Callable[[], object]) -> str:
    with pytest.raises(StateError) as caught:
        action()
    return str(caught.value)


# ---- rules and names ----


def test_globs_and_expressions_match_whole_names() -> None:
    spec = Spec(
        {"tp": 2},
        {
            "model.*.weight": shard(0, "tp"),
            "model.layers.[0-3].bias": replicate("tp"),
            re.compile(r"optim\.\w+\.row"): shard(1, "tp"),
        },
    )
    assert spec.lower("model.layers.12.weight", (4, 2), 0).rule == "'model.*.weight'"
    assert spec.lower("model.layers.3.bias", (4,), 0).rule == "'model.layers.[0-3].bias'"
    assert spec.lower("optim.exp.row", (4, 2), 0).rule == r"'optim\\.\\w+\\.row'"
    for name in ("model.layers.4.bias", "my.model.layers.1.weight", "optim.exp.rows", "model.w"):
        assert f"{name}: none of the 3 rules" in refused(
            lambda name=name: spec.lower(name, (4,), 0)
        )
    assert repr(spec) == "<Spec tp=2, 3 rules>"


def test_a_tensor_without_a_rule_is_refused_with_what_to_write() -> None:
    spec = Spec(
        {"pp": 1, "dp": 2, "tp": 4},
        {"model.*.weight": shard(0, "tp"), re.compile("a.*bias"): replicate("tp"), "b.bias": []},
    )
    assert refused(lambda: spec.lower("model.norm.bias", (4,), 0)) == (
        "model.norm.bias: none of the 3 rules of the specification matches, and nothing is guessed "
        "over pp=1 x dp=2 x tp=4; add a rule, e.g. {'model.norm.bias': replicate('dp', 'tp')} for "
        "a tensor that all ranks hold; near are 'b.bias'"
    )


def test_a_tensor_that_two_rules_match_is_refused_with_both() -> None:
    spec = Spec({"tp": 2}, {"m.*": replicate("tp"), re.compile("m.w"): shard(0, "tp"), "m.x": []})
    text = "m.w: the rules 'm.*' and 'm.w' both match; make one of them narrower, or write one rule"
    assert refused(lambda: spec.lower("m.w", (4,), 0)) == text
    assert refused(lambda: spec.key("m.w", 0)) == text
    assert refused(lambda: spec.stored("m.w", 0)) == text


def test_on_one_rank_no_rule_is_needed_but_those_that_match_count() -> None:
    spec = Spec({"tp": 1, "pp": 1}, {"m.w": [padded(0, 3), renamed(renumbered)]})
    assert spec.lower("m.other", (4, 2), 0).shape == (4, 2)
    assert spec.lower("m.other", (4, 2), 0).rule == "(none)"
    assert spec.lower("m.w", (4, 2), 0).shape == (3, 2)


def test_defaults_say_what_rules_leave_open() -> None:
    rules = {"m.a": shard(0, "dp"), "m.b": [], "m.c": replicate("pp")}
    spec = Spec({"pp": 2, "dp": 2}, rules, replicate=("dp",), unique=("pp",))
    assert spec.lower("m.a", (4,), 3).partition.ranks == (2, 3)
    assert spec.lower("m.a", (4,), 3).shape == (8,)
    assert spec.lower("m.b", (4,), 3).alone == "pp=1"
    assert spec.lower("m.b", (4,), 3).partition.ranks == (2, 3)
    assert spec.lower("m.c", (4,), 3).alone == ""
    assert spec.lower("m.c", (4,), 3).partition.ranks == (0, 1, 2, 3)


def test_names_in_the_tree_and_of_arrays() -> None:
    spec = Spec(
        {"pp": 2},
        {"m.layers.*": renamed(renumbered), "m.head": tied("m.embed"), "m.embed": []},
        unique=("pp",),
    )
    assert [spec.key("m.layers.0.w", rank) for rank in (0, 1)] == ["m.layers.0.w", "m.layers.1.w"]
    assert spec.stored("m.layers.0.w", 1) == "m.layers.1.w"
    assert (spec.key("m.head", 1), spec.stored("m.head", 1)) == ("m.head", "m.embed")
    assert (spec.key("m.free", 1), spec.stored("m.free", 1)) == ("m.free", "m.free")


def test_a_rule_may_only_name_a_dtensor() -> None:
    spec = Spec(
        {"tp": 2}, {"m.a": [tied("m.b"), renamed(renumbered)], "m.c": [], "m.d": shard(0, "tp")}
    )
    for name in ("m.a", "m.c", "m.other"):
        spec.check_dtensor(name)
    assert refused(lambda: spec.check_dtensor("m.d")) == (
        "m.d: a rule says shard, but the tensor is a DTensor, which tells its own arrangement; let "
        "the rule rename or tie it only"
    )


BAD: list[tuple[Callable[[], object], str]] = [
    (lambda: Spec(3, {}), "axes must be names with sizes, as {'dp': 2, 'tp': 4}, or a DeviceMesh"),
    (lambda: Spec({"tp": 2}, [("m.*", [])]), "rules must be a dict of patterns"),
    (lambda: Spec({}, {3: []}), "a rule's pattern is a glob or a compiled expression, not 3"),
    (lambda: Spec({}, {"m.*": "tp"}), "rule 'm.*': 'tp' is nothing that a rule can say"),
    (lambda: Spec({}, {"m.*": [replicate]}), "is nothing that a rule can say; use shard"),
    (lambda: Spec({}, {"m.*": [tied("a"), tied("b")]}), "rule 'm.*': it says tied twice"),
    (lambda: Spec({}, {"m": [renamed(renumbered)] * 2}), "rule 'm': it says renamed twice"),
    (lambda: Spec({}, {}, replicate="dp"), "replicate of a Spec must be a list of names of axes"),
    (lambda: Spec({}, {}, unique=[1]), "unique of a Spec must be a list of names of axes"),
    (lambda: Spec({}, {}, unique=None), "but it is None"),
    (lambda: Spec({}, {}, replicate=["dp"], unique=["dp"]), "of a Spec both name dp"),
    (lambda: check_spec({"dp": 2}), "spec must be a ucpstore.Spec, but it is a dict"),
]


@pytest.mark.parametrize(("make", "words"), BAD)
def test_specifications_that_make_no_sense_are_refused(
    make: Callable[[], object], words: str
) -> None:
    assert words in refused(make)


def test_a_specification_can_be_sent_to_other_processes() -> None:
    spec = Spec({"pp": 2}, {"m.*.w": renamed(renumbered)}, unique=("pp",))
    spec.lower("m.0.w", (4,), 1)
    again = pickle.loads(pickle.dumps(spec))  # noqa: S301  # our own
    assert again.lower("m.0.w", (4,), 1) == spec.lower("m.0.w", (4,), 1)


# ---- process groups ----


def test_the_axes_must_be_those_of_the_process_group() -> None:
    spec = Spec({"dp": 2, "tp": 2}, {})
    assert spec.in_group({n: n for n in range(4)}) is spec
    assert spec.in_group({n + 10: n for n in range(4)}) is spec
    assert refused(lambda: spec.in_group({0: 0, 1: 1})) == (
        "the axes dp=2 x tp=2 of the specification are for 4 ranks [0, 1, 2, 3], but the process "
        "group of the call has 2, [0, 1]; give the sizes of this job, and the process group whose "
        "ranks lie on the axes"
    )
    text = refused(lambda: spec.in_group({n: n for n in range(64)}))
    assert "has 64, [0, 1, 2, 3, 4, 5, 6, 7, ...];" in text
    turned = Spec({"dp": 2, "tp": 2}, {}, ranks=[3, 2, 1, 0])
    assert turned.in_group({n + 10: n for n in range(4)}).axes.ranks == (3, 2, 1, 0)


def test_a_device_mesh_counts_in_global_ranks(fake_ranks: Callable[[int, int], None]) -> None:
    from torch.distributed.device_mesh import DeviceMesh

    fake_ranks(5, 8)
    mesh = DeviceMesh("cpu", [[4, 6], [5, 7]], mesh_dim_names=("dp", "tp"))
    spec = Spec(mesh, {"w": [shard(0, "tp"), replicate("dp")]})
    assert spec.axes.sizes == {"dp": 2, "tp": 2}
    inside = spec.in_group({4: 0, 5: 1, 6: 2, 7: 3})
    assert inside.lower("w", (2,), 1).partition.ranks == (0, 1, 2, 3)
    assert inside.lower("w", (2,), 1).partition.axes == (2, 2)
    assert inside.axes.coordinates(1) == {"dp": 1, "tp": 0}
    text = refused(lambda: spec.in_group({0: 0, 1: 1, 2: 2, 3: 3}))
    assert (
        "are for 4 ranks [4, 5, 6, 7], but the process group of the call has 4, [0, 1, 2, 3]"
        in (text)
    )
    assert "says itself which ranks" in refused(lambda: Spec(mesh, {}, ranks=[0, 1, 2, 3]))
    assert "without names" in refused(lambda: Spec(DeviceMesh("cpu", [4, 5]), {}))


@pytest.fixture
def fake_ranks() -> object:
    from describe.conftest import fake_ranks as made

    yield from made.__wrapped__()  # type: ignore[attr-defined]


# ---- without the job ----

SMALL = {
    "m": {
        "emb": (4, 6),
        "layers": [{"qkv": (8, 6), "norm": (6,)}],
        "out": (6, 4),
        "bias": (6,),
        "free": (6,),
    },
    "step": 7,
}


def small(tp: int) -> Spec:
    everywhere = replicate("pp")
    return Spec(
        {"pp": 2, "tp": tp},
        {
            "m.emb": [shard(0, "tp"), padded(0, 7), everywhere],
            "m.*.*.qkv": [renamed(renumbered), shard(0, "tp", sections=(8, 4, 4))],
            "m.*.*.norm": [renamed(renumbered), replicate("tp")],
            "m.out": [shard(1, "tp"), everywhere],
            "m.bias": [scaled("tp"), everywhere],
            "m.free": [replicate("tp"), average("pp")],
        },
        unique=("pp",),
    )


EXPLAINED = """
name             rule          own shape  array            shape    pieces
m.emb            'm.emb'       (4, 6)     m.emb            (7, 6)   [4:7, 0:6]
m.layers.0.qkv   'm.*.*.qkv'   (8, 6)     m.layers.1.qkv   (16, 6)  [4:8, 0:6] [10:12, 0:6] [14:16, 0:6]
m.layers.0.norm  'm.*.*.norm'  (6,)       m.layers.1.norm  (6,)     [0:6]
m.out            'm.out'       (6, 4)     m.out            (6, 8)   [0:6, 4:8]
m.bias           'm.bias'      (6,)       m.bias           (6,)     [0:6] times 2
m.free           'm.free'      (6,)       m.free           (6,)     [0:6] averaged
"""  # noqa: E501  # a table


def test_functions_see_0_on_axes_that_are_not_there() -> None:
    def expert(name: str, at: Mapping[str, int]) -> tuple[str, int]:
        return "m.w", int(name[-1]) + 2 * at["ep"]

    rules = {
        "m.a": [renamed(lambda name, at: f"{name}{at['ep']}{at['tp']}"), replicate("tp")],
        "m.w.*": [stacked(expert), replicate("tp")],
    }
    spec = Spec({"tp": 2}, rules)
    assert spec.key("m.a", 1) == spec.lower("m.a", (2,), 1).key == "m.a01"
    assert spec.stack("m.w.1", 1) == ("m.w", 1)
    assert list(spec.axes.coordinates(1)) == ["tp"]


def test_what_functions_raise_names_the_tensor_and_the_rule() -> None:
    rules = {
        "m.*": renamed(lambda name, at: name[: 1 // at["tp"]]),
        "n.*": stacked(lambda name, at: (name, int("x"))),
    }
    spec = Spec({"tp": 2}, rules, replicate=("tp",))
    calls: list[Callable[[], object]] = [
        lambda: spec.key("m.w", 0),
        lambda: spec.lower("m.w", (2,), 0),
        lambda: spec.explain({"m": {"w": (2,)}}),
    ]
    for call in calls:
        with pytest.raises(StateError) as raised:
            call()
        assert isinstance(raised.value.__cause__, ZeroDivisionError)
        assert str(raised.value) == (
            "m.w: rule 'm.*': the function of renamed raised ZeroDivisionError: "
            f"{raised.value.__cause__}; it was called with 'm.w' and {{'tp': 0}}"
        )
    with pytest.raises(StateError, match=r"n\.w: rule 'n\.\*': the function of stacked raised Val"):
        spec.stack("n.w", 1)


def test_explain_shows_what_a_rank_holds() -> None:
    assert small(2).explain(SMALL, rank=3) == EXPLAINED.strip()


def test_explain_takes_modules_and_arrays_and_shows_what_tells_itself() -> None:
    class Told:
        shape = (8, 2)
        placements = ()

    with torch.device("meta"):
        model = nn.Linear(3, 4)
    spec = Spec({"tp": 2}, {"*weight": shard(0, "tp"), "*bias": [shard(0, "tp"), padded(0, 3)]})
    state = {"m": [model], "told": Told(), "optim": object(), "zero": torch.tensor(1.0)}
    assert spec.explain(state, rank=1) == "\n".join(
        [
            "name        rule       own shape  array       shape   pieces",
            "m.0.weight  '*weight'  (4, 3)     m.0.weight  (8, 3)  [4:8, 0:3]",
            "m.0.bias    '*bias'    (4,)       m.0.bias    (3,)    nothing",
            "told        (DTensor)             told        (8, 2)",
        ]
    )
    text = refused(lambda: spec.explain(model))
    assert "give the state as a rank saves it, a dict of items, e.g. {'model': model}" in text
    assert "rank 2 has no place" in refused(lambda: spec.explain(state, rank=2))


def test_proofs_pass_for_what_save_takes() -> None:
    small(2).prove([SMALL] * 4)
    for sizes in ({"pp": 2, "dp": 2, "tp": 2}, {"tp": 4, "pp": 4, "dp": 1}):
        spec = gpt.spec(sizes)
        count = 8 if len(set(sizes.values())) == 1 else 16
        stages = [gpt.Stage(sizes, spec.axes.coordinates(rank)) for rank in range(count)]
        spec.prove([{"model": stage} for stage in stages])


def job(**changes: object) -> list[dict[str, object]]:
    """The states of four ranks, of which number 3 has something else."""
    ranks: list[dict[str, object]] = [{"m": {"w": (4, 3)}} for _ in range(4)]
    ranks[3] = {"m": {"w": (4, 3), **changes}}
    return ranks


def test_proofs_name_gaps_overlaps_and_disagreements() -> None:
    def spec(rule: object) -> Spec:
        return Spec(
            {"pp": 2, "tp": 2},
            {"m.w": rule, "m.head": [tied("m.e"), replicate("tp")]},
            unique=("pp",),
        )  # type: ignore[dict-item]

    def proof(rule: object, states: list[dict[str, object]]) -> str:
        return refused(lambda: spec(rule).prove(states))

    alone = (
        "m.w: rank 0 holds it alone with pp=0, and rank 2 with pp=1; two tensors need two names, "
        "renamed(...), and one that several ranks share is tied(...) or replicated"
    )
    assert proof(shard(0, "tp"), job()) == alone
    everywhere = [shard(0, "tp"), replicate("pp")]
    text = proof(everywhere, job(w=(5, 3)))
    assert "m.w: ranks disagree about its shape: rank 0 has (8, 3), rank 3 has (10, 3)" in text
    assert "a rule of a specification size= or sizes=" in text
    text = proof(everywhere, [*job()[:3], {"m": {}}])
    assert "m.w: rank 3 holds Box(offset=(4, 0), shape=(4, 3)) of shape (8, 3)" in text
    assert "in a specification unique(axis) says that others do not have it" in text
    by_stage = [shard(0, "tp"), renamed(lambda name, at: "m.w"), unique("pp")]
    assert proof(by_stage, job()) == alone
    text = proof(everywhere, job(head=(4,)))
    assert (
        "m.e: a rule ties a tensor of rank 3 to it, but no rank has a tensor of this name" in text
    )
    assert proof(everywhere, job()[:3]) == (
        "prove takes the states of all ranks in rising order: 4 by the axes of the specification, "
        "but it got 3"
    )


def test_proofs_find_what_no_rank_holds_and_what_two_hold() -> None:
    # Two rules that name one array and cut it differently.
    rules = {"m.a": [tied("m.b"), shard(0, "tp")], "m.b": shard(1, "tp")}
    spec = Spec({"pp": 2, "tp": 2}, rules, unique=("pp",))
    states = [
        {"m": {"b": (4, 2)}},
        {"m": {"b": (4, 2)}},
        {"m": {"a": (2, 4)}},
        {"m": {"a": (2, 4)}},
    ]
    text = refused(lambda: spec.prove(states))
    assert "m.b" in text
    assert "overlapping parts" in text
    assert "Box(offset=(0, 0), shape=(2, 4))" in text


def test_proofs_find_rules_of_one_array_that_differ() -> None:
    rules = {"m.a": [tied("m.b"), shard(0, "tp")], "m.b": shard(1, "tp")}
    spec = Spec({"tp": 2}, rules)
    text = refused(lambda: spec.prove([{"m": {"b": (4, 2)}}, {"m": {"a": (2, 4)}}]))
    assert "m.b: " in text
    assert "overlapping parts" in text
    means = {"m.a": [tied("m.b"), average("dp")], "m.b": replicate("dp")}
    text = refused(lambda: Spec({"dp": 2}, means).prove([{"m": {"b": (4,)}}, {"m": {"a": (4,)}}]))
    assert "m.b: ranks disagree about its mean: rank 0 has False, rank 1 has True" in text


def test_an_array_that_one_rank_claims_may_be_held_by_those_that_do_not() -> None:
    def described(rank: int, alone: str, *, tied: bool = False) -> RankClass:
        own = Partition((1,), (rank,), (None,))
        spec = ArraySpec("w", (4,), "float32", ("x",), own, alone=alone, tied=tied)
        return RankClass((rank,), (spec,))

    (array,) = merge([described(0, "pp=0"), described(1, ""), described(2, "pp=2", tied=True)])
    assert [block.ranks for block in array.layout.blocks] == [(0, 1, 2)]
    with pytest.raises(StateError, match="rank 0 holds it alone with pp=0, and rank 3 with pp=1"):
        merge([described(0, "pp=0"), described(3, "pp=1")])


def test_a_tie_on_one_rank_must_have_one_shape() -> None:
    spec = Spec({"tp": 2}, {"m.*": replicate("tp"), "n": [tied("m.w"), replicate("tp")]})
    spec.prove([{"m": {"w": (4,)}, "n": (4,)}] * 2)
    spec.prove([{"n": (4,), "m": {"w": (4,)}}] * 2)
    text = refused(lambda: spec.prove([{"m": {"w": (4,)}, "n": (5,)}] * 2))
    assert text == (
        "n: on rank 0 it is stored as m.w of shape (5,), as which another tensor has shape (4,)"
    )


def test_a_thousand_ranks_are_proved_quickly() -> None:
    layers = 8
    state = {"m": {f"{n}": {"qkv": (12, 64), "out": (64, 4), "norm": (64,)} for n in range(layers)}}
    spec = Spec(
        {"pp": 8, "dp": 4, "tp": 32},
        {
            "m.*.qkv": [shard(0, "tp", sections=(128, 128, 128))],
            "m.*.out": [shard(1, "tp")],
            "m.*.norm": [replicate("tp")],
        },
        replicate=("pp", "dp"),
    )
    start = time.process_time()
    spec.prove([state] * 1024)
    line = Spec({"tp": 1024}, {"w": shard(0, "tp")})
    line.prove([{"w": (8, 4)}] * 1024)
    assert line.explain({"w": (8, 4)}, rank=1023).endswith("(8192, 4)  [8184:8192, 0:4]")
    assert time.process_time() - start < 5

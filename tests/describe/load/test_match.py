"""The load side: strictness, differences, and what is filled in place."""

from __future__ import annotations

import sys
import types

import numpy as np
import pytest
import torch
from describe.engine import ALONE, Checkpoint, bits, load, read, save
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import Partial, Replicate, Shard, distribute_tensor

from ucpstore.describe import describe, match
from ucpstore.describe.engines.deepspeed import Counters
from ucpstore.errors import CorruptError, MismatchError, StateError, UnsupportedError
from ucpstore.saving.arrival import compare_replicas
from ucpstore.spec import Spec, replicate, stacked

TWO = {0: 0, 1: 1}


def test_all_differences_are_listed_at_once():
    checkpoint = save({"m": {"a": torch.ones(2), "b": torch.ones(2), "c": 1, "d": torch.ones(2)}})
    target = {"m": {"a": torch.zeros(3), "b": torch.zeros(2).half(), "c": torch.zeros(2), "e": 1}}
    with pytest.raises(MismatchError) as caught:
        load(target, checkpoint)
    text = str(caught.value)
    assert "(5 differences); nothing was changed" in text
    for part in (
        "not in the checkpoint: m.e",
        "not in the target: m.d",
        "m.a: stored with shape (2,), the target has shape (3,)",
        "m.b: stored as float32, the target is float16; ",
        "m.c: the target is a tensor, but the value 1 was saved",
    ):
        assert part in text


def test_many_names_with_the_same_difference_share_a_line():
    names = [f"w{number}" for number in range(6)]
    checkpoint = save({"m": {name: torch.ones(2) for name in names}})
    for halves, many in ((4, False), (6, True)):
        target = {
            "m": {
                n: torch.zeros(2).half() if n in names[:halves] else torch.zeros(2) for n in names
            }
        }
        with pytest.raises(MismatchError, match=rf"\({halves} differences\)") as caught:
            load(target, checkpoint)
        text = str(caught.value)
        assert all(f"m.{name}" in text for name in names[:halves])
        assert text.count("stored as float32") == (1 if many else halves)
        assert ("cast='m.w*'" in text) is many
    with pytest.raises(UnsupportedError) as refused:
        load({"m": {name: torch.zeros(2, device="meta") for name in names}}, checkpoint)
    assert str(refused.value).startswith("m.w0, m.w1, m.w2, m.w3, m.w4, m.w5: a tensor on the meta")
    load({"m": {name: torch.zeros(2).half() for name in names}}, checkpoint, cast="m.w*")


def test_an_item_that_was_not_saved_is_refused_with_those_that_were():
    checkpoint = save({"model": {"w": torch.ones(2)}, "epoch": 1})
    with pytest.raises(MismatchError, match=r"not in the checkpoint: net\n.*items model, epoch;"):
        load({"net": {"w": torch.zeros(2)}}, checkpoint)


@pytest.mark.parametrize("shape", [(4, 4), (16, 4), (4, 8), (32,), (8, 4, 1), (1, 4)])
def test_b12_shapes_must_be_equal(shape):
    checkpoint = save({"m": {"a": torch.ones(2), "w": torch.ones(8, 4)}})
    target = {"m": {"a": torch.zeros(2), "w": torch.zeros(shape)}}
    with pytest.raises(MismatchError, match=r"m\.w: stored with shape \(8, 4\)"):
        load(target, checkpoint)
    assert target["m"]["a"].tolist() == [0.0, 0.0]


def test_on_several_ranks_a_part_without_a_specification_is_pointed_at():
    checkpoint = save({"m": {"w": torch.ones(8, 4)}})
    hint = "; if each rank has a part of it, pass spec= (docs/specification.md)"
    for shape, ranks, told in (
        ((4, 4), 2, True),
        ((8, 2), 2, True),
        ((4, 4), 1, False),
        ((16, 4), 2, False),
        ((4,), 2, False),
    ):
        target = {"m": {"w": torch.zeros(shape)}}
        group = {rank: rank for rank in range(ranks)}
        with pytest.raises(MismatchError) as caught:
            match(target, checkpoint.tree, checkpoint.infos, group_ranks=group, rank=0)
        assert str(caught.value).endswith(f"the target has shape {shape}{hint if told else ''}")
    spec = Spec({"tp": 2}, {"*": replicate("tp")})
    target = {"m": {"w": torch.zeros(4, 4)}}
    with pytest.raises(MismatchError, match=r"has shape \(4, 4\)$"):
        match(target, checkpoint.tree, checkpoint.infos, group_ranks=TWO, rank=0, spec=spec)


def test_replicas_that_differ_point_at_specifications():
    with pytest.raises(StateError, match=r"if each rank has a part of it, pass spec= .*, wrap it"):
        compare_replicas({0: {"m/w": "a"}, 1: {"m/w": "b"}})


def test_a_stack_in_the_checkpoint_of_separate_experts_is_pointed_at():
    def experts(*names: str) -> nn.Module:
        model = nn.Module()
        model.experts = nn.ModuleDict({name: nn.Linear(3, 2, bias=False) for name in names})
        return model

    hint = (
        "  model.experts.0.weight: the checkpoint has model.experts.weight of shape (2, 2, 3); if "
        "that has all layers or experts, a rule with stacked loads separate ones from it "
        "(docs/specification.md)"
    )
    for shape, names, told in (
        ((2, 2, 3), ("0", "1"), True),
        ((2, 3), ("0", "1"), False),
        ((2, 2, 3), ("a", "b"), False),
    ):
        checkpoint = save({"model": {"experts.weight": torch.ones(shape)}})
        with pytest.raises(MismatchError) as caught:
            load({"model": experts(*names)}, checkpoint)
        lines = str(caught.value).splitlines()
        assert lines[1] == "  not in the checkpoint: " + ", ".join(
            f"model.experts.{name}.weight" for name in names
        )
        assert (lines[-1] == hint) is told
    rule = [stacked(lambda name, at: ("model.experts.weight", int(name.split(".")[2])))]
    spec, model = Spec({}, {"*": rule}), experts("0", "1")
    checkpoint = save({"model": {"experts.weight": torch.ones(2, 2, 3)}})
    state = {"model": model}
    read(match(state, checkpoint.tree, checkpoint.infos, group_ranks=ALONE, spec=spec), checkpoint)
    assert model.experts["1"].weight.tolist() == [[1.0] * 3] * 2


def test_an_engine_under_a_specification_is_refused_before_rules_are_asked_for(monkeypatch):
    class Engine(nn.Module):
        global_steps = global_samples = skipped_steps = 0

        def __init__(self) -> None:
            super().__init__()
            self.module = nn.Linear(2, 2)

    module = types.ModuleType("deepspeed.runtime.engine")
    module.DeepSpeedEngine = Engine
    monkeypatch.setitem(sys.modules, module.__name__, module)
    engine, spec = Engine(), Spec({"dp": 2}, {})
    states = {
        "epochs.1.run": {"epochs": [{}, {"run": engine}]},
        "the state": {"model": engine.module, "counters": Counters(engine)},
    }
    for where, state in states.items():
        told = f"^{where}: a DeepSpeed engine tells itself .*; leave spec out"
        with pytest.raises(UnsupportedError, match=told):
            describe(state, group_ranks=TWO, rank=0, spec=spec)
        with pytest.raises(UnsupportedError, match=told):
            match(state, {"dict": []}, {}, group_ranks=TWO, rank=0, spec=spec)


def test_b13_dtypes_must_be_equal_unless_cast():
    third = torch.full((2,), 1 / 3)
    checkpoint = save({"m": {"w": third}, "i": torch.arange(2)})
    for dtype in (torch.bfloat16, torch.float16, torch.float64):
        target = {"m": {"w": torch.zeros(2, dtype=dtype)}}
        with pytest.raises(MismatchError, match=r"cast='m\.w'"):
            load(target, checkpoint)
        load(target, checkpoint, cast=["other", "m.*"])
        assert bits(target["m"]["w"]) == bits(third.to(dtype))
    for dtype in (torch.int64, torch.bool):
        with pytest.raises(MismatchError, match="float is never converted to"):
            load({"m": {"w": torch.zeros(2, dtype=dtype)}}, checkpoint, cast="*")
    target = {"i": torch.zeros(2)}
    load(target, checkpoint, cast="i")
    assert target["i"].tolist() == [0.0, 1.0]


def test_complex_is_never_converted_to_real():
    checkpoint = save({"c": torch.ones(2, dtype=torch.complex64)})
    with pytest.raises(MismatchError, match="complex is never converted to float"):
        load({"c": torch.zeros(2)}, checkpoint, cast="*")


def test_zero_d_targets_take_arrays_and_tree_leaves():
    class Holder(nn.Module):
        def __init__(self, value: float) -> None:
            super().__init__()
            self.scale = nn.Parameter(torch.tensor(value))

    source = save({"m": Holder(2.5)})
    plain = {"m": {"scale": torch.tensor(0.0)}}
    load(plain, source)
    assert plain["m"]["scale"].item() == 2.5
    module = Holder(0.0)
    load({"m": module}, save({"m": {"scale": torch.tensor(1.5)}}))
    assert module.scale.item() == 1.5
    with pytest.raises(MismatchError, match=r"m\.scale: stored as float32, the target is float64"):
        load({"m": {"scale": torch.tensor(0.0, dtype=torch.float64)}}, save(plain))
    with pytest.raises(MismatchError, match=r"m\.scale: stored with shape \(\), .* \(1,\)"):
        load({"m": {"scale": torch.zeros(1)}}, save(plain))


def test_b56_tensors_and_python_values_are_not_swapped():
    checkpoint = save({"v": {"f": 0.5, "t": torch.tensor(0.5), "l": [0.5]}})
    for target, text in (
        (
            {"f": torch.tensor(0.0), "t": torch.tensor(0.0), "l": [0.0]},
            r"v\.f: the target is a ten",
        ),
        ({"f": 0.0, "t": 0.0, "l": [0.0]}, r"v\.t: the target is a float, but a 0-d tensor"),
    ):
        with pytest.raises(MismatchError, match=text):
            load({"v": target}, checkpoint)


def test_python_values_are_replaced_in_the_containers_that_were_passed():
    inner, row, both = {"n": 0, "s": "x"}, [9], [torch.zeros(1), 0]
    state = {"a": inner, "row": row, "pair": (torch.zeros(2), 0), "both": both, "top": None}
    weight = state["pair"][0]
    saved = {
        "a": {"n": 17, "s": (1, [2])},
        "row": [1, 2, 3],
        "pair": (torch.ones(2), 5),
        "both": [torch.ones(1), "z"],
        "top": {"x": 1},
    }
    load(state, save(saved))
    assert state["a"] is inner and inner == {"n": 17, "s": (1, [2])}
    assert state["row"] is row and row == [1, 2, 3]
    assert state["pair"][0] is weight and weight.tolist() == [1.0, 1.0]
    assert type(state["pair"]) is tuple and state["pair"][1] == 5
    assert state["both"] is both and both[1] == "z" and both[0].item() == 1.0
    assert state["top"] == {"x": 1}


def test_a_slot_gets_the_saved_type():
    target = {"v": {"b": 1, "i": 1.0, "n": 5, "f": 0}}
    load(target, save({"v": {"b": True, "i": 2, "n": None, "f": float("nan")}}))
    assert [type(value) for value in target["v"].values()] == [bool, int, type(None), float]


def test_lists_of_tensors_must_be_as_long():
    with pytest.raises(MismatchError, match=r"v: saved with 2 elements, the target has 1"):
        load({"v": [torch.ones(1)]}, save({"v": [torch.ones(1), torch.ones(1)]}))


def test_empty_dicts_are_strict():
    with pytest.raises(MismatchError, match=r"not in the target: m\.a"):
        load({"m": {}}, save({"m": {"a": 1}}))


def test_b24_states_of_a_fresh_optimizer_get_advice():
    net = nn.Linear(1, 1)
    source = torch.optim.AdamW(net.parameters())
    net(torch.ones(1, 1)).sum().backward()
    source.step()
    fresh = torch.optim.AdamW(net.parameters())
    with pytest.raises(MismatchError, match=r"optimizer\.state: .*pass the optimizer itself"):
        load({"optimizer": fresh.state_dict()}, save({"optimizer": source.state_dict()}))


def test_b55_nested_integer_keys_and_empty_dicts():
    def made(fill: float) -> dict[object, object]:
        factors = {0: torch.full((2, 2), fill), 1: torch.full((2, 2), fill)}
        return {0: {"block_0": {"shampoo": {"factor_matrices": factors, "indices": {}}}}}

    target = {"o": made(0.0)}
    load(target, save({"o": made(3.0)}))
    assert target["o"][0]["block_0"]["shampoo"]["factor_matrices"][1].tolist() == [[3.0, 3.0]] * 2


def test_b61_missing_items_are_named():
    with pytest.raises(MismatchError, match=r"not in the checkpoint: optim$|optim\n"):
        load({"model": nn.Linear(1, 1), "optim": {"a": 1}}, save({"model": nn.Linear(1, 1)}))


def test_targets_may_be_views_of_any_strides():
    base = torch.zeros(6, 8)
    state = {"t": {"left": base[:, ::2], "right": base[:, 1::2], "flip": torch.zeros(3, 2).t()}}
    left, right = torch.arange(24.0).reshape(6, 4), -torch.ones(6, 4)
    load(state, save({"t": {"left": left, "right": right, "flip": torch.ones(2, 3)}}))
    assert torch.equal(base[:, ::2], left)
    assert torch.equal(base[:, 1::2], right)


def test_targets_that_share_elements_are_refused():
    base = torch.zeros(4)
    saved = save({"t": {"a": torch.ones(3), "b": torch.ones(3)}})
    with pytest.raises(MismatchError, match=r"t\.a and t\.b: views of the same memory"):
        load({"t": {"a": base[:3], "b": base[1:]}}, saved)
    with pytest.raises(MismatchError, match=r"t\.a: the target is expanded"):
        load({"t": {"a": torch.zeros(1).expand(3), "b": torch.zeros(3)}}, saved)
    with pytest.raises(MismatchError, match=r"t\.a: the target is expanded"):
        sliding = torch.zeros(4).as_strided((2, 2), (1, 1))
        load({"t": {"a": sliding}}, save({"t": {"a": torch.ones(2, 2)}}))


def test_pending_conjugations_cannot_be_targets():
    with pytest.raises(UnsupportedError, match=r"^c: a view with a pending conjugation"):
        load({"c": torch.zeros(2, dtype=torch.complex64).conj()}, save({"c": torch.ones(2) * 1j}))


def test_ties_over_items_must_hold_in_the_checkpoint():
    net = nn.Linear(2, 2)
    state = {"m": net, "sd": net.state_dict()}
    checkpoint = save(state)
    assert "sd/weight" in checkpoint.arrays
    load(state, checkpoint)
    other = save({"m": net, "sd": nn.Linear(2, 2)})
    with pytest.raises(MismatchError, match=r"m\.weight and sd\.weight: tied .*different values"):
        load(state, other)


def test_numpy_targets_are_filled_in_place():
    big, plain = np.zeros(3, dtype=">i4"), np.zeros((2, 2))
    kept = plain
    state = {"n": {"big": big, "plain": plain}}
    load(
        state,
        save({"n": {"big": np.arange(3, dtype=np.int32), "plain": torch.ones(2, 2).double()}}),
    )
    assert state["n"]["plain"] is kept and kept.tolist() == [[1.0, 1.0], [1.0, 1.0]]
    assert big.tolist() == [0, 1, 2] and big.dtype == ">i4"
    plain.flags.writeable = False
    with pytest.raises(StateError, match=r"n\.plain: the target is a read-only"):
        load({"n": {"plain": plain}}, save({"n": {"plain": np.ones((2, 2))}}))


def test_kinds_of_containers_must_fit():
    saved = save({"d": {"a": 1}, "l": [torch.ones(1)], "x": 1, "m": {"a": torch.ones(1)}})
    for target, text in (
        ({"d": nn.Linear(1, 1)}, r"not in the target: d\.a"),
        ({"l": {"a": 1}}, "l: the target is a dict, but a list was saved"),
        ({"x": {"a": 1}}, "x: the target is a dict, but the value 1 was saved"),
        ({"x": nn.Linear(1, 1)}, "x: the target is a module, but the value 1 was saved"),
        ({"m": [torch.ones(1)]}, "m: the target is a list, but a dict was saved"),
        ({"m": 5}, "m: the target is a int, but a dict was saved"),
        ({"m": torch.optim.SGD([torch.ones(1)])}, "m: the target is an optimizer, but a dict"),
    ):
        with pytest.raises(MismatchError, match=text):
            load(target, saved)


def test_b37_b38_targets_are_checked_as_sources_are(fake_ranks):
    from torch.distributed.tensor import DTensor

    fake_ranks(0, 2)
    mesh = DeviceMesh("cpu", [0, 1])
    target = DTensor.from_local(torch.zeros(4), mesh, [Partial()], run_check=False)
    with pytest.raises(UnsupportedError, match=r"^w: .*redistribute it"):
        match(
            {"w": target},
            save({"w": torch.ones(4)}).tree,
            save({"w": torch.ones(4)}).infos,
            group_ranks={0: 0, 1: 1},
        )


@pytest.mark.parametrize("rank", range(4))
def test_dtensors_are_read_in_place(fake_ranks, rank):
    whole = torch.arange(35.0).reshape(5, 7)
    checkpoint = save({"w": whole, "s": torch.tensor(2.0)})
    fake_ranks(rank, 4)
    mesh = DeviceMesh("cpu", torch.arange(4).reshape(2, 2))
    target = distribute_tensor(torch.zeros(5, 7), mesh, [Shard(1), Shard(0)], src_data_rank=None)
    expected = distribute_tensor(whole, mesh, [Shard(1), Shard(0)], src_data_rank=None)
    scalar = distribute_tensor(torch.tensor(0.0), mesh, [Replicate()] * 2, src_data_rank=None)
    load({"w": target, "s": scalar}, checkpoint, group_ranks={r: r for r in range(4)})
    assert torch.equal(target._local_tensor, expected._local_tensor)
    assert scalar._local_tensor.item() == 2.0


def test_ranks_outside_of_the_mesh_read_nothing(fake_ranks):
    checkpoint = save({"w": torch.arange(4.0)})
    fake_ranks(3, 4)
    mesh = DeviceMesh("cpu", [0, 1])
    target = distribute_tensor(torch.zeros(4), mesh, [Shard(0)], src_data_rank=None)
    done = load({"w": target}, checkpoint, group_ranks={r: r for r in range(4)})
    assert done.reads == ()


def test_arrays_that_the_metadata_lacks_are_damage():
    checkpoint = save({"w": torch.ones(1)})
    with pytest.raises(CorruptError, match=r"^w: the tree names an array"):
        load({"w": torch.ones(1)}, Checkpoint(checkpoint.tree, {}))


def test_nothing_is_read_or_put_by_match_itself():
    checkpoint = save({"v": {"n": 1, "w": torch.ones(1)}})
    state = {"v": {"n": 0, "w": torch.zeros(1)}}
    target = match(state, checkpoint.tree, checkpoint.infos, group_ranks=ALONE)
    assert state["v"]["n"] == 0
    read(target, checkpoint)
    assert state["v"]["n"] == 1 and state["v"]["w"].item() == 1.0


def test_a_module_loads_from_another_rank_count(fake_ranks):
    """Four ranks' rows, then a plain module: the oracle is the whole tensor."""
    from describe.engine import join

    whole = torch.arange(21.0).reshape(7, 3)
    states = []
    for rank in range(4):
        fake_ranks(rank, 4)
        mesh = DeviceMesh("cpu", range(4))
        net = nn.Linear(3, 7, bias=False)
        net.weight = nn.Parameter(distribute_tensor(whole, mesh, [Shard(0)], src_data_rank=None))
        states.append(describe({"m": net}, group_ranks={r: r for r in range(4)}))
    target = nn.Linear(3, 7, bias=False)
    load({"m": target}, join(states))
    assert torch.equal(target.weight.detach(), whole)

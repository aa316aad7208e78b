"""Names of modules: wrappers, ties, buffers, extra state."""

from __future__ import annotations

import sys
import types

import pytest
import torch
import torch.distributed as dist
from describe.engine import ALONE, bits, load, save
from torch import nn
from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import checkpoint_wrapper

from ucpstore.describe import describe
from ucpstore.describe.modules.entries import entries
from ucpstore.errors import MismatchError, StateError, UnsupportedError
from ucpstore.spec import Spec


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.module = nn.Linear(2, 3)
        self.norm = nn.BatchNorm1d(3)
        self.scale = nn.Parameter(torch.tensor(0.5))
        self.register_buffer("cache", torch.ones(4), persistent=False)


NAMES = [
    "scale",
    "module.weight",
    "module.bias",
    "norm.weight",
    "norm.bias",
    "norm.running_mean",
    "norm.running_var",
    "norm.num_batches_tracked",
]


def _names(state: object) -> list[str]:
    tree = save({"m": state}).tree
    return [key for key, _ in tree["dict"][0][1]["dict"]]


def test_names_are_those_of_state_dict():
    assert _names(Net()) == NAMES == list(Net().state_dict())


def test_zero_d_tensors_of_modules_are_arrays():
    checkpoint = save({"m": Net()})
    assert checkpoint.arrays["m/scale"].shape == ()
    assert checkpoint.arrays["m/norm.num_batches_tracked"].dtype == torch.int64


def test_dimension_names_begin_with_the_parameter():
    state = describe({"m": Net()}, group_ranks=ALONE)
    named = {array.spec.path: array.spec.dimension_names for array in state.arrays}
    assert named["m/module.weight"] == ("module.weight:0", "module.weight:1")


def test_a_module_and_its_state_dict_are_the_same_tree():
    net = Net()
    assert save({"m": net}).tree == save({"m": net.state_dict()}).tree


def _compile(net: nn.Module) -> nn.Module:
    # the default backend takes seconds to import
    return torch.compile(net, backend="eager")


def _wrapped(kind: str, net: nn.Module) -> nn.Module:
    if "ddp" in kind.split():
        parts = kind.split()
        for part in parts:
            net = _compile(net) if part == "compile" else nn.parallel.DistributedDataParallel(net)
        return net
    if kind == "checkpoint":
        net.module = checkpoint_wrapper(net.module)
        return net
    if kind == "inner compile":
        net.module = _compile(net.module)
        return net
    return {"data": nn.DataParallel, "compile": _compile}[kind](net)


KINDS = ["ddp", "compile", "compile ddp", "ddp compile", "checkpoint", "inner compile", "data"]


@pytest.mark.parametrize("kind", KINDS)
def test_b25_wrappers_are_seen_through(kind, fake_ranks):
    fake_ranks(0, 1)
    net, other = Net(), Net()
    wrapped = _wrapped(kind, net)
    assert _names(wrapped) == NAMES

    checkpoint = save({"m": wrapped})
    load({"m": other}, checkpoint)
    assert bits(other.module.weight) == bits(checkpoint.arrays["m/module.weight"])

    target = Net()
    load({"m": _wrapped(kind, target)}, save({"m": other}))
    inner = [p for p in target.parameters() if p.shape == (3, 2)]
    assert bits(inner[0]) == bits(other.module.weight)


def _explained(state: object) -> list[str]:
    return [line.split()[0] for line in Spec({}, {}).explain(state).splitlines()[1:]]


@pytest.mark.parametrize("kind", ["plain", *KINDS])
def test_explain_names_what_save_names(kind, fake_ranks):
    fake_ranks(0, 1)
    net = Net() if kind == "plain" else _wrapped(kind, Net())
    assert _explained({"m": net}) == [f"m.{entry.name}" for entry in entries(net, "m")]
    assert _explained({"m": net}) == [f"m.{name}" for name in NAMES]


def test_explain_names_what_a_gloo_group_of_one_names(tmp_path):
    store = f"file://{tmp_path / 'group'}"
    dist.init_process_group("gloo", init_method=store, rank=0, world_size=1)
    try:
        net = _compile(nn.parallel.DistributedDataParallel(Net()))
        assert (
            _explained({"m": net})
            == [f"m.{name}" for name in NAMES]
            == [f"m.{name}" for name in _names(net)]
        )
    finally:
        dist.destroy_process_group()


def test_b25_a_prefix_in_a_state_dict_is_pointed_at():
    checkpoint = save({"m": nn.DataParallel(nn.Linear(2, 2)).state_dict()})
    with pytest.raises(MismatchError, match=r"'module\.'.*pass the module itself"):
        load({"m": nn.Linear(2, 2)}, checkpoint)


class Tied(nn.Module):
    def __init__(self, tied: bool = True) -> None:
        super().__init__()
        self.emb = nn.Embedding(11, 4)
        self.head = nn.Linear(4, 11, bias=False)
        if tied:
            self.head.weight = self.emb.weight


def test_b10_tied_parameters_are_stored_once():
    for state in (Tied(), Tied().state_dict()):
        checkpoint = save({"m": state})
        assert list(checkpoint.arrays) == ["m/emb.weight"]
        assert checkpoint.tree["dict"][0][1]["dict"][1] == ["head.weight", {"link": "m/emb.weight"}]


def test_explain_names_tied_tensors_twice_and_what_is_a_tensor_of_extra_state():
    assert _explained({"m": Tied()}) == ["m.emb.weight", "m.head.weight"]
    extra = Extra({"n": (1, 2), "amax": torch.zeros(2), "zero": torch.tensor(1.0)})
    assert _explained({"m": nn.Sequential(extra)}) == [
        "m.0.weight",
        "m.0.bias",
        "m.0._extra_state.amax",
    ]
    assert list(save({"m": nn.Sequential(extra)}).arrays) == [
        "m/0._extra_state/amax",
        "m/0.bias",
        "m/0.weight",
    ]


def test_explain_tells_that_an_engine_needs_no_specification(monkeypatch):
    class Engine(nn.Module):
        pass

    module = types.ModuleType("deepspeed.runtime.engine")
    module.DeepSpeedEngine = Engine
    monkeypatch.setitem(sys.modules, module.__name__, module)
    with pytest.raises(StateError, match=r"^e: .*without a specification \(docs/deepspeed\.md\)"):
        Spec({"dp": 2}, {}).explain({"e": Engine()})
    with pytest.raises(StateError, match=r"^the state: .*docs/deepspeed\.md"):
        Spec({"dp": 2}, {}).explain(Engine())


def test_b10_tied_loads_into_tied_and_untied():
    source, tied, untied = Tied(), Tied(), Tied(tied=False)
    checkpoint = save({"m": source})

    target = load({"m": tied}, checkpoint)
    assert tied.head.weight is tied.emb.weight
    assert len(target.reads) == 1

    load({"m": untied}, checkpoint)
    for weight in (tied.emb.weight, untied.emb.weight, untied.head.weight):
        assert bits(weight) == bits(source.emb.weight)


def test_b10_untied_into_tied_is_refused_with_both_names():
    with pytest.raises(MismatchError, match=r"m\.emb\.weight and m\.head\.weight: tied"):
        load({"m": Tied()}, save({"m": Tied(tied=False)}))


class Extra(nn.Linear):
    def __init__(self, value: object) -> None:
        super().__init__(1, 1)
        self.value = value

    def get_extra_state(self) -> object:
        return self.value

    def set_extra_state(self, value: object) -> None:
        self.value = value


def test_extra_state_is_a_value_of_the_tree():
    target = Extra({"amax": torch.zeros(2)})
    load({"m": target}, save({"m": Extra({"n": (1, 2.5), "amax": torch.tensor([3.0, 4.0])})}))
    assert target.value["n"] == (1, 2.5)
    assert target.value["amax"].tolist() == [3.0, 4.0]


class Renames(nn.Linear):
    def _save_to_state_dict(self, destination, prefix, keep_vars):
        destination[prefix + "packed"] = self.weight.detach()


def test_modules_that_rewrite_their_state_dict_are_refused():
    with pytest.raises(UnsupportedError, match=r"^m\.0: Renames\.state_dict\(\) .*'0\.packed'"):
        save({"m": nn.Sequential(Renames(2, 2))})


def test_hooks_that_keep_the_names_are_fine():
    net = nn.Linear(2, 2)
    net.register_state_dict_post_hook(lambda *args: None)
    assert _names(net) == ["weight", "bias"]


def test_lazy_and_meta_modules_are_refused():
    with pytest.raises(UnsupportedError, match=r"^m\.weight: .*run one forward"):
        save({"m": nn.LazyLinear(2)})
    with torch.device("meta"):
        net = nn.Linear(2, 2)
    with pytest.raises(UnsupportedError, match=r"^m\.weight: .*to_empty"):
        save({"m": net})
    checkpoint = save({"m": nn.Linear(2, 2)})
    with pytest.raises(UnsupportedError, match=r"(?s)m\.weight: .*to_empty.*m\.bias"):
        load({"m": net}, checkpoint)


def test_b62_two_modules_with_the_same_names_stay_separate():
    model, ema = nn.Linear(1, 1), nn.Linear(1, 1)
    with torch.no_grad():
        model.weight.fill_(1.0)
        ema.weight.fill_(2.0)
    checkpoint = save({"model": model, "ema": ema})
    assert checkpoint.arrays["model/weight"].item() == 1.0
    assert checkpoint.arrays["ema/weight"].item() == 2.0

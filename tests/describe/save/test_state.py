"""The save side: leaves, names, ties and refusals."""

from __future__ import annotations

import enum
from collections import Counter, OrderedDict

import ml_dtypes
import numpy as np
import pytest
import torch
from describe.engine import ALONE, bits, load, save
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import Shard, distribute_tensor

from ucpstore.describe import describe
from ucpstore.errors import StateError, UnsupportedError


def test_b06_a_slice_stays_a_slice():
    big = torch.randn(10, 10, 10)
    state = describe({"a": big[3]}, group_ranks=ALONE)
    assert state.arrays[0].spec.shape == (10, 10)
    assert state.arrays[0].views[0].tensor.data_ptr() == big[3].data_ptr()


def test_b07_strides_are_kept_and_order_is_logical():
    tensors = {
        "channels": torch.randn(4, 8, 3, 3).to(memory_format=torch.channels_last),
        "transposed": torch.randn(6, 4).t(),
        "stepped": torch.arange(20)[::3],
        "expanded": torch.randn(1, 5).expand(4, 5),
        "conjugated": torch.randn(3, dtype=torch.complex64).conj(),
        "negated": torch.randn(3, dtype=torch.complex64).conj().imag,
    }
    checkpoint = save(tensors)
    for name, tensor in tensors.items():
        assert bits(checkpoint.arrays[name]) == bits(tensor.clone()), name
    target = {"channels": torch.zeros(4, 8, 3, 3).to(memory_format=torch.channels_last)}
    load(target, checkpoint)
    assert bits(target["channels"]) == bits(tensors["channels"])
    assert target["channels"].is_contiguous(memory_format=torch.channels_last)


def test_b08_empty_tensors_are_tied_to_nothing():
    state = {
        "A": torch.tensor([]),
        "B": torch.tensor([]),
        "C": torch.zeros(3, 0, 2),
        "D": torch.zeros(0, 4, dtype=torch.bfloat16),
    }
    checkpoint = save(state)
    assert {path: (tuple(a.shape), a.dtype) for path, a in checkpoint.arrays.items()} == {
        "A": ((0,), torch.float32),
        "B": ((0,), torch.float32),
        "C": ((3, 0, 2), torch.float32),
        "D": ((0, 4), torch.bfloat16),
    }


def test_b09_zero_d_tensors_lie_in_the_tree():
    for tensor in (torch.tensor(7.0), torch.tensor(True), torch.tensor(2**40)):
        checkpoint = save({"a": {"step": tensor}})
        assert checkpoint.arrays == {}
        target = {"a": {"step": torch.zeros_like(tensor)}}
        load(target, checkpoint)
        assert bits(target["a"]["step"]) == bits(tensor)


def test_ties_outside_of_modules_are_links_within_an_item():
    tensor = torch.arange(6.0)
    checkpoint = save({"d": {"a": tensor, "b": tensor[:], "c": tensor[:3]}, "e": {"a": tensor}})
    assert sorted(checkpoint.arrays) == ["d/a", "d/c", "e/a"]
    assert checkpoint.tree["dict"][0][1]["dict"][1][1] == {"link": "d/a"}


def test_memory_that_is_freed_during_the_walk_makes_no_tie():
    class Fresh:
        def __init__(self, value: float) -> None:
            self.value = value

        def state_dict(self) -> dict[str, torch.Tensor]:
            made = torch.full((3,), self.value, dtype=torch.complex64)
            return {"w": made.conj()}

        def load_state_dict(self, state: object) -> None: ...

    state = {"item": {str(n): Fresh(n) for n in range(20)}}
    assert len(save(state).arrays) == 20


def test_paths_and_display_names_of_odd_keys():
    checkpoint = save({"m": {"a/b": torch.ones(1), 0: torch.ones(1), "0": torch.ones(1)}})
    assert sorted(checkpoint.arrays) == ["m/%.int.0", "m/0", "m/a%2Fb"]


def test_dimension_names_of_plain_items():
    state = describe({"m": {"x": {"w": torch.ones(2, 3)}}, "top": torch.ones(1)}, group_ranks=ALONE)
    assert [array.spec.dimension_names for array in state.arrays] == [
        ("x.w:0", "x.w:1"),
        ("top:0",),
    ]


def test_numpy_arrays_are_arrays():
    values = {
        "big": np.arange(3, dtype=">f4"),
        "flipped": np.arange(4)[::-1],
        "bf16": np.array([1.5, -2.0], dtype=ml_dtypes.bfloat16),
        "u16": np.array([65535], dtype=np.uint16),
        "zero": np.array(3.0),
        "flag": np.array([True, False]),
    }
    checkpoint = save({"n": values})
    assert checkpoint.arrays["n/big"].tolist() == [0.0, 1.0, 2.0]
    assert checkpoint.arrays["n/flipped"].tolist() == [3, 2, 1, 0]
    assert checkpoint.arrays["n/bf16"].dtype == torch.bfloat16
    assert checkpoint.arrays["n/zero"].shape == ()
    target = {name: np.zeros_like(value) for name, value in values.items()}
    load({"n": target}, checkpoint)
    for name, value in values.items():
        assert target[name].dtype == value.dtype
        assert target[name].tobytes() == value.tobytes(), name


@pytest.mark.parametrize(
    "array",
    [
        np.array(["a"]),
        np.array([None]),
        np.array(["2020-01-01"], dtype="datetime64[D]"),
        np.ma.masked_array([1.0], mask=[True]),
        np.array([1.0], dtype=np.longdouble),
    ],
    ids=["str", "object", "date", "masked", "long"],
)
def test_numpy_arrays_without_a_stored_form_are_refused(array):
    with pytest.raises(UnsupportedError, match=r"^n\.x: a numpy array of"):
        save({"n": {"x": array}})


class _Wrapper(torch.Tensor):
    @staticmethod
    def __new__(cls, inner):
        return torch.Tensor._make_wrapper_subclass(cls, inner.shape, dtype=inner.dtype)

    @classmethod
    def __torch_dispatch__(cls, func, types, args=(), kwargs=None):
        raise NotImplementedError


@pytest.mark.parametrize(
    ("make", "text"),
    [
        (lambda: torch.ones(2, 2).to_sparse(), "layout torch.sparse_coo"),
        (
            lambda: torch.quantize_per_tensor(torch.ones(2), 0.1, 0, torch.qint8),
            "dtype torch.qint8",
        ),
        (lambda: torch.nested.nested_tensor([torch.ones(1), torch.ones(2)]), "nested"),
        (lambda: _Wrapper(torch.ones(2)), "_Wrapper keeps its values"),
        (lambda: torch.ones(2, device="meta"), "meta device"),
        (lambda: torch.ones(2, dtype=torch.complex32), "complex32"),
        (lambda: lambda x: x, "functions and classes"),
        (object, "a builtins.object cannot be stored"),
    ],
    ids=["sparse", "quantized", "nested", "wrapper", "meta", "complex32", "lambda", "object"],
)
@pytest.mark.filterwarnings("ignore")
def test_what_has_no_stored_form_is_refused_with_its_name(make, text):
    with pytest.raises(UnsupportedError, match=r"^m\.x[.:]") as caught:
        save({"m": {"x": make()}})
    assert text in str(caught.value)


class _Kind(enum.Enum):
    SLOW = 1


class _Text(str):
    pass


_NET = nn.Linear(2, 3)
_KEYS = {
    # what it is: the key, how the message shows it, and what it says of it
    "module": (_NET, str(_NET), "a dict key of type torch.nn.modules.linear.Linear"),
    "parameter": (
        _NET.bias,
        "Parameter containing:",
        "a dict key of type torch.nn.parameter.Parameter",
    ),
    "enum": (_Kind.SLOW, "_Kind.SLOW", f"a dict key of type {__name__}._Kind"),
    "class": (int, "<class 'int'>", "a dict key of type builtins.type"),
    "tuple": ((1, _Kind.SLOW), "(1, <_Kind.SLOW: 1>)", f"a dict key of type {__name__}._Kind"),
    "subclass": (_Text("name"), "name (a key)", "would come back as a str"),
}


@pytest.mark.parametrize("value", [torch.ones(2), 1, [torch.ones(2)]], ids=["tensor", "1", "list"])
@pytest.mark.parametrize(("key", "shown", "text"), _KEYS.values(), ids=_KEYS)
def test_a_key_without_a_stored_form_is_refused_with_its_name(key, shown, text, value):
    for state, place in (({"ema": {key: value}}, "ema."), ({key: value}, "")):
        with pytest.raises(UnsupportedError) as caught:
            save({"model": _NET, **state})
        message = str(caught.value)
        assert message.startswith(place + shown)
        assert text in message


def test_parameters_and_simple_subclasses_are_their_values():
    class Marked(torch.Tensor):
        pass

    state = {"p": nn.Parameter(torch.ones(2)), "s": torch.ones(3).as_subclass(Marked)}
    arrays = describe(state, group_ranks=ALONE).arrays
    assert [type(array.views[0].tensor) for array in arrays] == [torch.Tensor, torch.Tensor]
    assert not arrays[0].views[0].tensor.requires_grad


def test_containers_keep_their_kind():
    state = {"v": {"o": OrderedDict(a=1), "c": Counter("aab"), "t": (1, [2, (3,)]), "n": None}}
    target = {"v": {"o": OrderedDict(a=0), "c": Counter(), "t": (), "n": 5}}
    load(target, save(state))
    assert target == state
    assert type(target["v"]["c"]) is Counter
    assert type(target["v"]["t"][1][1]) is tuple


def test_states_that_hold_themselves_are_refused():
    state: dict[str, object] = {}
    state["a"] = state
    with pytest.raises(StateError, match="holds itself"):
        save(state)


def test_the_state_must_be_a_dict():
    with pytest.raises(StateError, match="must be a dict of items, but it is a list"):
        save([torch.ones(1)])


def test_b02_dtensor_on_one_element(fake_ranks):
    ranks = {rank: rank for rank in range(4)}
    held = []
    for rank in range(4):
        fake_ranks(rank, 4)
        mesh = DeviceMesh("cpu", range(4))
        tensor = distribute_tensor(torch.tensor([3.5]), mesh, [Shard(0)], src_data_rank=None)
        held.append(describe({"w": tensor}, group_ranks=ranks).arrays[0])
    assert [array.views[0].tensor.tolist() for array in held] == [[3.5], [], [], []]
    assert [len(array.views[0].pieces) for array in held] == [1, 0, 0, 0]
    assert len({array.spec for array in held}) == 1
    assert not held[0].plain


def test_ties_of_dtensors_are_the_same_on_ranks_without_data(fake_ranks):
    ranks = {rank: rank for rank in range(4)}
    trees = []
    for rank in range(4):
        fake_ranks(rank, 4)
        mesh = DeviceMesh("cpu", range(4))
        tensor = distribute_tensor(torch.arange(2.0), mesh, [Shard(0)], src_data_rank=None)
        state = {"m": {"a": tensor.detach(), "b": tensor.detach()}}
        trees.append(describe(state, group_ranks=ranks).tree)
    assert trees[0] == {
        "dict": [["m", {"dict": [["a", {"array": "m/a"}], ["b", {"link": "m/a"}]]}]]
    }
    assert trees.count(trees[0]) == 4

"""Values come back exact in type and value, or are refused by path."""

import collections
import datetime
import json
import math
import struct
import warnings
from collections import Counter, OrderedDict, deque

import ml_dtypes
import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from services.values import Color, Level, Point

from ucpstore.errors import FormatError, UnsupportedError
from ucpstore.format.documents import canonical
from ucpstore.tree import inline
from ucpstore.tree.decode import decode
from ucpstore.tree.documents import externalize
from ucpstore.tree.encode import encode, encode_value
from ucpstore.tree.nodes import MAX_DEPTH


def bits(value):
    """A form that is equal for values of exactly the same types and bits."""
    kind = type(value)
    if kind is float:
        return ("float", struct.pack(">d", value))
    if kind is complex:
        return ("complex", bits(value.real), bits(value.imag))
    if isinstance(value, (np.str_, np.bytes_)):
        return (kind, len(value), *value)  # as an array it would lose zeros at its end
    if isinstance(value, np.generic):
        return (kind, value.dtype.str, value.tobytes())
    if isinstance(value, np.ndarray):
        return (kind, value.dtype.str, value.shape, value.tobytes())
    if isinstance(value, torch.Tensor):
        data = value.contiguous().reshape(-1).view(torch.uint8).numpy().tobytes()
        return (kind, value.dtype, tuple(value.shape), data)
    if isinstance(value, dict):
        pairs = [(bits(key), bits(item)) for key, item in value.items()]
        return (kind, sorted(pairs, key=repr) if kind is Counter else pairs)
    if isinstance(value, deque):
        return (kind, value.maxlen, [bits(item) for item in value])
    if isinstance(value, (set, frozenset)):
        return (kind, sorted((bits(item) for item in value), key=repr))
    if isinstance(value, (list, tuple)):
        return (kind, [bits(item) for item in value])
    return (kind, value)


def stored(value, write=encode_value):
    """The value after a trip through JSON."""
    return decode(json.loads(canonical(write(value))))


def floats():
    some = [math.nan, math.inf, -math.inf, -0.0, 5e-324, 1e22, 0.1, 2.0**1000]
    odd_nan = struct.unpack(">d", bytes.fromhex("fff0000000000001"))[0]
    return st.floats() | st.sampled_from([*some, odd_nan])


HASHABLE = (
    st.none()
    | st.booleans()
    | st.integers()
    | st.sampled_from([2**70, -(2**70), 2**5000, 1 - 2**1024, 0, 1])
    | floats()
    | st.complex_numbers()
    | st.text(max_size=5)
    | st.sampled_from(["1", "True", "", "\ud83d\ude00", "\udcff", "😀"])
    | st.binary(max_size=5)
    | st.sampled_from([torch.float32, torch.complex32, torch.qint8, torch.device("cuda", 3)])
    | st.sampled_from([torch.device("cpu"), torch.Size([]), torch.Size([3, 4])])
    | st.sampled_from([np.float32(0.1), np.float64("nan"), np.int8(-1), np.bool_(True)])
    | st.sampled_from([np.uint64(2**64 - 1), np.complex64(1j), np.str_("é"), np.bytes_(b"a")])
    | st.sampled_from(
        [np.str_(""), np.str_("a\0"), np.str_("\udcff"), np.bytes_(b"\0"), np.bytes_()]
    )
)
KEYS = st.recursive(
    HASHABLE,
    lambda inner: st.lists(inner, max_size=3).map(tuple) | st.frozensets(inner, max_size=3),
    max_leaves=4,
)


def dicts(keys, values, kind=dict):
    # from pairs: hypothesis' own dictionaries would compare NaN keys by identity
    return st.lists(st.tuples(keys, values), max_size=4).map(kind)


VALUES = st.recursive(
    HASHABLE | st.binary(max_size=3).map(bytearray) | st.sets(KEYS, max_size=3),
    lambda inner: (
        st.lists(inner, max_size=3)
        | st.lists(inner, max_size=3).map(tuple)
        | dicts(KEYS, inner)
        | dicts(KEYS, inner, OrderedDict)
        | st.builds(deque, st.lists(inner, max_size=3), st.none() | st.integers(0, 4))
        | st.lists(KEYS, max_size=4).map(Counter)
    ),
    max_leaves=12,
)


@settings(max_examples=300, deadline=None)
@given(VALUES)
def test_any_value_comes_back_exactly(value):
    assert bits(stored(value)) == bits(value)
    assert bits(stored(value, encode)) == bits(value)


@settings(max_examples=100, deadline=None)
@given(dicts(KEYS, VALUES), st.sampled_from([0, 40, 200]))
def test_any_value_comes_back_from_documents(value, limit):
    tree, documents = externalize(encode(value), limit)
    assert bits(decode(inline(json.loads(canonical(tree)), documents.__getitem__))) == bits(value)


@pytest.mark.parametrize(
    ("value", "node"),
    [
        (None, None),
        (True, True),
        (1, 1),
        (1.0, 1.0),
        (math.nan, {"float": "7ff8000000000000"}),
        (-math.inf, {"float": "fff0000000000000"}),
        (2**70, 2**70),
        (2**1024, {"int": "1" + "0" * 256}),
        ("é", "é"),
        ("\udcff", {"str": "7bO/"}),
        (b"ab", {"bytes": "YWI="}),
        (complex(1, -0.0), {"complex": [1.0, -0.0]}),
        ([1, (2, [3])], [1, {"tuple": [2, [3]]}]),
        ({1: "a", "1": "b"}, {"dict": [[1, "a"], ["1", "b"]]}),
        (OrderedDict(a=1), {"ordered_dict": [["a", 1]]}),
        (Counter("aab"), {"counter": [["a", 2], ["b", 1]]}),
        (deque([1, 2], maxlen=5), {"deque": {"items": [1, 2], "maxlen": 5}}),
        ({3, 1, 20}, {"set": [1, 20, 3]}),
        (torch.Size([2, 3]), {"size": [2, 3]}),
        (torch.bfloat16, {"dtype": "bfloat16"}),
        (torch.device("cuda:1"), {"device": "cuda:1"}),
        (np.float32(1.0), {"numpy": {"dtype": "<f4", "data": "AACAPw=="}}),
        (np.str_("a\0"), {"numpy": {"dtype": "<U2", "data": "YQAAAAAAAAA="}}),
        (np.bytes_(b"a\0"), {"numpy": {"dtype": "|S2", "data": "YQA="}}),
        (torch.tensor(1.0), {"scalar": {"dtype": "float32", "data": "AACAPw=="}}),
    ],
)
def test_nodes(value, node):
    found = encode(value)
    assert canonical(found) == canonical(node)
    assert bits(decode(found)) == bits(value)


def test_states_from_the_field_come_back():
    rng = np.random.RandomState(3).get_state(legacy=False)
    nested = {0: {"block_0": {"shampoo": {"factors": {0: 1.0, 1: 2.0}, "indices": {}}}}}
    for value in (
        nested,
        {"betas": (0.9, 0.999), "deep": ((1, 2), [3, (4,)]), "buffer": [[None, None, None]] * 10},
        {"a": 1.0, "b": torch.tensor(1.0), "c": torch.tensor(1.0, dtype=torch.float64), "d": [1.0]},
        rng,
        torch.get_rng_state(),
        {"milestones": Counter({30: 1, 80: 2}), "last_epoch": 3},
    ):
        assert bits(stored(value)) == bits(value)


@pytest.mark.parametrize("name", ["bool", "uint64", "float16", "bfloat16", "float8_e8m0fnu"])
@pytest.mark.parametrize("shape", [(), (0,), (2, 0), (5, 3)])
def test_tensors_inside_of_values(name, shape):
    dtype = getattr(torch, name)
    tensor = torch.ones(shape).to(dtype)
    assert bits(stored(tensor)) == bits(tensor)
    assert bits(stored(tensor.T if len(shape) == 2 else tensor)) == bits(
        tensor.T if len(shape) == 2 else tensor
    )


@pytest.mark.parametrize(
    "array",
    [
        np.arange(6, dtype=">i4").reshape(2, 3),
        np.array(1.5),
        np.zeros((3, 0)),
        np.array(["a", "bcd"]),
        np.array([""], dtype="U0"),
        np.asfortranarray(np.eye(3)),
    ],
    ids=str,
)
def test_numpy_arrays_inside_of_values(array):
    found = stored(array)
    assert found.shape == array.shape
    assert found.dtype == array.dtype.newbyteorder("=")
    assert np.array_equal(found, array)
    assert found.flags.writeable


def test_tensors_that_come_back_can_be_written():
    found = stored({"t": torch.zeros(3), "s": torch.zeros(())})
    found["t"] += 1
    found["s"] += 1
    assert found["t"].tolist() == [1, 1, 1]


class Text(str):
    __slots__ = ()


@pytest.mark.parametrize(
    ("value", "found"),
    [
        (Point(1), "named tuple .*Point cannot be stored; save its _asdict"),
        (Color.RED, "enum member Color.RED cannot be stored; save its name or value"),
        (Level.LOW, "enum member 1 cannot be stored"),
        (datetime.datetime(2026, 1, 1), "datetime.datetime cannot be stored; save str"),
        (Text("a"), r"would come back as a str; save str\(\.\.\.\) of it"),
        (collections.defaultdict(list), r"would come back as a dict; save dict\(\.\.\.\) of it"),
        (object(), "builtins.object cannot be stored; save plain values"),
        (len, "functions and classes"),
        (torch.zeros(2), "Tensor cannot be stored here, but in dicts, lists and tuples only"),
        (np.zeros(2), "ndarray cannot be stored"),
        (np.datetime64("2026-01-01"), "numpy type datetime64.* cannot be stored"),
        (np.longdouble(1), "cannot be stored; convert it"),
        (ml_dtypes.float8_e5m2(1), "numpy type float8_e5m2 cannot be stored"),
        (torch.zeros((), dtype=torch.uint4), "dtype torch.uint4 has no common Zarr form"),
        (torch.nn.Parameter(torch.zeros(())), "Parameter of layout"),
        ({Color.RED: 1}, "is a key of a dict"),
    ],
    ids=lambda value: type(value).__name__,
)
def test_what_cannot_be_written_is_refused_by_path(value, found):
    with pytest.raises(UnsupportedError, match=found) as caught:
        encode({"a.b": [0, value]}, "state")
    assert str(caught.value).startswith("state.a.b.1: ")


@pytest.mark.parametrize(
    "value",
    [
        torch.zeros(2, dtype=torch.uint4),
        torch.eye(2).to_sparse(),
        torch.empty(2, device="meta"),
        np.array([None]),
    ],
    ids=["uint4", "sparse", "meta", "objects"],
)
def test_tensors_inside_of_values_are_refused_too(value):
    with pytest.raises(UnsupportedError, match=r"^rng\.t: "):
        encode_value({"t": value}, "rng")


def test_nested_tensors_are_refused():
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # torch calls them a prototype
        value = torch.nested.nested_tensor([torch.zeros(1), torch.zeros(2)])
    with pytest.raises(UnsupportedError, match=r"^rng\.t: a Tensor of layout nested"):
        encode_value({"t": value}, "rng")


def test_containers_that_hold_themselves_are_refused():
    endless = []
    endless.append(endless)
    with pytest.raises(UnsupportedError, match=f"nest deeper than {MAX_DEPTH}"):
        encode({"a": endless}, "")


def test_the_deepest_allowed_value_comes_back():
    value = 1
    for _ in range(MAX_DEPTH):
        value = OrderedDict([((1,), value)])
    assert bits(stored(value)) == bits(value)


def test_on_tensor_claims_values_by_their_keys():
    seen = []

    def claim(value, keys):
        seen.append(keys)
        return {"array": "w"} if isinstance(value, torch.Tensor) else None

    node = encode({"m": [1, torch.zeros(2)], "x": 1.5}, "", claim)
    assert node == {"dict": [["m", [1, {"array": "w"}]], ["x", 1.5]]}
    assert seen == [(), ("m",), ("m", 1)]


def test_values_elsewhere_are_asked_for():
    node = {"dict": [["w", {"array": "model/w"}], ["t", {"link": "model/w"}]]}
    assert decode(node, lambda tag, body: (tag, body)) == {
        "w": ("array", "model/w"),
        "t": ("link", "model/w"),
    }
    with pytest.raises(FormatError, match="lies elsewhere"):
        decode(node)


@pytest.mark.parametrize(
    "node",
    [
        {"future": 1},
        {"tuple": 1},
        {"tuple": [1], "list": []},
        {},
        {"dict": [[1]]},
        {"dict": [[[], 1]]},
        {"set": [[]]},
        {"float": "xyz"},
        {"float": "00"},
        {"complex": [1, 2]},
        {"bytes": "*"},
        {"deque": [1]},
        {"dtype": "save"},
        {"device": "nowhere"},
        {"numpy": {"dtype": "O", "data": ""}},
        {"numpy": {"dtype": "<f4", "data": "AA=="}},
        {"numpy": {"dtype": "<U1", "data": "AA=="}},
        {"numpy": {"dtype": "|S3", "data": "AA=="}},
        {"ndarray": {"dtype": "<f4", "shape": [3], "data": "AACAPw=="}},
        {"scalar": {"dtype": "float32"}},
        {"scalar": {"dtype": "int3", "data": ""}},
        {"tensor": {"dtype": "float32", "shape": [2], "data": ""}},
        {"tensor": {"dtype": "float32", "shape": [True], "data": "AACAPw=="}},
    ],
    ids=str,
)
def test_other_nodes_are_refused(node):
    with pytest.raises(FormatError):
        decode([node])

"""Field cases of structure: B53 to B62: Python values, nesting, names by case, no extent, items."""

from __future__ import annotations

import datetime
import decimal
import struct
import subprocess
import sys
from collections import Counter, OrderedDict, defaultdict, deque
from collections.abc import Mapping
from pathlib import Path

import ml_dtypes
import numpy as np
import pytest
import torch
import torch.distributed as dist
from cases.tools import attempt, bits, line, refuse_load, refuse_save, same, sharded
from cases.tools import whole as gathered
from ranks.harness import Ranks
from services.values import Color, Level, Point
from torch import nn
from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import checkpoint_wrapper
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import Replicate, Shard

import ucpstore
from ucpstore.storage.local import LocalStorage

# B53: Python values, exact in type and value.


def exact(value: object) -> object:
    """A form that is equal for values of the same types and bits only."""
    kind = type(value)
    if kind is float:
        return (kind, struct.pack(">d", value))
    if kind is complex:
        return (kind, exact(value.real), exact(value.imag))
    if isinstance(value, np.generic):
        data = value if isinstance(value, (bytes, str)) else value.tobytes()
        return (kind, value.dtype.str, data)
    if isinstance(value, np.ndarray):
        return (kind, value.dtype.str, value.shape, value.tobytes())
    if isinstance(value, torch.Tensor):
        return (kind, value.dtype, value.shape, bits(value))
    if isinstance(value, Counter):
        return (kind, sorted(value.items(), key=repr))
    if isinstance(value, Mapping):
        return (kind, [(exact(key), exact(item)) for key, item in value.items()])
    if isinstance(value, (set, frozenset)):
        return (kind, sorted(map(repr, map(exact, value))))
    if isinstance(value, deque):
        return (kind, value.maxlen, list(map(exact, value)))
    if isinstance(value, (list, tuple)):
        return (kind, list(map(exact, value)))
    return (kind, value)


def number(text: str) -> float:
    (found,) = struct.unpack(">d", bytes.fromhex(text))
    return found


PYTHON: dict[str, object] = {
    "betas": (0.9, 0.95),
    "nested": ((1, 2), [3, (4,)]),
    "empty": ((), [], {}, set(), b"", ""),
    "ordered": OrderedDict([("b", 1), ("a", (2,))]),
    "keys": {1: "int", "1": "str", 2.5: "float", (1, "a"): "tuple", None: 0, b"k": 1, True + 1: 2},
    "set": {1, "a", (2, 3), 2.5},
    "frozenset": frozenset({b"x", None}),
    "counter": Counter("abca"),
    "deque": deque([1, (2,)], maxlen=3),
    "bytes": bytes(range(256)),
    "bytearray": bytearray(b"\x00\xff"),
    "nan": float("nan"),
    "odd nan": number("fff0000000000001"),
    "infinities": [float("inf"), float("-inf")],
    "zero": -0.0,
    "tiny": 5e-324,
    "big": [2**70, -(2**70), 2**63, 2**5000],
    "complex": complex(float("nan"), -0.0),
    "bools": [True, False, 1, 0, 1.0],
    "text": ["\x00", "\ud83d\ude00", "\udcff", "caf\u00e9"],
    "numpy": [np.float32(0.1), np.float64(-0.0), np.int8(-1), np.uint64(2**64 - 1), np.bool_(True)],
    "numpy nan": np.array(0x7FC00001, "<u4").view(np.float32)[()],
    "numpy complex": np.complex64(complex(1, -0.0)),
    "numpy text": [np.str_("a\x00"), np.str_(""), np.bytes_(b"a\x00\x00"), np.bytes_(b"")],
    "size": torch.Size([2, 3]),
    "dtypes": [torch.bfloat16, torch.complex32, torch.qint8],
    "devices": [torch.device("cpu"), torch.device("cuda", 1), torch.device("cuda")],
}


class Holder:
    """An object with a state_dict() of its own."""

    def __init__(self, value: object) -> None:
        self.value = value

    def state_dict(self) -> dict[str, object]:
        return {"v": self.value}

    def load_state_dict(self, state: dict[str, object]) -> None:
        self.value = state["v"]


class Extra(nn.Module):
    """A module whose extra state is one value."""

    def __init__(self, value: object) -> None:
        super().__init__()
        self.value = value

    def get_extra_state(self) -> object:
        return {"v": self.value}

    def set_extra_state(self, state: dict[str, object]) -> None:
        self.value = state["v"]


class Weight(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.w = nn.Parameter(torch.ones(2))


def with_value(value: object) -> dict[str, object]:
    """A module, and an optimizer with a value in its group and in the state of its parameter."""
    net = Weight()
    optimizer = torch.optim.SGD(net.parameters(), lr=0.1)
    optimizer.param_groups[0]["v"] = value
    optimizer.state[net.w]["v"] = value
    return {"net": net, "optim": optimizer}


def everywhere(value: object) -> dict[str, object]:
    """A state that holds the value in every kind of place."""
    return {
        "top": value,
        "m": {"deep": [0, {"v": value}]},
        "model": Extra(value),
        "object": Holder(value),
        "rank": ucpstore.PerRank({"v": value}),
        **with_value(value),
    }


def places(state: Mapping[str, object]) -> dict[str, object]:
    """The values that `everywhere` put into a state, by name."""
    optimizer = state["optim"]
    (group,) = optimizer.param_groups
    return {
        "top": state["top"],
        "m.deep.1.v": state["m"]["deep"][1]["v"],
        "model._extra_state.v": state["model"].value,
        "object.v": state["object"].value,
        "rank.v": state["rank"].value["v"],
        "optim.param_groups.0.v": group["v"],
        "optim.v.w": optimizer.state[group["params"][0]]["v"],
    }


@pytest.mark.parametrize("name", PYTHON)
def test_b53_python_values_keep_type_and_value(tmp_path: Path, name: str) -> None:
    ucpstore.save(tmp_path, everywhere(PYTHON[name]), step=1)
    target = everywhere(None)
    ucpstore.load(tmp_path, target)
    for place, found in places(target).items():
        assert exact(found) == exact(PYTHON[name]), place


def test_b53_numpy_arrays(tmp_path: Path) -> None:
    saved = {
        "f4": np.arange(6, dtype="<f4").reshape(2, 3),
        "big endian": np.arange(3, dtype=">i8"),
        "0-d": np.array(-0.0),
        "bf16": np.array([1.5, -0.0], ml_dtypes.bfloat16),
    }
    ucpstore.save(tmp_path, {"m": saved}, step=1)
    target = {key: np.ones_like(value) for key, value in saved.items()}
    ucpstore.load(tmp_path, {"m": target})
    assert all(exact(target[key]) == exact(value) for key, value in saved.items())


LARGE = {
    "bytes": "bytes(range(256)) * (n // 256)",
    "str": "'\u00e9x' * (n // 4)",
    "list": "list(range(n // 200))",
    "dict": "{f'k{i}': i for i in range(n // 1000)}",
}
EMPTY = {"bytes": b"", "str": "", "list": [], "dict": None}


@pytest.mark.parametrize("kind", LARGE)
def test_b53_large_values(tmp_path: Path, kind: str) -> None:
    """They are documents of their own: the step group stays small."""
    value = eval(LARGE[kind], {"n": 10_000_000})
    target = {"v": dict.fromkeys(value) if kind == "dict" else EMPTY[kind]}
    ucpstore.save(tmp_path, {"m": {"v": value, "t": torch.ones(2)}}, step=1)
    target = {**target, "t": torch.zeros(2)}
    ucpstore.load(tmp_path, {"m": target})
    assert exact(target["v"]) == exact(value)
    (step,) = (tmp_path / "steps").glob("*-*")
    assert (step / "zarr.json").stat().st_size < 1000
    assert (step / "m" / "%.documents" / "0" / "zarr.json").exists()


LARGER = """
import resource, sys, ucpstore
value = eval(sys.argv[2], {"n": 200_000_000})
peak = lambda: resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024
before = peak()
ucpstore.save(sys.argv[1], {"m": {"v": value}}, step=1)
target = {"v": dict.fromkeys(value) if isinstance(value, dict) else type(value)()}
ucpstore.load(sys.argv[1], {"m": target})
assert target["v"] == value
print(peak() - before)
"""


@pytest.mark.slow
@pytest.mark.parametrize("kind", LARGE)
def test_b53_the_memory_that_large_values_take(tmp_path: Path, kind: str) -> None:
    """200 MB of bytes, 100 MB of text, a list of 1,000,000, a dict of 200,000 entries."""
    command = [sys.executable, "-c", LARGER, str(tmp_path), LARGE[kind]]
    done = subprocess.run(command, capture_output=True, text=True, timeout=60, check=True)
    assert int(done.stdout) < 12 * 200_000_000


NOT_STORED: dict[str, tuple[object, str]] = {
    "named tuple": (Point(1), "_asdict()"),
    "enum": (Color.RED, "save its name or value"),
    "int enum": (Level.LOW, "save its name or value"),
    "datetime": (datetime.datetime(2026, 1, 2), "save str(...)"),
    "timedelta": (datetime.timedelta(1), "number of seconds"),
    "defaultdict": (defaultdict(list, a=[1]), "save dict(...)"),
    "decimal": (decimal.Decimal("0.1"), "decimal.Decimal cannot be stored"),
    "function": (len, "functions and classes"),
    "class": (Point, "functions and classes"),
    "object": (object(), "object cannot be stored"),
    "key": ({Color.RED: 1}, "Color"),
    "in a set": ({Color.RED}, "save its name or value"),
    "datetime64": (np.datetime64("2026-01-01"), "numpy type datetime64"),
    "long double": (np.longdouble(1), "numpy type"),
    "ml_dtypes": (ml_dtypes.bfloat16(1), "numpy type bfloat16"),
    "ml_dtypes e5m2": (ml_dtypes.float8_e5m2(1), "numpy type float8_e5m2"),
    "objects": (np.array([None]), "object"),
}


@pytest.mark.parametrize("name", NOT_STORED)
def test_b53_what_would_come_back_as_something_else_is_refused(tmp_path: Path, name: str) -> None:
    value, advice = NOT_STORED[name]
    url = tmp_path / "s"
    state = everywhere(value)
    for item, path in PATHS.items():
        text = refuse_save(url, {"net": state["net"], item: state[item]})
        assert text.startswith(path)
        assert advice in text
    assert not list(url.rglob("*.json"))


def test_b53_tensors_lie_in_dicts_lists_and_tuples(tmp_path: Path) -> None:
    """Per-rank values alone have no arrays, so any container may hold their tensors."""
    for value in (deque([torch.ones(2)]), deque([np.ones(2)])):
        refuse_save(tmp_path / "s", {"m": {"v": value}}, "m.v.0", "in dicts, lists and tuples only")
    ucpstore.save(tmp_path, {"r": ucpstore.PerRank(deque([torch.ones(2)]))}, step=1)
    target = {"r": ucpstore.PerRank(None)}
    ucpstore.load(tmp_path, target)
    assert exact(target["r"].value) == exact(deque([torch.ones(2)]))


PATHS = {
    "top": "top",
    "m": "m.deep.1.v",
    "model": "model._extra_state.v",
    "object": "object.v",
    "rank": "rank.v",
    "optim": "optim.v.w",
}
"""Where the first value of each item is that `everywhere` makes."""


# B55: an optimizer's state several dicts deep.


def shampoo(factor: float) -> dict[str, object]:
    matrices = {0: factor * torch.eye(2), 1: factor * 2 * torch.eye(2)}
    return {"shampoo": {"factor_matrices": matrices, "factor_matrix_indices": {}}}


def test_b55_nested_state_of_an_optimizer(tmp_path: Path) -> None:
    def state(factor: float) -> dict[str, object]:
        made = with_value(None)
        made["optim"].state[made["net"].w]["block_0"] = shampoo(factor)
        return {**made, "plain": {0: {"block_0": shampoo(factor)}}}

    ucpstore.save(tmp_path, state(3.0), step=1)
    target, fresh = state(0.0), with_value(None)
    fresh["optim"].state.clear()
    ucpstore.load(tmp_path, target)
    ucpstore.load(tmp_path, fresh)
    for found in (target, fresh):
        values = found["optim"].state[found["net"].w]
        assert exact(dict(sorted(values.items()))) == exact({"block_0": shampoo(3.0), "v": None})
    assert exact(target["plain"]) == exact({0: {"block_0": shampoo(3.0)}})
    assert type(next(iter(target["plain"]))) is int


# B56: Python numbers, 0-d tensors and lists of one stay what they are.

ONES: dict[str, object] = {
    "float": 1.0,
    "int": 1,
    "bool": True,
    "list": [1.0],
    "0-d float32": torch.tensor(1.0),
    "0-d float64": torch.tensor(1.0, dtype=torch.float64),
    "one element": torch.ones(1),
    "numpy scalar": np.float32(1.0),
    "0-d array": np.array(1.0),
}


def zero(kind: str) -> object:
    value = ONES[kind]
    if isinstance(value, torch.Tensor):
        return torch.zeros_like(value)
    return np.zeros_like(value) if isinstance(value, np.ndarray) else type(value)()


@pytest.mark.parametrize("kind", ONES)
def test_b56_each_kind_of_one_keeps_its_kind(tmp_path: Path, kind: str) -> None:
    ucpstore.save(tmp_path, {"m": {"lr": ONES[kind]}}, step=1)
    target = {"lr": zero(kind)}
    ucpstore.load(tmp_path, {"m": target})
    assert exact(target["lr"]) == exact(ONES[kind])


TENSORS = ["0-d float32", "0-d float64", "one element", "0-d array"]
ALIKE = ["0-d float64", "0-d array"]


@pytest.mark.parametrize("saved", ONES)
@pytest.mark.parametrize("target", ONES)
def test_b56_tensors_and_python_values_are_never_swapped(
    tmp_path: Path, saved: str, target: str
) -> None:
    """A tensor is no place for a Python value, nor the other way round; Python values replace."""
    ucpstore.save(tmp_path, {"m": {"lr": ONES[saved]}}, step=1)
    into = {"lr": zero(target)}
    if saved != target and {saved, target} & set(TENSORS) and {saved, target} != set(ALIKE):
        refuse_load(tmp_path, {"m": into}, "m.lr")
        assert exact(into["lr"]) == exact(zero(target))
    else:
        ucpstore.load(tmp_path, {"m": into})
        assert exact(into["lr"]) == exact(ONES[target if saved in ALIKE else saved])


def test_b56_nested_none_in_param_groups(tmp_path: Path) -> None:
    buffer = [[None, None, None]] * 10
    ucpstore.save(tmp_path, with_value(buffer), step=1)
    for before in (None, [[None, None, None] for _ in range(10)], [1]):
        target = with_value(before)
        ucpstore.load(tmp_path, target)
        assert target["optim"].param_groups[0]["v"] == [[None, None, None]] * 10


# B59: names that differ by case alone.


def by_case() -> dict[str, torch.Tensor]:
    return {"Foo.weight": torch.zeros(2), "foo.weight": torch.ones(2)}


def test_b59_names_that_differ_by_case(tmp_path: Path) -> None:
    ucpstore.save(tmp_path, {"m": by_case(), "M": by_case()}, step=1)
    target = {name: torch.full((2,), 9.0) for name in by_case()}
    other = {name: torch.full((2,), 9.0) for name in by_case()}
    ucpstore.load(tmp_path, {"m": target, "M": other})
    for loaded in (target, other):
        assert all(same(loaded[name], value) for name, value in by_case().items())


@pytest.mark.parametrize("where", ["names", "items", "module"])
def test_b59_a_file_system_that_ignores_case_is_refused_before_writing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, where: str
) -> None:
    monkeypatch.setattr(LocalStorage, "case_insensitive", True)
    state: dict[str, object] = {"m": by_case()}
    words = ["m/Foo.weight", "m/foo.weight"]
    if where == "items":
        state, words = {"m": {"w": torch.ones(1)}, "M": {"w": torch.ones(1)}}, ["m/w", "M/w"]
    if where == "optimizer":
        model = nn.ModuleDict({"A": nn.Linear(1, 1), "a": nn.Linear(1, 1)})
        state, words = {"model": model}, ["model/A.weight", "model/a.weight"]
    refuse_save(tmp_path / "s", state, *words, "case")
    files = [path.name for path in (tmp_path / "s").rglob("*") if path.is_file()]
    assert files == []


def test_b59_a_real_case_sensitive_file_system_is_seen_as_such(tmp_path: Path) -> None:
    if (tmp_path.parent / tmp_path.name.upper()).exists():
        pytest.skip("this file system ignores case")
    storage = LocalStorage(str(tmp_path))
    storage.check_writable()
    assert storage.case_insensitive is False


NAMES = [
    "c",
    "c.0",
    "zarr.json",
    "",
    ".",
    "..",
    "a/b",
    "a%2Fb",
    "a%2fb",
    "__init__",
    "trailing.",
    "trailing ",
    "caf\u00e9",
    "cafe\u0301",
    "line\nbreak",
    "C:\\x",
    "con",
    "x" * 300,
    "X" * 300,
    "x" * 299 + "y",
    "\u00df",
    "ss",
    "0",
]
KEYS = [0, -1, 1.5, True, None, (1, "a"), b"0"]


def named(factor: float) -> dict[object, object]:
    leaves: dict[object, object] = {
        key: torch.full((2,), factor * number) for number, key in enumerate([*NAMES, *KEYS])
    }
    return {**leaves, "a": {"b": torch.full((2,), factor * 100), "c": torch.tensor([factor])}}


def test_b59_any_key_has_a_place_of_its_own(tmp_path: Path) -> None:
    ucpstore.save(tmp_path, {"m": named(1.0), **named(2.0)}, step=1)
    target = {"m": named(0.0), **named(0.0)}
    ucpstore.load(tmp_path, target)
    for found, expected in ((target["m"], named(1.0)), (target, named(2.0))):
        for key, value in expected.items():
            pairs = [(found[key], value)]
            if key == "a":
                pairs = [(found["a"][name], each) for name, each in value.items()]
            assert all(same(*pair) for pair in pairs), key
    outside = [path for path in tmp_path.parent.iterdir() if path != tmp_path]
    assert [path for path in outside if path.name in NAMES] == []


# B60: no extent.

NO_EXTENT = [(), (0,), (3, 0), (0, 0, 5), (0, 3), (2, 0, 3), (1,), (1, 1)]
OPTIONS = [
    ucpstore.Options(),
    ucpstore.Options(chunk_bytes=16, least_bytes=16, target_bytes=64),
]


def without_extent(factor: float) -> dict[str, torch.Tensor]:
    return {
        f"{dtype} {shape}".replace("torch.", ""): torch.full(shape, factor, dtype=dtype)
        for shape in NO_EXTENT
        for dtype in (torch.float32, torch.bfloat16, torch.int64)
    }


@pytest.mark.parametrize("options", OPTIONS, ids=["default", "tiny"])
def test_b60_shapes_without_extent(tmp_path: Path, options: ucpstore.Options) -> None:
    saved = without_extent(3.0)
    module = nn.Module()
    for number, value in enumerate(saved.values()):
        module.register_buffer(f"b{number}", value)
    state = {"m": saved, "module": module, **saved}
    ucpstore.save(tmp_path, state, step=1, options=options)
    other = nn.Module()
    for number, value in enumerate(saved.values()):
        other.register_buffer(f"b{number}", torch.zeros_like(value))
    inner = without_extent(0.0)
    target = {"m": inner, "module": other, **without_extent(0.0)}
    ucpstore.load(tmp_path, target, options=options)
    for number, (name, value) in enumerate(saved.items()):
        assert same(inner[name], value), name
        assert same(target[name], value), name
        assert same(other.get_buffer(f"b{number}"), value), name
    opened = ucpstore.CheckpointStore(tmp_path).open()
    assert opened["m"]["float32 (2, 0, 3)"].shape == (2, 0, 3)
    assert same(opened["m"]["float32 (2, 0, 3)"].read(), torch.zeros(2, 0, 3))
    assert same(opened["module"]["b0"][...], torch.tensor(3.0))


def dtensors_without_extent(factor: float) -> dict[str, torch.Tensor]:
    mesh = line()
    return {
        "columns": sharded(torch.full((3, 0), factor), mesh, Shard(1)),
        "rows": sharded(torch.full((0, 4), factor), mesh, Shard(0)),
        "rows of none": sharded(torch.full((3, 0), factor), mesh, Shard(0)),
        "few": sharded(torch.full((1, 4), factor), mesh, Shard(0)),
        "replicated": sharded(torch.full((0,), factor), mesh, Replicate()),
        "0-d": sharded(torch.tensor(factor), mesh, Replicate()),
    }


def dtensor_round_trip(url: str, tiny: bool) -> list[str]:
    options = OPTIONS[tiny]
    saved = dtensors_without_extent(2.0)
    ucpstore.save(url, {"m": saved, **saved}, step=1, options=options)
    inner, top = dtensors_without_extent(0.0), dtensors_without_extent(0.0)
    ucpstore.load(url, {"m": inner, **top}, options=options)
    wrong = []
    for name, value in saved.items():
        for found in (inner[name], top[name]):
            good = same(found.to_local(), value.to_local())
            good = good and same(gathered(found), gathered(value))
            wrong += [] if good else [name]
    return wrong


@pytest.mark.parametrize("tiny", [False, True])
def test_b60_dtensors_without_extent(ranks: Ranks, tmp_path: Path, tiny: bool) -> None:
    url = str(tmp_path / "s")
    assert ranks.run(2, dtensor_round_trip, url, tiny) == [[], []]
    target = {"columns": torch.zeros(3, 0), "few": torch.zeros(1, 4), "0-d": torch.tensor(0.0)}
    ucpstore.load(url, {"m": target}, strict=False)
    assert same(target["few"], torch.full((1, 4), 2.0))
    assert same(target["0-d"], torch.tensor(2.0))


def test_b60_an_empty_state_and_empty_items(tmp_path: Path) -> None:
    ucpstore.save(tmp_path, {}, step=1)
    assert ucpstore.load(tmp_path, {}).items == ()
    state = {"none": {}, "list": [], "module": nn.Module(), "null": None, "tuple": ()}
    ucpstore.save(tmp_path, state, step=2)
    target = {"none": {}, "list": [1], "module": nn.Module(), "null": 3, "tuple": (1, 2)}
    report = ucpstore.load(tmp_path, target)
    assert sorted(report.items) == sorted(state)
    assert (target["none"], target["list"], target["null"], target["tuple"]) == ({}, [], None, ())


# B61: items, with and without an optimizer.


class Layers(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList([nn.Linear(3, 3), nn.Linear(3, 3)])
        self.head = nn.Linear(3, 1)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for layer in self.layers:
            x = layer(x)
        return self.head(x)


def run(seed: int) -> tuple[Layers, torch.optim.Optimizer]:
    torch.manual_seed(seed)
    model = Layers()
    return model, torch.optim.AdamW(model.parameters())


@pytest.fixture
def two_stores(tmp_path: Path) -> tuple[Path, Path, Layers]:
    """One store with the model alone, one with an optimizer and a batch besides; the model."""
    model, optimizer = run(1)
    model(torch.ones(2, 3)).sum().backward()
    optimizer.step()
    ucpstore.save(tmp_path / "model", {"model": model}, step=1)
    state = {"model": model, "optim": optimizer, "last_batch": {"x": torch.ones(2, 3), "n": 4}}
    ucpstore.save(tmp_path / "all", state, step=1)
    return tmp_path / "model", tmp_path / "all", model


def test_b61_the_model_alone_loads_from_both(two_stores: tuple[Path, Path, Layers]) -> None:
    for url in two_stores[:2]:
        model, _ = run(2)
        report = ucpstore.load(url, {"model": model})
        assert report.items == ("model",)
        assert (report.missing, report.unexpected) == ((), ())
        assert all(map(same, model.parameters(), two_stores[2].parameters()))


def test_b61_an_optimizer_that_was_not_saved_is_refused(
    two_stores: tuple[Path, Path, Layers],
) -> None:
    model, optimizer = run(2)
    target = {"model": model, "optim": optimizer}
    refuse_load(two_stores[0], target, "not in the checkpoint: optim")
    assert not optimizer.state
    report = ucpstore.load(two_stores[0], target, strict=False)
    assert (report.items, report.missing) == (("model",), ("optim",))
    assert all(map(same, model.parameters(), two_stores[2].parameters()))
    assert not optimizer.state


def test_b61_a_part_of_an_item(two_stores: tuple[Path, Path, Layers]) -> None:
    """Below an item everything is strict: a part of it is loaded without strict, or opened."""
    url, _, saved = two_stores
    part = {"layers.0.weight": torch.zeros(3, 3), "layers.0.bias": torch.zeros(3)}
    refuse_load(url, {"model": part}, "model.head.weight", "strict=False")
    report = ucpstore.load(url, {"model": part}, strict=False)
    assert report.missing == ()
    assert set(report.unexpected) == {
        f"model.{name}" for name in saved.state_dict() if not name.startswith("layers.0.")
    }
    assert all(same(value, saved.state_dict()[name]) for name, value in part.items())
    item = ucpstore.CheckpointStore(url).open()["model"]
    read = item.read(["layers.0.weight", "layers.0.bias"])
    assert all(same(read[name], part[name]) for name in part)


def test_b61_the_model_from_its_state_dict_and_back(two_stores: tuple[Path, Path, Layers]) -> None:
    model, _ = run(2)
    ucpstore.load(two_stores[0], {"model": model.state_dict()})
    assert all(map(same, model.parameters(), two_stores[2].parameters()))
    target = {name: torch.zeros_like(value) for name, value in model.state_dict().items()}
    ucpstore.load(two_stores[0], {"model": target})
    assert all(same(target[name], value) for name, value in model.state_dict().items())


def different_items(url: str) -> tuple[str, object]:
    """Rank 0 asks for the model and the batch, rank 1 for the model alone."""
    model, _ = run(2)
    batch = {"x": torch.zeros(2, 3), "n": 0}
    target: dict[str, object] = {"model": model}
    if dist.get_rank() == 0:
        target["last_batch"] = batch
    ucpstore.load(url, target)
    missing = attempt(lambda: ucpstore.load(url, {"model": model, "nothing": torch.ones(1)}))
    return missing, batch["n"]


def test_b61_ranks_may_ask_for_different_items(
    ranks: Ranks, two_stores: tuple[Path, Path, Layers]
) -> None:
    results = ranks.run(2, different_items, str(two_stores[1]))
    assert [number for _, number in results] == [4, 0]
    assert all("nothing" in missing for missing, _ in results)


# B62: adapters alone are trained, beside a moving average of the model.


class Adapted(nn.Module):
    """A frozen linear layer with a low-rank update that is trained."""

    def __init__(self) -> None:
        super().__init__()
        self.base = nn.Linear(6, 6).requires_grad_(False)
        self.lora_a = nn.Linear(6, 2, bias=False)
        self.lora_b = nn.Linear(2, 6, bias=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.base(x) + self.lora_b(self.lora_a(x))


def adapted(seed: int, wrap: bool) -> nn.Module:
    """Two blocks; wrapped as for training: activation checkpoints inside of FSDP2."""
    torch.manual_seed(seed)
    model = nn.Sequential(Adapted(), Adapted())
    if wrap:
        for at, block in enumerate(list(model)):
            model[at] = checkpoint_wrapper(block)
            fully_shard(model[at], mesh=line())
        fully_shard(model, mesh=line())
    return model


def lora_state(seed: int, wrap: bool) -> dict[str, object]:
    model, ema = adapted(seed, wrap), adapted(seed + 1, wrap)
    trained = [each for each in model.parameters() if each.requires_grad]
    return {"model": model, "ema": ema.requires_grad_(False), "optim": torch.optim.AdamW(trained)}


def train(state: Mapping[str, object]) -> None:
    state["model"](torch.arange(12.0).reshape(2, 6) / 7).square().mean().backward()
    state["optim"].step()
    state["optim"].zero_grad()


WRAPPERS = ("_flat_param", "_fsdp_wrapped_module", "_checkpoint_wrapped_module")


def values_of(state: Mapping[str, object]) -> dict[str, torch.Tensor]:
    """All tensors by names as a plain model has them."""
    found = {}
    for item in ("model", "ema"):
        for name, value in state[item].named_parameters():
            for wrapper in WRAPPERS:
                name = name.replace(f"{wrapper}.", "")
            found[f"{item}.{name}"] = gathered(value)
    for number, states in enumerate(state["optim"].state.values()):
        found |= {f"optim.{number}.{key}": gathered(value) for key, value in states.items()}
    return found


def save_adapted(url: str) -> dict[str, torch.Tensor]:
    state = lora_state(1, wrap=True)
    for _ in range(3):
        train(state)
    ucpstore.save(url, state, step=3)
    return values_of(state)


def test_b62_adapters_and_a_moving_average_from_fsdp_to_one_process(
    ranks: Ranks, tmp_path: Path
) -> None:
    saved, _ = ranks.run(2, save_adapted, str(tmp_path))
    state = lora_state(5, wrap=False)
    ucpstore.load(tmp_path, state)
    found = values_of(state)
    assert found.keys() == saved.keys()
    assert [name for name in saved if not same(found[name], saved[name])] == []
    assert len([name for name in saved if name.startswith("optim.")]) == 4 * 3
    assert not same(found["model.0.base.weight"], found["ema.0.base.weight"])
    (step,) = (tmp_path / "steps").glob("*-*")
    names = {path.parent.relative_to(step).as_posix() for path in step.rglob("c.*")}
    plain = adapted(1, wrap=False).state_dict()
    trained = [name for name in plain if "lora" in name]
    assert names == {f"{item}/{name}" for item in ("model", "ema") for name in plain} | {
        f"optim/{moment}/{name}" for moment in ("exp_avg", "exp_avg_sq") for name in trained
    }
    documents = [path.read_text() for path in step.rglob("zarr.json")]
    assert [word for word in WRAPPERS for text in documents if word in text] == []
    train(state)  # the optimizer goes on
    assert all(each["step"] == 4 for each in state["optim"].state.values())

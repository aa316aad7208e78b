from __future__ import annotations

from collections import Counter, OrderedDict, deque

import numpy as np
import pytest
import torch

from ucpstore.cli.values import value
from ucpstore.tree.encode import encode


@pytest.mark.parametrize(
    ("stored", "shown"),
    [
        (None, "None"),
        (True, "True"),
        (-3, "-3"),
        (1 << 1025, str(1 << 1025)[:17] + "..."),
        (0.001, "0.001"),
        (-0.0, "-0.0"),
        (float("-inf"), "-inf"),
        ("it's", '"it\'s"'),
        ("\ud800", r"'\ud800'"),
        (1 + 2j, "complex(1.0, 2.0)"),
        (b"ab\0", r"b'ab\x00'"),
        (bytearray(b"a"), "bytearray(b'a')"),
        ([1, [2]], "[1, [2]]"),
        ((1,), "(1,)"),
        ((0.9, 0.999), "(0.9, 0.999)"),
        ({1}, "set([1])"),
        (frozenset(), "frozenset([])"),
        ({"a": 1, 2: None}, "{'a': 1, 2: None}"),
        (OrderedDict(a=1), "ordered_dict({'a': 1})"),
        (Counter("a"), "counter({'a': 1})"),
        (deque([1, 2], 5), "deque((1, 2))"),
        (torch.Size((2, 3)), "torch.Size([2, 3])"),
        (torch.bfloat16, "torch.bfloat16"),
        (torch.device("cpu"), "torch.device('cpu')"),
        (np.float32(0.5), "numpy.float32(0.5)"),
        (torch.tensor(7), "tensor(7, int64)"),
        (torch.tensor(2.5), "tensor(2.5, float32)"),
        (torch.tensor(-1.5, dtype=torch.bfloat16), "tensor(-1.5, bfloat16)"),
        (torch.tensor(True), "tensor(True, bool)"),
        (torch.tensor(1.0).to(torch.float8_e5m2), "tensor(0x3c, float8_e5m2)"),
        (list(range(100)), "[0, 1, 2, 3, 4, 5..."),
    ],
)
def test_values_as_python_writes_them(stored: object, shown: str) -> None:
    limit = 20 if shown.endswith("...") else 90
    assert value(encode(stored), limit) == shown


def test_what_lies_elsewhere() -> None:
    assert (
        value({"per_rank": {"path": "rng", "axis": "dp", "count": 4}}) == "<per rank: 4 along dp>"
    )
    large = {"document": {"path": "a/0", "of": "bytes"}}
    assert value(large) == "<large bytes, stored apart>"


def test_what_a_newer_version_wrote_is_shown_as_it_is() -> None:
    assert value({"fraction": [1, 2]}) == '{"fraction":[1,2]}'
    assert value({"scalar": {"dtype": "float4", "data": "AA=="}}).startswith('{"scalar"')

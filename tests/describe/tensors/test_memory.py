"""Which tensors have elements in common."""

from __future__ import annotations

import pytest
import torch

from ucpstore.describe.tensors.memory import share_elements

TABLE = torch.empty(64, 48)


@pytest.mark.parametrize(
    ("left", "right", "shared"),
    [
        (TABLE[:, :24], TABLE[:, 24:], False),
        (TABLE[:, :24], TABLE[:, 23:], True),
        (TABLE[::2], TABLE[1::2], False),
        (TABLE[::3], TABLE[::2], True),
        (TABLE.t()[5], TABLE[7], True),
        (TABLE.view(torch.int16)[:, 1::2], TABLE.view(torch.int16)[:, ::2], False),
        (TABLE[3, 4], TABLE[3], True),
    ],
)
def test_views_that_share_elements(left: torch.Tensor, right: torch.Tensor, shared: bool) -> None:
    assert share_elements(left, right) is shared
    assert share_elements(right, left) is shared


def test_interleaved_views_are_compared_without_tensors_of_their_size(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def never(*_: object, **__: object) -> torch.Tensor:
        raise AssertionError("addresses are compared, not marks in memory")

    for name in ("zeros", "empty", "ones"):
        monkeypatch.setattr(torch, name, never)
    assert not share_elements(TABLE[:, :24], TABLE[:, 24:])

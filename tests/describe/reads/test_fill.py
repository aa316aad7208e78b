"""Memory of special kinds is filled too."""

from __future__ import annotations

import torch

import ucpstore


def test_tensors_made_in_inference_mode_are_filled_whatever_the_dtype(tmp_path) -> None:
    ucpstore.save(tmp_path, {"a": torch.arange(3.0), "s": torch.tensor(4.0)}, step=1)
    with torch.inference_mode():
        target = {"a": torch.zeros(3, dtype=torch.float64), "s": torch.tensor(0.0)}
    ucpstore.load(tmp_path, target, cast="*")
    assert (target["a"].tolist(), target["s"].item()) == ([0.0, 1.0, 2.0], 4.0)

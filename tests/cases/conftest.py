"""Fixtures of the field cases."""

from __future__ import annotations

import pytest
import torch


@pytest.fixture
def accelerator() -> str:
    """The device type of the accelerator; skips the test where there is none."""
    if not torch.accelerator.is_available():
        pytest.skip("needs a GPU, and torch.accelerator has no device here")
    found = torch.accelerator.current_accelerator()
    assert found is not None
    return found.type

"""The text: a module of the standard library, character by character."""

from __future__ import annotations

import inspect
import textwrap

import torch
from torch import Tensor

SEQUENCES = 8
"""In a global batch, whatever the arrangement."""


def text_tokens() -> Tensor:
    """Its characters as numbers below 97: printable ASCII, newline, and one for all others."""
    codes = torch.tensor(list(inspect.getsource(textwrap).encode()))
    printable = (codes >= 32) & (codes < 127)
    return torch.where(printable, codes - 32, torch.where(codes == 10, 95, 96))


def draw_batch(text: Tensor, step: int, tokens: int) -> Tensor:
    """The global batch (SEQUENCES, tokens + 1) of a step, drawn from its number."""
    generator = torch.Generator().manual_seed(step)
    starts = torch.randint(len(text) - tokens, (SEQUENCES, 1), generator=generator)
    return text[starts + torch.arange(tokens + 1)]

"""From a training job's state to arrays and a typed tree, and back into a target.

The only package that knows DTensor, modules, optimizers and other frameworks.
"""

from ucpstore.describe.match import match
from ucpstore.describe.perrank import PerRankDocument
from ucpstore.describe.state import LocalArray, LocalState, check_state, describe
from ucpstore.describe.target import (
    ArrayInfo,
    Cast,
    Read,
    Target,
    refuse_unexpected,
    settle_unexpected,
)
from ucpstore.describe.tensors import View

__all__ = [
    "ArrayInfo",
    "Cast",
    "LocalArray",
    "LocalState",
    "PerRankDocument",
    "Read",
    "Target",
    "View",
    "check_state",
    "describe",
    "match",
    "refuse_unexpected",
    "settle_unexpected",
]

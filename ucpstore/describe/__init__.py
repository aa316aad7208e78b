"""From a training job's state to arrays and a typed tree, and back into a target.

The only package that knows DTensor, modules, optimizers and other frameworks.
"""

from ucpstore.describe.load.match import Target, match
from ucpstore.describe.load.names import refuse_unexpected, settle_unexpected
from ucpstore.describe.reads.casts import Cast
from ucpstore.describe.reads.read import ArrayInfo, Read
from ucpstore.describe.save.arrays import LocalArray
from ucpstore.describe.save.state import LocalState, check_state, describe
from ucpstore.describe.tensors.held import View
from ucpstore.describe.values.perrank import PerRankDocument

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

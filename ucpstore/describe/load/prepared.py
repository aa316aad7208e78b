"""The optimizers of a target, looked at before its modules are walked.

Masters, which lie in optimizers, are what parameters are read from.
"""

from __future__ import annotations

import contextlib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

import numpy as np
import torch
from torch import nn

from ucpstore.describe.engines.deepspeed import expand
from ucpstore.describe.kinds import DICTS, children
from ucpstore.describe.load.masters import Masters
from ucpstore.describe.load.optimizer import OptimizerTarget
from ucpstore.describe.modules.named import Named
from ucpstore.describe.optimizers.holding import holding_of, is_optimizer
from ucpstore.describe.optimizers.rows import RowOptimizer
from ucpstore.describe.place import ROOT, Place, is_plain
from ucpstore.describe.reads.reads import Reads
from ucpstore.errors import StateError, UnsupportedError
from ucpstore.flat import FlatOptimizer
from ucpstore.tree.nodes import Node, items_of, tag_of
from ucpstore.tree.optimizer import OptimizerNode, to_node
from ucpstore.wrappers import is_engine


@dataclass(slots=True, eq=False)
class PreparedOptimizers:
    """The optimizers that have a counterpart in the checkpoint, by their paths."""

    modules: Sequence[Named]
    reads: Reads
    tree: Node
    masters: Masters = field(default_factory=Masters)
    _found: dict[str, OptimizerTarget] = field(default_factory=dict)

    def find(self, state: Mapping[object, object]) -> None:
        """Prepare all in the state; what is wrong with one is told when it is matched."""
        saved = children(self.tree)
        for key, value in state.items():
            if key in saved:
                self._find(value, saved[key], ROOT.child(key, state))

    def target(self, value: object, node: Node, place: Place) -> OptimizerTarget:
        """That of an optimizer, to be matched; StateError where it cannot be."""
        return self._found.get(place.path) or self._prepared(value, node, place)

    def absent(self, value: object, place: Place) -> None:
        """What a load that is not strict does for a value that was not saved: masters follow."""
        if isinstance(value, (FlatOptimizer, RowOptimizer)):
            nothing = to_node(OptimizerNode(place.path, (), {}))
            self._prepared(value, nothing, place).match_masters()

    def _find(self, value: object, node: Node, place: Place) -> None:
        if is_engine(value):
            value = expand(value, place.shown)
        if isinstance(value, dict):
            inner = [key for key, item in value.items() if _may_hold(item)]
            saved = children(node) if inner and tag_of(node) in DICTS else {}
            for key in inner:
                if key in saved:
                    self._find(value[key], saved[key], place.child(key, value))
        elif type(value) in (list, tuple):
            assert isinstance(value, (list, tuple))
            items = items_of(node) if isinstance(node, list) or tag_of(node) == "tuple" else ()
            for at, (item, part) in enumerate(zip(value, items, strict=False)):
                if _may_hold(item):
                    self._find(item, part, place.child(at, ()))
        elif tag_of(node) == "optimizer":
            with contextlib.suppress(StateError, UnsupportedError):
                if is_optimizer(value, place.shown):
                    self._found[place.path] = self._prepared(value, node, place)

    def _prepared(self, value: object, node: Node, place: Place) -> OptimizerTarget:
        holding = holding_of(value, self.modules, self.reads.ranks, place.shown)
        target = OptimizerTarget(holding, node, place, self.reads, self.tree)
        target.prepare(self.masters)
        return target


def _may_hold(value: object) -> bool:
    """Whether a value may be an optimizer or hold one."""
    if is_engine(value):
        return True
    if isinstance(value, (torch.Tensor, np.ndarray, nn.Module)):
        return False
    return not is_plain(value)

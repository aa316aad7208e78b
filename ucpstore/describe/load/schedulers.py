"""Schedulers whose saved lists count on the saved groups of an optimizer."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from ucpstore.describe.load.optimizer import OptimizerTarget
from ucpstore.describe.optimizers.inner import inner_optimizer
from ucpstore.describe.place import Place
from ucpstore.describe.reads.differences import Differences
from ucpstore.describe.values.objects import Stateful
from ucpstore.tree.nodes import Node, children


def check_schedulers(
    optimizers: Sequence[OptimizerTarget],
    objects: Sequence[tuple[Place, Stateful, Node]],
    differences: Differences,
) -> None:
    """Refuse a scheduler of an optimizer whose groups are not those that were saved.

    A scheduler keeps lists with one entry for each group (`base_lrs`); where groups were split,
    merged or reordered, they would go to the wrong ones.
    """
    for place, value, node in objects:
        driven = getattr(value, "optimizer", None)
        inner = None if driven is None else inner_optimizer(driven, place.shown)
        for target in optimizers:
            if target.optimizer is not inner or target.same_groups():
                continue
            count = target.saved_group_count
            lists = [name for name, size in _lists(node, place.shown) if size == count]
            if lists:
                differences.problems.append(
                    f"{place.shown}: its saved lists {', '.join(lists)} have one entry for each of "
                    f"the {count} saved groups of {target.place.shown}, whose groups differ in the "
                    "target; build the same groups, or leave the scheduler out of the target and "
                    "set it up anew"
                )


def _lists(node: Node, shown: str) -> Iterator[tuple[str, int]]:
    if isinstance(node, list) and node:
        yield shown, len(node)
    for name, child in children(node):
        yield from _lists(child, f"{shown}.{name}")

"""The specification language: how tensors that do not say so themselves lie over the ranks."""

from ucpstore.spec.axes import Axes
from ucpstore.spec.lower import Lowered
from ucpstore.spec.parts import (
    Average,
    Padded,
    Part,
    Renamed,
    Replicate,
    Scaled,
    Shard,
    Stacked,
    Tied,
    Unique,
    average,
    padded,
    renamed,
    replicate,
    scaled,
    shard,
    stacked,
    tied,
    unique,
)
from ucpstore.spec.spec import Spec, check_spec
from ucpstore.spec.stacks import Layer

__all__ = [
    "Average",
    "Axes",
    "Layer",
    "Lowered",
    "Padded",
    "Part",
    "Renamed",
    "Replicate",
    "Scaled",
    "Shard",
    "Spec",
    "Stacked",
    "Tied",
    "Unique",
    "average",
    "check_spec",
    "padded",
    "renamed",
    "replicate",
    "scaled",
    "shard",
    "stacked",
    "tied",
    "unique",
]

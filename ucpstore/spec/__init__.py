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
    Tied,
    Unique,
    average,
    padded,
    renamed,
    replicate,
    scaled,
    shard,
    tied,
    unique,
)
from ucpstore.spec.spec import Spec, check_spec

__all__ = [
    "Average",
    "Axes",
    "Lowered",
    "Padded",
    "Part",
    "Renamed",
    "Replicate",
    "Scaled",
    "Shard",
    "Spec",
    "Tied",
    "Unique",
    "average",
    "check_spec",
    "padded",
    "renamed",
    "replicate",
    "scaled",
    "shard",
    "tied",
    "unique",
]

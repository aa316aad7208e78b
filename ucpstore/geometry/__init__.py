"""Index arithmetic: boxes, partitions, and the description of a job's arrays. No I/O, no torch."""

from ucpstore.geometry.box import Box, Index, Piece
from ucpstore.geometry.description import (
    ArraySpec,
    Block,
    GlobalArray,
    Layout,
    RankClass,
    merge,
    specs_from_bytes,
    specs_to_bytes,
)
from ucpstore.geometry.grid import PLAIN_LIMIT_BYTES, Grid
from ucpstore.geometry.partition import Partition, Split, fragments, local_shape

__all__ = [
    "PLAIN_LIMIT_BYTES",
    "ArraySpec",
    "Block",
    "Box",
    "GlobalArray",
    "Grid",
    "Index",
    "Layout",
    "Partition",
    "Piece",
    "RankClass",
    "Split",
    "fragments",
    "local_shape",
    "merge",
    "specs_from_bytes",
    "specs_to_bytes",
]

"""Index arithmetic: boxes, partitions, and the description of a job's arrays. No I/O, no torch."""

from ucpstore.geometry.box import Box, Index, Piece, run_boxes
from ucpstore.geometry.coverage import Block
from ucpstore.geometry.description import (
    ArraySpec,
    GlobalArray,
    Layout,
    RankClass,
    merge,
    specs_from_bytes,
    specs_to_bytes,
)
from ucpstore.geometry.grid import PLAIN_LIMIT_BYTES, Grid
from ucpstore.geometry.partition import (
    Flat,
    FlatView,
    Partition,
    blocks_of,
    flat_views,
    fragments,
    local_shape,
)
from ucpstore.geometry.splits import Split

__all__ = [
    "PLAIN_LIMIT_BYTES",
    "ArraySpec",
    "Block",
    "Box",
    "Flat",
    "FlatView",
    "GlobalArray",
    "Grid",
    "Index",
    "Layout",
    "Partition",
    "Piece",
    "RankClass",
    "Split",
    "blocks_of",
    "flat_views",
    "fragments",
    "local_shape",
    "merge",
    "run_boxes",
    "specs_from_bytes",
    "specs_to_bytes",
]

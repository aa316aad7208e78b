"""Index arithmetic: boxes, partitions, and the description of a job's arrays. No I/O, no torch."""

from ucpstore.geometry.blocks import Block, Blocks, Numbers, spread, starts_of
from ucpstore.geometry.box import Box, Index, Piece, run_boxes
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
    pieces_of,
)
from ucpstore.geometry.splits import Split

__all__ = [
    "PLAIN_LIMIT_BYTES",
    "ArraySpec",
    "Block",
    "Blocks",
    "Box",
    "Flat",
    "FlatView",
    "GlobalArray",
    "Grid",
    "Index",
    "Layout",
    "Numbers",
    "Partition",
    "Piece",
    "RankClass",
    "Split",
    "blocks_of",
    "flat_views",
    "fragments",
    "local_shape",
    "merge",
    "pieces_of",
    "run_boxes",
    "specs_from_bytes",
    "specs_to_bytes",
    "spread",
    "starts_of",
]

"""Deciding who writes, sends and reads what. Pure: no storage, no torch, no communication."""

from ucpstore.plan.grid import choose_grid
from ucpstore.plan.reads import ChunkRead, ObjectRead, plan_reads
from ucpstore.plan.save import (
    Message,
    ObjectWrite,
    PlannedArray,
    RankPlan,
    Round,
    SavePlan,
    Transfer,
    plan_save,
)
from ucpstore.plan.summary import ReadCost, Summary, read_cost, summarize

__all__ = [
    "ChunkRead",
    "Message",
    "ObjectRead",
    "ObjectWrite",
    "PlannedArray",
    "RankPlan",
    "ReadCost",
    "Round",
    "SavePlan",
    "Summary",
    "Transfer",
    "choose_grid",
    "plan_reads",
    "plan_save",
    "read_cost",
    "summarize",
]

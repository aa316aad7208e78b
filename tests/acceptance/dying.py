"""Rank functions of the tests that kill a rank: it dies at a chosen operation of its storage."""

from __future__ import annotations

import os
import signal
import time
from collections.abc import Callable, Mapping

import torch
import torch.distributed as dist
from acceptance.failing import IMPATIENT, Job, Tried, attempt
from services.faults import Operation

from ucpstore import exchange

MOMENTS: Mapping[str, Callable[[Operation], bool]] = {
    "opening": lambda each: each.kind == "put" and each.key.startswith("work/"),
    "seeing the mark": lambda each: each.kind == "get" and each.key.startswith("work/"),
    "writing": lambda each: each.kind == "put" and "/m/w/c." in each.key,
    "the step group": lambda each: each.kind == "put_if_absent" and "steps/0" in each.key,
    "the record": lambda each: each.kind == "put_if_absent" and each.key.startswith("commits/0"),
    "after the record": lambda each: each.kind == "delete" and each.key.startswith("work/"),
    "reading": lambda each: each.kind == "read_into",
}
"""When to die: before the operation acts."""


def die_when(job: Job, moment: str) -> None:
    """Have this process killed at that moment."""
    chosen = MOMENTS[moment]

    def condition(each: Operation) -> bool:
        if chosen(each):
            os.kill(os.getpid(), signal.SIGKILL)
            time.sleep(60)
        return False

    job.faults.fail_when(condition)


def save_and_die(url: str, shape: tuple[int, ...], rank: int, moment: str) -> Tried:
    """A save in which one rank dies."""
    job = Job(url, shape)
    if job.rank == rank:
        die_when(job, moment)
    return attempt(lambda: job.save(options=IMPATIENT))


def load_and_die(url: str, shape: tuple[int, ...], rank: int) -> Tried:
    """A load in which one rank dies while it reads."""
    job = Job(url, shape)
    if job.rank == rank:
        die_when(job, "reading")
    return attempt(lambda: job.load(options=IMPATIENT))


def save_in_group_and_die(url: str, moment: str) -> Tried:
    """Ranks 1 and 2 of 3 save and rank 1 dies; the key-value store lives on with rank 0."""
    group = dist.new_group([1, 2])
    if dist.get_rank() == 0:
        return Tried("", "", 0.0)
    job = Job(url, (300, 300), state={"m": {"w": torch.ones(300, 300)}})
    if job.rank == 1:
        die_when(job, moment)
    return attempt(lambda: job.save(process_group=group, options=IMPATIENT))


def die_in_the_exchange(url: str, shape: tuple[int, ...], rank: int) -> Tried:
    """One rank dies on its way into the exchange, for which the others wait."""
    job = Job(url, shape)
    if job.rank == rank:

        def die(*_: object) -> None:
            os.kill(os.getpid(), signal.SIGKILL)

        exchange._Gloo.exchange = die  # type: ignore[method-assign]
    return attempt(lambda: job.save(options=IMPATIENT))

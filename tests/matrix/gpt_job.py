"""The GPT of the example on real ranks: one arrangement to another and back, bits and losses."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from hashlib import sha256
from pathlib import Path

import torch
from ranks.harness import Ranks

# The folder of the example is where a user starts it; here and in the ranks it comes first.
sys.path.insert(0, str(Path(__file__).resolve().parents[2] / "examples"))

from gpt import checkpoint
from gpt.model import Config
from gpt.parallel import Arrangement
from gpt.train import Trainer

import ucpstore

SOURCE = "tp2,pp2,dp2,zero1"
OTHERS = (
    "one",
    "dp2,zero3",
    "dp2,sp2,zero1",
    "dp4,zero2",
    "dp4,zero3",
    "pp2,dp2,zero1",
    "tp2",
    "tp2,dp2,zero1",
    "tp2,dp2,zero2",
    "tp2,pp2",
)
EXPERTS = 4
EXPERT_SOURCE = "pp2,dp4,ep4,zero1"
EXPERT_OTHERS = ("one", "dp4,ep2,zero1", "tp2,pp2,dp2,ep2,zero1")
SAVED, MORE = 6, 50
"""Steps before the save, and steps that are compared behind it."""
TOLERANCE = 1e-5
RESETS = ("exp_avg", "exp_avg_sq", "step")


@dataclass(frozen=True)
class Row:
    """One arrangement that saves, those that load it, and how many experts the model has."""

    source: str
    targets: tuple[str, ...]
    experts: int = 0


ROWS = (
    Row(SOURCE, (SOURCE, *OTHERS)),
    *(Row(other, (SOURCE,)) for other in OTHERS),
    Row(EXPERT_SOURCE, (EXPERT_SOURCE, *EXPERT_OTHERS), EXPERTS),
    *(Row(other, (EXPERT_SOURCE,), EXPERTS) for other in EXPERT_OTHERS),
)


@dataclass(frozen=True)
class Pair:
    """What came of one pair; `wrong` names what was not bit-equal, `difference` is relative."""

    experts: int
    source: str
    target: str
    arrays: int
    wrong: tuple[str, ...]
    difference: float

    @property
    def passed(self) -> bool:
        """Bits equal, and losses as near as they have to be."""
        bound = 0.0 if self.source == self.target else TOLERANCE
        return not self.wrong and self.arrays > 100 and self.difference <= bound


Reset = tuple[str, str]
"""A row of parameters, and which of its moments, or `step`, a job has at 0 after its load."""


def run_row(
    ranks: Ranks,
    row: Row,
    folder: Path,
    *,
    more: int = MORE,
    resets: Sequence[Reset | None] = (None,),
) -> Iterator[Pair]:
    """Save under one arrangement, go on under others and come back from each.

    Bits are those of a job with bfloat16 parameters, losses those of one in float32, of `more`
    steps. Each target gives a pair for each of `resets`.
    """
    source, experts = row.source, row.experts
    there, url = str(folder / "there"), str(folder / "losses")
    first = _on(ranks, source, trained, experts, there)
    stored = arrays_of(there)
    expected = _on(ranks, source, losses, experts, url, None, more, None)[0]
    for target in row.targets:
        back = str(folder / target)
        _on(ranks, target, passed_on, experts, there, back)
        last = _on(ranks, source, loaded, experts, back)
        again = arrays_of(back)
        # Only stages that do not have the embedding know the head by a name of its own.
        names = (stored.keys() | again.keys()) - {"model/head.weight"}
        wrong = [name for name in sorted(names) if stored.get(name) != again.get(name)]
        for rank, (was, now) in enumerate(zip(first, last, strict=True)):
            wrong += [f"{name} on rank {rank}" for name in was if was[name] != now[name]]
        for reset in resets:
            found = _on(ranks, target, losses, experts, url, SAVED, more, reset)[0]
            pairs = zip(found, expected, strict=True)
            difference = max(abs(one - other) / abs(other) for one, other in pairs)
            yield Pair(experts, source, target, len(names), tuple(wrong), difference)


def arrays_of(url: str) -> dict[str, str]:
    """Digests of all arrays of the newest step, read without any arrangement."""
    opened = ucpstore.CheckpointStore(url).open()
    return {
        f"{item}/{name}": _digest(array.read())
        for item in ("model", "optim")
        for name, array in opened[item].items()
    }


def _on(ranks: Ranks, text: str, job: Callable[..., object], *args: object) -> list:
    count = Arrangement.parse(text).ranks
    if count == 1:
        return [job(text, *args)]
    return ranks.run(count, job, text, *args, timeout_s=600.0)


# ---- on every rank -------------------------------------------------------------------------------


@contextmanager
def trainer_of(text: str, experts: int, dtype: torch.dtype = torch.bfloat16) -> Iterator[Trainer]:
    """A new job. Ranks live on behind it, and each group has threads that never sleep for long."""
    trainer = Trainer(Arrangement.parse(text), dtype, Config(experts=experts))
    yield trainer
    trainer.place.close()


def trained(text: str, experts: int, url: str) -> dict[str, str]:
    """Train in bfloat16 and save."""
    with trainer_of(text, experts) as trainer:
        untrained = digests(trainer)
        for _ in range(SAVED):
            trainer.step()
        checkpoint.save(url, trainer)
        found = digests(trainer)
    assert not any(found[name] == untrained[name] for name in found), "a load would not show"
    return found


def passed_on(text: str, experts: int, there: str, back: str) -> None:
    """Load what others saved, and save it elsewhere."""
    with trainer_of(text, experts) as trainer:
        checkpoint.load(there, trainer)
        checkpoint.save(back, trainer)


def loaded(text: str, experts: int, url: str) -> dict[str, str]:
    """Load into a new job."""
    with trainer_of(text, experts) as trainer:
        checkpoint.load(url, trainer)
        return digests(trainer)


def losses(
    text: str, experts: int, url: str, start: int | None, more: int, reset: Reset | None
) -> list[float]:
    """In float32, the `more` losses behind step `SAVED`: of a job that saves it, or loads it."""
    with trainer_of(text, experts, torch.float32) as trainer:
        if start is None:
            while trainer.steps < SAVED:
                trainer.step()
            checkpoint.save(url, trainer)
        else:
            checkpoint.load(url, trainer, start)
            assert trainer.steps == start
        if reset is not None:
            row, what = reset
            adam = trainer.adams[row]
            if what == "step":
                adam.step = 0
            else:
                getattr(adam, what).zero_()
        return [trainer.step() for _ in range(more)]


def digests(trainer: Trainer) -> dict[str, str]:
    """Parameters, masters and moments of this rank, padding included, and `step`."""
    found: dict[str, str] = {}
    for row, adam in trainer.adams.items():
        assert adam.master is not None
        found[f"parameters of {row}"] = _digest(adam.row.values)
        found[f"masters of {row}"] = _digest(adam.master)
        found[f"exp_avg of {row}"] = _digest(adam.exp_avg)
        found[f"exp_avg_sq of {row}"] = _digest(adam.exp_avg_sq)
        found[f"step of {row}"] = str(adam.step)
    return found


def _digest(tensor: torch.Tensor) -> str:
    raw = tensor.detach().contiguous().reshape(-1).view(torch.uint8)
    return sha256(raw.numpy().tobytes()).hexdigest()

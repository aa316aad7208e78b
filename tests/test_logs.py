"""One line at INFO for each save and load, and not a word unless logging is configured."""

from __future__ import annotations

import logging
import re
import subprocess
import sys
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from ranks.harness import Ranks

import ucpstore

ROOT = Path(__file__).resolve().parent.parent


def state() -> dict[str, object]:
    return {"m": {"w": torch.arange(12.0), "b": torch.ones(3)}}


def lines(caplog: pytest.LogCaptureFixture) -> list[tuple[str, int, str]]:
    return [(name, level, text) for name, level, text in caplog.record_tuples]


def test_a_save_and_a_load_log_one_line_each(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    with caplog.at_level(logging.DEBUG, "ucpstore"):
        saved = ucpstore.save(tmp_path / "s", state(), step=8).result()
        loaded = ucpstore.load(tmp_path / "s", state(), collective=False)
    assert lines(caplog) == [
        ("ucpstore", logging.INFO, str(saved)),
        ("ucpstore", logging.INFO, str(loaded)),
    ]
    number = r"\d+\.\d+"
    size, rate = r"\d[\d.]* (Ki)?B", r"\d[\d.]* [KMG]?i?B/s"
    assert re.fullmatch(
        rf"saved step 8 to {re.escape(str(tmp_path))}/s: 2 arrays, 2 objects, {size} in "
        rf"{number} s, {rate} \(describe {number}, begin {number}, plan {number}, "
        rf"write {number}, commit {number}\)",
        str(saved),
    )
    assert re.fullmatch(
        rf"loaded step 8 from {re.escape(str(tmp_path))}/s: m, 2 arrays, {size} needed, "
        rf"{size} read in {number} s, {rate} \(resolve {number}, plan {number}, "
        rf"read {number}, apply {number}, agree {number}\)",
        str(loaded),
    )


def test_rates_are_of_all_bytes_over_all_phases() -> None:
    saved = ucpstore.SaveReport(
        "s", 1, 1, "p", 2, 3, 10, 0, 6, 5_000_000_000, {"write": 1.5, "commit": 0.5}
    )
    assert str(saved) == (
        "saved step 1 to s: 2 arrays, 6 objects, 4.7 GiB in 2.00 s, 2.3 GiB/s "
        "(write 1.500, commit 0.500)"
    )
    loaded = ucpstore.LoadReport(
        "s", 1, ("m",), (), ("a",), (), 2, 2**20, 2**21, 3_000_000, 9, {"read": 0.25}
    )
    assert str(loaded) == (
        "loaded step 1 from s: m, 2 arrays, 1.0 MiB needed, 2.0 MiB read here and 2.9 MiB by all "
        "ranks in 0.25 s, 11.4 MiB/s (read 0.250), 1 missing"
    )


def test_what_fails_logs_nothing(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    ucpstore.save(tmp_path / "s", state(), step=8)
    with caplog.at_level(logging.DEBUG, "ucpstore"):
        with pytest.raises(ucpstore.StepExistsError):
            ucpstore.save(tmp_path / "s", state(), step=8)
        with pytest.raises(ucpstore.StepNotFoundError):
            ucpstore.load(tmp_path / "s", state(), step=9)
    assert lines(caplog) == []


def logged_on_this_rank(url: str) -> list[str]:
    """How the lines begin that a save, a load, and a load of each rank by itself log."""
    found: list[str] = []
    handler = logging.Handler()
    handler.emit = lambda record: found.append(record.getMessage())  # type: ignore[method-assign]
    logger = logging.getLogger("ucpstore")
    logger.addHandler(handler)
    logger.setLevel(logging.DEBUG)
    try:
        ucpstore.save(url, state(), step=1)
        ucpstore.load(url, state())
        dist.barrier()
        ucpstore.load(url, state(), collective=False)
    finally:
        logger.removeHandler(handler)
        logger.setLevel(logging.NOTSET)
    return [" ".join(line.split()[:3]) for line in found]


def test_rank_0_logs_for_all_ranks(ranks: Ranks, tmp_path: Path) -> None:
    first, second = ranks.run(2, logged_on_this_rank, str(tmp_path / "s"))
    assert first == ["saved step 1", "loaded step 1", "loaded step 1"]
    assert second == ["loaded step 1"]  # the load that each rank made by itself


def test_nothing_is_printed_where_logging_is_not_configured(tmp_path: Path) -> None:
    code = (
        "import logging, sys, torch, ucpstore\n"
        "state = {'m': {'w': torch.ones(3)}}\n"
        "ucpstore.save(sys.argv[1], state, step=1)\n"
        "ucpstore.load(sys.argv[1], state)\n"
        "assert not logging.getLogger().handlers and not logging.getLogger('ucpstore').handlers\n"
        "assert logging.getLogger('ucpstore').level == logging.NOTSET\n"
    )
    command = [sys.executable, "-W", "error", "-c", code, str(tmp_path / "s")]
    done = subprocess.run(command, capture_output=True, text=True, cwd=ROOT, timeout=120)
    assert (done.returncode, done.stdout, done.stderr) == (0, "", "")

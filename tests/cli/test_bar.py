"""The bar of `verify`, on a terminal and nowhere else."""

from __future__ import annotations

import os
import pty
import re
import subprocess
import sys
from pathlib import Path

from manage.samples import opened

from ucpstore.cli.bar import Lines
from ucpstore.manage.verify import verify
from ucpstore.progress import ProgressEvent


def run(*arguments: object) -> tuple[int, str, str]:
    """One command whose stderr is a terminal: exit code, stdout, what the terminal got."""
    terminal, side = pty.openpty()
    command = [sys.executable, "-m", "ucpstore", *map(str, arguments)]
    environment = {**os.environ, "TERM": "xterm", "COLUMNS": "120", "NO_COLOR": "1"}
    with subprocess.Popen(
        command, stdout=subprocess.PIPE, stderr=side, text=True, env=environment
    ) as process:
        os.close(side)
        shown = b""
        while True:
            try:
                part = os.read(terminal, 65536)
            except OSError:  # Linux says so once the other side is closed
                break
            if not part:
                break
            shown += part
        assert process.stdout is not None
        printed = process.stdout.read()
    os.close(terminal)
    return process.returncode, printed, re.sub(r"\x1b\[[?0-9;]*[A-Za-z]", "", shown.decode())


def test_verify_shows_a_bar_on_a_terminal(made: Path) -> None:
    code, printed, shown = run("verify", made, "--data")
    assert code == 0
    assert printed.startswith("no problem in 2 steps, ")
    assert re.search(r"step 200 \(2 of 2\) ━+ 2\.4 MiB of 2\.4 MiB, [\d.]+ [KMG]iB/s", shown), shown


def test_verify_without_data_counts(made: Path) -> None:
    code, printed, shown = run("verify", made, 100)
    assert code == 0
    assert "by presence and size" in printed
    assert re.search(r"step 100 ━+ 19 of 19 looked at", shown), shown


def test_there_is_no_bar_with_json(made: Path) -> None:
    code, printed, shown = run("verify", made, "--data", "--json")
    assert (code, printed[:1], shown) == (0, "{", "")


def test_there_is_no_bar_without_a_terminal(made: Path) -> None:
    command = [sys.executable, "-m", "ucpstore", "verify", str(made), "--data"]
    done = subprocess.run(command, capture_output=True, text=True, timeout=60)
    assert (done.returncode, done.stderr) == (0, "")


def test_what_the_bar_says(made: Path) -> None:
    told: list[ProgressEvent] = []
    verify(opened(made), data=True, progress=told.append)
    lines = Lines()
    texts = list(dict.fromkeys(lines.of(event) for event in told))
    assert texts[:4] == [
        ("commit records", "0 of 2"),
        ("commit records", "2 of 2"),
        ("step 100 (1 of 2)", "its documents"),
        ("step 100 (1 of 2)", "0 B of 2.4 MiB, 0 B/s"),
    ]
    assert texts[-1][0] == "step 200 (2 of 2)"
    assert texts[-1][1].startswith("2.4 MiB of 2.4 MiB, ")

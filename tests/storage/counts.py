"""Run the storage suite and print what passed on each place: python tests/storage/counts.py.

Arguments are handed to pytest. `UCPSTORE_TEST_S3_ENDPOINT` names an S3 server to use in place of a
SeaweedFS that is started for the run.
"""

from __future__ import annotations

import sys
from collections import Counter
from pathlib import Path

import pytest

HERE = Path(__file__).resolve().parent
PLACES = {
    "TestLocalStorage": "local files",
    "TestMemoryStorage": "a dict (tests only)",
    "TestFaultyStorage": "a dict behind the fault injector (tests only)",
    "TestS3Storage": "s3:// through obstore",
    "TestS3fsStorage": "s3:// through s3fs",
    "TestFsspecMemory": "memory:// through fsspec",
    "TestFsspecLocal": "local:// through fsspec",
    "TestFsspecSftp": "sftp:// through fsspec",
}


class Counts:
    """A pytest plugin: outcomes by test class."""

    def __init__(self) -> None:
        self.found: dict[str, Counter[str]] = {}

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        if report.when == "call" or report.outcome != "passed":
            name = report.nodeid.split("::")[1]
            self.found.setdefault(name, Counter())[report.outcome] += 1


def main() -> int:
    counts = Counts()
    chosen = " or ".join(PLACES)
    tests = [str(HERE), str(HERE.parent / "services")]
    code = pytest.main([*tests, "-q", "-k", chosen, *sys.argv[1:]], plugins=[counts])
    for name, place in PLACES.items():
        found = counts.found.get(name, Counter())
        shown = ", ".join(f"{found[each]} {each}" for each in ("passed", "failed", "skipped"))
        print(f"{place:48} {shown}")  # noqa: T201  # a program that a person runs
    return int(code)


if __name__ == "__main__":
    sys.exit(main())

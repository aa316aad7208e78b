"""The command line: `ucpstore ls`, `show` and `verify`. Prints and adapts; decides nothing.

Everything is imported when it is needed, and torch never is.
"""

from __future__ import annotations

import sys


def main() -> None:
    """Run the command line on this process's arguments and exit."""
    try:
        from ucpstore.cli.app import app

        app(prog_name="ucpstore")
    except KeyboardInterrupt:  # while modules were imported; later ones are caught in `exits`
        sys.exit(130)

"""How a command ends: one line on stderr and an exit code for every failure, no traceback."""

from __future__ import annotations

import os
import re
import sys
import traceback
from collections.abc import Sequence
from typing import NoReturn

import typer
from typer.core import TyperGroup

from ucpstore.errors import (
    CorruptError,
    FormatError,
    StateError,
    StepNotFoundError,
    UcpstoreError,
)

OK = 0
PROBLEMS = 1
USAGE = 2
NOT_FOUND = 3
STORAGE = 4
TOO_NEW = 5
BUG = 70
INTERRUPTED = 130
BROKEN_PIPE = 141

# typer has click's classes, by itself or from click, and exports only some.
_ClickError = typer.BadParameter.__mro__[2]


class Commands(TyperGroup):
    """A group of commands that turns every outcome into an exit code."""

    def main(
        self,
        args: Sequence[str] | None = None,
        prog_name: str | None = None,
        complete_var: str | None = None,
        standalone_mode: bool = True,
        windows_expand_args: bool = True,
        **extra: object,
    ) -> NoReturn:
        """Run and exit the process, as typer's own `main` does; without arguments print help."""
        given = list(sys.argv[1:] if args is None else args) or ["--help"]
        try:
            code = self._run(given, prog_name or "ucpstore")
            sys.stdout.flush()
        except BrokenPipeError:
            code = _drop_stdout()
        sys.exit(code)

    def _run(self, args: list[str], prog_name: str) -> int:
        try:
            with self.make_context(prog_name, args) as context:
                self.invoke(context)
        except typer.Exit as stop:
            return int(stop.exit_code)
        except (KeyboardInterrupt, typer.Abort):
            return fail("interrupted", INTERRUPTED)
        except BrokenPipeError:
            raise
        except Exception as error:
            if _debugging():
                traceback.print_exc()
            return fail(*_explain(error, prog_name, args))
        return OK


def fail(message: str, code: int) -> int:
    """Say what went wrong, on one line of stderr; `code` itself."""
    typer.echo(f"ucpstore: {' '.join(message.split())}", err=True)
    return code


def _debugging() -> bool:
    return os.environ.get("UCPSTORE_DEBUG", "0") not in ("", "0")


def no_step(given: str) -> str:
    """What to say of a STEP that is no step."""
    shown = given if len(given) <= 40 else f"{given[:37]}..."
    return f"a step is a whole number >= 0, but STEP is {shown!r}"


def _explain(error: Exception, prog_name: str, args: Sequence[str]) -> tuple[str, int]:
    if isinstance(error, _ClickError):
        if (number := _negative(error, args)) is not None:
            return no_step(number), USAGE
        context = getattr(error, "ctx", None)
        path = context.command_path if context is not None else prog_name
        said = str(error.format_message()).rstrip(".")  # type: ignore[attr-defined]  # click's own
        return f"{said}; see {path} --help", USAGE
    if isinstance(error, StepNotFoundError):
        return str(error), NOT_FOUND
    if isinstance(error, StateError):
        return str(error), USAGE
    if isinstance(error, FormatError):
        return str(error), TOO_NEW
    if isinstance(error, CorruptError):
        return str(error), PROBLEMS
    if isinstance(error, (UcpstoreError, OSError)):
        return str(error), STORAGE
    told = "its traceback is above" if _debugging() else "set UCPSTORE_DEBUG=1 to see where"
    return f"unexpected {type(error).__name__}: {error}; this is a bug of ucpstore, {told}", BUG


def _negative(error: Exception, args: Sequence[str]) -> str | None:
    """The argument that is a negative number, taken for an option where a STEP may stand."""
    context, option = getattr(error, "ctx", None), getattr(error, "option_name", None)
    if not (context and option and any(each.name == "step" for each in context.command.params)):
        return None
    numbers = filter(re.compile(r"-[0-9][0-9.]*").fullmatch, args)
    return next((each for each in numbers if each.startswith(option)), None)


def _drop_stdout() -> int:
    """The reader of our output is gone: say nothing, not even when Python flushes at exit."""
    try:
        sink = os.open(os.devnull, os.O_WRONLY)
        os.dup2(sink, sys.stdout.fileno())
    except (OSError, ValueError):
        pass  # stdout is no file of the system
    return BROKEN_PIPE

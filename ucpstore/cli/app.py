"""The commands and their options. Each reads a store and prints; none ever writes to one."""

from __future__ import annotations

import json
import sys
import time
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING, Annotated

import typer

from ucpstore.cli import exits
from ucpstore.errors import StateError

if TYPE_CHECKING:
    from ucpstore.storage import Storage

app = typer.Typer(
    name="ucpstore",
    cls=exits.Commands,
    help="Look into a store of checkpoints. No command here changes a store.",
    epilog=(
        "Exit codes: 0 fine, 1 problems found, 2 wrong usage, 3 no such store or step, "
        "4 storage failed, 5 written by a newer ucpstore, 70 a bug of ucpstore, 130 interrupted, "
        "141 the reader of the output went away."
    ),
    add_completion=False,
    rich_markup_mode=None,
    pretty_exceptions_enable=False,
    context_settings={"help_option_names": ["-h", "--help"]},
)

Url = Annotated[
    str,
    typer.Argument(
        metavar="URL",
        help="The store: a path, file:///path or s3://bucket/prefix.",
        show_default=False,
    ),
]
Step = Annotated[
    str | None,
    typer.Argument(
        metavar="[STEP]", help="A step's number, as it was given to `save`.", show_default=False
    ),
]
AsJson = Annotated[bool, typer.Option("--json", help="Print one JSON document.")]
StorageOption = Annotated[
    list[str] | None,
    typer.Option(
        "--storage-option",
        metavar="KEY=VALUE",
        help="An option of the storage, as profile=NAME, anon=true or "
        "client_kwargs.region_name=NAME; may be given several times.",
    ),
]
Endpoint = Annotated[
    str | None,
    typer.Option("--endpoint-url", metavar="URL", help="The S3 server, if it is not AWS."),
]


def _print_version(wanted: bool) -> None:
    if wanted:
        from ucpstore import __version__

        typer.echo(f"ucpstore {__version__}")
        raise typer.Exit


@app.callback()
def ucpstore(
    version: Annotated[
        bool,
        typer.Option(
            "--version", callback=_print_version, is_eager=True, help="Print the version."
        ),
    ] = False,
) -> None:
    """Look into a store of checkpoints. No command here changes a store."""


@app.command()
def ls(
    url: Url,
    as_json: AsJson = False,
    storage_option: StorageOption = None,
    endpoint_url: Endpoint = None,
) -> None:
    """List the committed steps, and the saves that did not finish."""
    from ucpstore.cli.ls import document, page
    from ucpstore.manage.listing import list_store
    from ucpstore.options import Options

    with _storage(url, storage_option, endpoint_url) as storage:
        found = list_store(storage, Options.from_environment())
    _print(page(found), document(found) if as_json else None)
    if any(each.damaged for each in found.unreadable):
        raise typer.Exit(exits.PROBLEMS)
    if found.unreadable:
        raise typer.Exit(exits.TOO_NEW)


@app.command()
def show(
    url: Url,
    step: Step = None,
    match: Annotated[
        str | None,
        typer.Option(
            metavar="GLOB", help="Only names that match, as 'model/layers.0.*' or 'optim.exp_avg'."
        ),
    ] = None,
    path: Annotated[
        bool, typer.Option("--path", help="Print only where the step's plain Zarr group is.")
    ] = False,
    as_json: AsJson = False,
    storage_option: StorageOption = None,
    endpoint_url: Endpoint = None,
) -> None:
    """Show what a step holds: its arrays and its Python values. Without STEP, the newest."""
    from ucpstore import catalog
    from ucpstore.cli import text
    from ucpstore.cli.show import document, page
    from ucpstore.manage.contents import read_contents, step_url
    from ucpstore.options import Options

    if path and (as_json or match is not None):
        raise typer.BadParameter("--path prints nothing but the path; leave out --json and --match")
    number = _step(step)
    with _storage(url, storage_option, endpoint_url) as storage:
        catalog.require_store(storage)
        if path:
            typer.echo(step_url(storage, catalog.find_step(storage, number).record))
            return
        found = read_contents(storage, number, Options.from_environment())
    entries = found.entries if match is None else found.matching(match)
    if match is not None and not entries:
        message = f"step {found.record.step} of {url} holds nothing that matches {match!r}"
        names = ", ".join(text.printable("/".join(each.keys)) for each in found.entries[:2])
        hint = f"; names are like {names}" if names else ""
        raise typer.Exit(exits.fail(f"{message}{hint}", exits.NOT_FOUND))
    _print(page(found, entries), document(found, entries) if as_json else None)


@app.command()
def verify(
    url: Url,
    step: Step = None,
    data: Annotated[
        bool, typer.Option("--data", help="Read every byte and compare it with its checksum.")
    ] = False,
    as_json: AsJson = False,
    storage_option: StorageOption = None,
    endpoint_url: Endpoint = None,
) -> None:
    """Check that a step, or without STEP every step, is whole.

    Compares all documents, and the presence and size of all objects (of compressed ones the index);
    --data reads them too.
    """
    from ucpstore.cli.bar import bar
    from ucpstore.cli.verify import document, page
    from ucpstore.manage.verify import verify as verify_store
    from ucpstore.options import Options

    started = time.perf_counter()
    number = _step(step)
    with (
        _storage(url, storage_option, endpoint_url) as storage,
        bar(not as_json) as progress,
    ):
        found = verify_store(
            storage, number, data=data, options=Options.from_environment(), progress=progress
        )
    seconds = time.perf_counter() - started
    _print(page(found, seconds), document(found, seconds) if as_json else None)
    if not found.ok:
        raise typer.Exit(exits.PROBLEMS)
    if found.too_new:
        raise typer.Exit(exits.TOO_NEW)


def _step(step: str | None) -> int | None:
    """The number in STEP, which typer would refuse in words of its own."""
    from ucpstore.format.layout import check_step

    if step is None:
        return None
    if not (step.isascii() and step.isdigit()):
        raise StateError(exits.no_step(step))
    return check_step(int(step.lstrip("0")[:100] or "0"))


@contextmanager
def _storage(url: str, given: Iterable[str] | None, endpoint: str | None) -> Iterator[Storage]:
    from ucpstore.storage import open_storage

    options = _storage_options(given or ())
    if endpoint is not None:
        options["endpoint_url"] = endpoint
    storage = open_storage(url, options)
    try:
        yield storage
    finally:
        storage.close()


def _storage_options(given: Iterable[str]) -> dict[str, object]:
    """`KEY=VALUE` as storage options; `true` and `false` are booleans, a dot leads into a dict."""
    options: dict[str, object] = {}
    for text in given:
        name, separator, value = text.partition("=")
        if not separator or not all(name.split(".")):
            # Without the text, which may hold a secret.
            raise StateError("a --storage-option must be KEY=VALUE, as profile=NAME")
        *folders, last = name.split(".")
        inside = options
        for folder in folders:
            child = inside.setdefault(folder, {})
            if not isinstance(child, dict):
                raise StateError(f"--storage-option {folder} is given both as a value and a group")
            inside = child
        inside[last] = {"true": True, "false": False}.get(value.lower(), value)
    return options


def _print(page: Iterable[str], document: dict[str, object] | None) -> None:
    """The JSON document where there is one, else the page."""
    if document is not None:
        json.dump(document, sys.stdout, indent=2, allow_nan=False)
        sys.stdout.write("\n")
        return
    for line in page:
        sys.stdout.write(f"{line}\n")

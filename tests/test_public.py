"""The public surface: small, sorted, documented, and cheap to import."""

from __future__ import annotations

import inspect
import subprocess
import sys

import pytest

import ucpstore


def test_what_is_exported_is_there_and_sorted() -> None:
    assert ucpstore.__all__ == sorted(ucpstore.__all__)
    for name in ucpstore.__all__:
        assert getattr(ucpstore, name).__doc__, name
    assert set(ucpstore.__all__) <= set(dir(ucpstore))


def test_an_unknown_name_is_an_attribute_error() -> None:
    with pytest.raises(AttributeError, match="has no attribute 'sabe'"):
        ucpstore.sabe  # noqa: B018


def test_errors_derive_from_the_nearest_builtin_and_have_a_kind() -> None:
    expected = {
        "StateError": ValueError,
        "UnsupportedError": TypeError,
        "StepNotFoundError": FileNotFoundError,
        "StepExistsError": FileExistsError,
        "StorageError": OSError,
        "RankMissingError": TimeoutError,
        "CorruptError": ValueError,
    }
    for name, builtin in expected.items():
        assert issubclass(getattr(ucpstore, name), builtin)
        assert issubclass(getattr(ucpstore, name), ucpstore.UcpstoreError)
    errors = [getattr(ucpstore, name) for name in ucpstore.__all__ if name.endswith("Error")]
    assert len({error.kind for error in errors}) == len(errors)


def test_a_store_and_the_functions_take_the_same_arguments() -> None:
    for name in ("save", "load"):
        function = inspect.signature(getattr(ucpstore, name)).parameters
        method = inspect.signature(getattr(ucpstore.CheckpointStore, name)).parameters
        assert set(function) - {"url", "storage_options"} == set(method) - {"self"}


def test_importing_does_no_work() -> None:
    code = "import sys, ucpstore; print('torch' in sys.modules, 'zarr' in sys.modules)"
    found = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert found.stdout.split() == ["False", "False"]

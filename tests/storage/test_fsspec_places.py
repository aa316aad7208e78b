"""From URLs to fsspec's file systems: options and packages."""

from __future__ import annotations

import importlib.util

import pytest

from ucpstore.errors import StateError
from ucpstore.storage import open_storage


def test_options_are_checked_against_what_the_file_system_knows(bare: str) -> None:
    with pytest.raises(StateError, match=r"unknown storage option 'endpont'.*mean 'endpoint'"):
        open_storage(bare, {"endpont": "x"})
    with pytest.raises(StateError, match=r"unknown storage option 'zzz'.*Known are account_key"):
        open_storage(bare, {"zzz": "x"})


def test_a_missing_package_is_named() -> None:
    if importlib.util.find_spec("gcsfs"):
        pytest.skip("gcsfs is installed")
    with pytest.raises(StateError, match=r"'gs://b/k' needs a package that is missing.*gcsfs"):
        open_storage("gs://b/k")

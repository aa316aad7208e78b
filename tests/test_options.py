from __future__ import annotations

import dataclasses

import pytest

from ucpstore.errors import StateError
from ucpstore.options import MIB, Options


def test_defaults() -> None:
    options = Options()
    assert options == Options.from_environment({})
    assert (options.chunk_bytes, options.target_bytes) == (MIB, 16 * MIB)
    assert options.budget_bytes == 256 * MIB


def test_every_field_has_its_variable() -> None:
    for field in dataclasses.fields(Options):
        found = Options.from_environment({f"UCPSTORE_{field.name.upper()}": "7"})
        assert getattr(found, field.name) == 7
        assert type(getattr(found, field.name)) is type(getattr(Options(), field.name))


@pytest.mark.parametrize(
    ("name", "text"), [("THREADS", "many"), ("THREADS", "1.5"), ("BUDGET_BYTES", "0")]
)
def test_a_wrong_variable_is_named(name: str, text: str) -> None:
    with pytest.raises(StateError, match=f"UCPSTORE_{name}"):
        Options.from_environment({f"UCPSTORE_{name}": text})


@pytest.mark.parametrize("value", [0, -1, True, "8", 1.5, None])
def test_a_wrong_option_is_named(value: object) -> None:
    with pytest.raises(StateError, match="option threads"):
        Options(threads=value)  # type: ignore[arg-type]


def test_they_are_frozen() -> None:
    with pytest.raises(dataclasses.FrozenInstanceError):
        Options().threads = 3  # type: ignore[misc]

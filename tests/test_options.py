from __future__ import annotations

import dataclasses

import pytest

from ucpstore.errors import StateError
from ucpstore.options import MIB, Options, codec_for


def test_defaults() -> None:
    options = Options()
    assert options == Options.from_environment({})
    assert (options.chunk_bytes, options.target_bytes) == (MIB, 16 * MIB)
    assert options.budget_bytes == 256 * MIB


def test_every_field_has_its_variable() -> None:
    for field in dataclasses.fields(Options):
        if field.name == "codecs":
            continue  # patterns belong to the names of one program
        found = Options.from_environment({f"UCPSTORE_{field.name.upper()}": "7"})
        assert getattr(found, field.name) == 7
        assert isinstance(getattr(found, field.name), float) is (field.type == "float")


@pytest.mark.parametrize(
    ("name", "text"), [("THREADS", "many"), ("THREADS", "1.5"), ("BUDGET_BYTES", "0")]
)
def test_a_wrong_variable_is_named(name: str, text: str) -> None:
    with pytest.raises(StateError, match=f"UCPSTORE_{name}"):
        Options.from_environment({f"UCPSTORE_{name}": text})


@pytest.mark.parametrize("value", [0, -1, True, "8", 1.5])
def test_a_wrong_option_is_named(value: object) -> None:
    with pytest.raises(StateError, match="option threads"):
        Options(threads=value)  # type: ignore[arg-type]


def test_only_what_the_storage_decides_may_be_none() -> None:
    assert Options(threads=None) == Options()
    with pytest.raises(StateError, match="option budget_bytes"):
        Options(budget_bytes=None)  # type: ignore[arg-type]


def test_codecs_are_kept_as_pairs_of_pattern_and_text() -> None:
    zstd = '{"configuration":{"level":3},"name":"zstd"}'
    given = {"optim.*": {"name": "zstd", "configuration": {"level": 3}}, "bias": None, "*": "gzip"}
    options = Options(codecs=given)
    assert options.codecs == (
        ("optim.*", zstd),
        ("bias", "null"),
        ("*", '{"configuration":{},"name":"gzip"}'),
    )
    assert options == Options(codecs=tuple(given.items())) == dataclasses.replace(options)
    assert hash(options) == hash(Options(codecs=given))
    assert codec_for("optim.exp_avg.w", options) == zstd
    assert codec_for("bias", options) is None
    assert codec_for("w", Options(codecs=(("optim.*", "zstd"),))) is None


@pytest.mark.parametrize(
    "given",
    [
        "zstd",
        {"*": 3},
        [("*",)],
        [(3, "zstd")],
        {"*": {"name": 1}},
        {"*": {"configuration": {}}},
        {"*": {"name": "zstd", "level": 3}},
        {"*": {"name": "zstd", "configuration": 3}},
        {"*": {"name": "zstd", "configuration": {"level": float("nan")}}},
        7,
    ],
)
def test_wrong_codecs_are_named(given: object) -> None:
    with pytest.raises(StateError, match="option codecs must be pairs"):
        Options(codecs=given)  # type: ignore[arg-type]


def test_they_are_frozen() -> None:
    with pytest.raises(dataclasses.FrozenInstanceError):
        Options().threads = 3  # type: ignore[misc]

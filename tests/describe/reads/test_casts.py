"""Which stored dtypes may be read into which."""

from __future__ import annotations

import pytest

from ucpstore.describe.reads.casts import dtype_problem


@pytest.mark.parametrize(
    ("stored", "wanted", "cast", "text"),
    [
        ("float32", "float32", [], None),
        ("float32", "bfloat16", [], "allow the conversion: cast='m.w'"),
        ("float32", "bfloat16", ["m.*"], None),
        ("bfloat16", "float32", ["o.*"], "allow the conversion: cast='m.w'"),
        ("int64", "float32", ["*"], None),
        ("float32", "complex64", ["*"], None),
        ("bool", "int8", ["*"], None),
        ("complex64", "float32", ["*"], "complex is never converted to float"),
        ("float32", "int64", ["*"], "float is never converted to int"),
        ("int8", "bool", ["*"], "int is never converted to bool"),
    ],
)
def test_conversions_are_asked_for_and_never_go_to_a_narrower_kind(
    stored: str, wanted: str, cast: list[str], text: str | None
) -> None:
    found = dtype_problem("m.w", stored, wanted, cast)
    if text is None:
        assert found is None
    else:
        assert found is not None
        assert found.startswith(f"m.w: stored as {stored}, the target is {wanted}; ")
        assert text in found

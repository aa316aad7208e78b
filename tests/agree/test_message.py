"""Messages survive the store whatever their size, and failures keep their class."""

from __future__ import annotations

import random

import pytest

from ucpstore import errors
from ucpstore.agree import message
from ucpstore.agree.keyvalue import PART_BYTES, DictStore
from ucpstore.agree.message import Failure, Message

NOISE = random.Random(2).randbytes(2 * PART_BYTES + 5)


@pytest.mark.parametrize(
    ("payload", "keys"),
    [(b"", 1), (b"\n\x00", 1), (b"a" * 20_000_000, 1), (NOISE[:100_000], 1), (NOISE, 4)],
    ids=["empty", "binary", "compressible", "noise", "in parts"],
)
def test_a_message_is_read_as_it_was_put_and_leaves_nothing(payload: bytes, keys: int) -> None:
    store = DictStore()
    sent = Message("save", "begin", payload, "id", Failure(3, "StateError", "rank 3: no"))
    message.put(store, "k", sent)
    assert store.num_keys() == keys
    value = store.get("k")
    assert value is not None
    assert message.take(store, "k", value) == sent
    message.remove(store, "k")
    assert store.num_keys() == 0


class OwnError(errors.StorageError):
    """A class that other ranks may not know."""


@pytest.mark.parametrize(
    ("error", "kind", "text"),
    [
        (errors.CorruptError("bad chunk"), errors.CorruptError, "rank 5: bad chunk"),
        (errors.StepNotFoundError("no step"), errors.StepNotFoundError, "rank 5: no step"),
        (OwnError("mine"), errors.StorageError, "rank 5: mine"),
        (ValueError("x"), errors.AgreementError, "rank 5: ValueError: x"),
        (MemoryError(), errors.AgreementError, "rank 5: MemoryError"),
    ],
)
def test_an_exception_is_rebuilt_by_class(
    error: Exception, kind: type[Exception], text: str
) -> None:
    rebuilt = Failure.of(5, error).error()
    assert type(rebuilt) is kind
    assert str(rebuilt) == text


def test_a_class_that_is_not_known_becomes_an_agreement_error() -> None:
    for name in ("FutureError", "ClassVar", "annotations"):
        assert type(Failure(1, name, "rank 1: x").error()) is errors.AgreementError


def test_of_several_failures_the_lowest_ranks_is_told() -> None:
    failures = [Failure(3, "StateError", "rank 3: c"), Failure(1, "StateError", "rank 1: a")]
    assert message.first_of(failures) == Failure(1, "StateError", "rank 1: a (and 1 more rank)")


def test_why_a_rank_failed_is_told_rather_than_who_missed_it() -> None:
    missing = Failure(0, "RankMissingError", "rank 0: rank 3 did not take part")
    cause = Failure(3, "AgreementError", "rank 3: MemoryError")
    assert message.first_of([missing, cause]).text == "rank 3: MemoryError (and 1 more rank)"
    assert message.first_of([missing]) == missing

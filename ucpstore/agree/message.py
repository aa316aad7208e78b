"""Messages of an agreement: a small header, a payload, and how a failure travels.

A message above 64 KiB is compressed, and one above `PART_BYTES` lies under several keys.
"""

from __future__ import annotations

import json
import zlib
from collections.abc import Sequence
from dataclasses import asdict, dataclass

from ucpstore import errors
from ucpstore.agree.keyvalue import PART_BYTES, KeyValue

_COMPRESS_BYTES = 64 * 1024


@dataclass(frozen=True, slots=True)
class Failure:
    """An exception as the other ranks see it: `name` is a class of `ucpstore.errors` or not."""

    rank: int
    name: str
    text: str

    @classmethod
    def of(cls, rank: int, error: BaseException, *, name_rank: bool = True) -> Failure:
        """Describe `error`, raised on `rank`, whose number leads the text if `name_rank`."""
        prefix = f"rank {rank}: " if name_rank else ""
        if isinstance(error, errors.UcpstoreError):
            known = next(k for k in type(error).__mro__ if getattr(errors, k.__name__, None) is k)
            return cls(rank, known.__name__, f"{prefix}{error}")
        text = f"{prefix}{type(error).__name__}"
        return cls(rank, "AgreementError", f"{text}: {error}" if str(error) else text)

    def error(self) -> errors.UcpstoreError:
        """The exception to raise on the other ranks."""
        kind = getattr(errors, self.name, None)
        if isinstance(kind, type) and issubclass(kind, errors.UcpstoreError):
            return kind(self.text)
        return errors.AgreementError(self.text)


def first_of(failures: Sequence[Failure]) -> Failure:
    """The lowest rank's failure, which says how many more ranks failed.

    Who misses another rank comes last: why that one failed is the cause.
    """
    first = min(failures, key=lambda failure: (failure.name == "RankMissingError", failure.rank))
    more = len(failures) - 1
    if not more:
        return first
    return Failure(
        first.rank, first.name, f"{first.text} (and {more} more rank{'s' if more > 1 else ''})"
    )


@dataclass(frozen=True, slots=True)
class Message:
    """What a rank answers in a round, or what rank 0 decides.

    `call` and `round` say what the sender takes part in; `exchanger` names the exchange that an
    answering rank has open, and the one that all have open in the outcome ("" where they differ).
    """

    call: str
    round: str
    payload: bytes = b""
    exchanger: str = ""
    failure: Failure | None = None

    def to_bytes(self) -> bytes:
        failure = None if self.failure is None else asdict(self.failure)
        header = json.dumps([self.call, self.round, self.exchanger, failure]).encode()
        return header + b"\n" + self.payload

    @classmethod
    def from_bytes(cls, data: bytes) -> Message:
        header, _, payload = data.partition(b"\n")
        call, round_, exchanger, failure = json.loads(header)
        return cls(call, round_, payload, exchanger, Failure(**failure) if failure else None)


def put(store: KeyValue, key: str, message: Message) -> None:
    """Set a message under `key`, its parts first."""
    data = message.to_bytes()
    data = b"Z" + zlib.compress(data, 1) if len(data) > _COMPRESS_BYTES else b"R" + data
    if len(data) <= PART_BYTES:
        store.set(key, data)
        return
    parts = range(0, len(data), PART_BYTES)
    for number, start in enumerate(parts):
        store.set(f"{key}.{number}", b"P" + data[start : start + PART_BYTES])
    store.set(key, b"M%d" % len(parts))


def take(store: KeyValue, key: str, value: bytes) -> Message:
    """The message whose value under `key` is `value`."""
    count = _parts(value)
    if count:
        pieces = store.get_many([f"{key}.{number}" for number in range(count)])
        value = b"".join(piece[1:] for piece in pieces)
    data = zlib.decompress(value[1:]) if value[:1] == b"Z" else value[1:]
    return Message.from_bytes(data)


def remove(store: KeyValue, key: str, value: bytes | None = None) -> None:
    """Delete a message with its parts; `value` is what lies under `key`, where it is known."""
    value = store.get(key) if value is None else value
    count = _parts(value) if value is not None else 0
    store.delete([key, *(f"{key}.{number}" for number in range(count))])


def _parts(value: bytes) -> int:
    return int(value[1:]) if value[:1] == b"M" else 0

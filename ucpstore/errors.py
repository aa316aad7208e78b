"""The errors that ucpstore raises, grouped by what a handler would do about them.

    UcpstoreError
    |-- StateError              (ValueError)         what was given to save or load
    |   |-- UnsupportedError    (TypeError)          a leaf or placement without a stored form
    |   `-- MismatchError       (ValueError)         the target does not fit what is stored
    |-- StepNotFoundError       (FileNotFoundError)  no such committed step
    |-- StepExistsError         (FileExistsError)    the step is committed, or another job took it
    |-- InProgressError         (RuntimeError)       a save of the step is under way
    |-- FormatError             (ValueError)         written by a newer version, or not a store
    |-- CorruptError            (ValueError)         stored bytes are damaged or gone
    |-- StorageError            (OSError)            the place itself: bucket, credentials, disk
    |   `-- OutcomeUnknownError                      a request or a commit whose answer was lost
    `-- AgreementError          (RuntimeError)       the ranks did not agree
        `-- RankMissingError    (TimeoutError)       ranks that did not arrive or stopped answering

Every message says what failed, what was expected, what was found and what to do. No message holds
a secret. `kind` is a stable name that programs may compare.
"""

from __future__ import annotations

from typing import ClassVar


class UcpstoreError(Exception):
    """Base of every error that ucpstore raises on purpose."""

    kind: ClassVar[str] = "error"


class StateError(UcpstoreError, ValueError):
    """The state handed to `save` or `load` cannot be used as it is."""

    kind = "state"


class UnsupportedError(StateError, TypeError):
    """A leaf, dtype or placement has no stored form; the message names its path."""

    kind = "unsupported"


class MismatchError(StateError):
    """The target of a load does not fit the checkpoint; the message lists all differences."""

    kind = "mismatch"


class StepNotFoundError(UcpstoreError, FileNotFoundError):
    """The store has no committed step of that number, or none at all."""

    kind = "step_not_found"


class StepExistsError(UcpstoreError, FileExistsError):
    """The step is committed already and `overwrite` was not asked for, or another job won it."""

    kind = "step_exists"


class InProgressError(UcpstoreError, RuntimeError):
    """The step's own save is still running."""

    kind = "in_progress"


class FormatError(UcpstoreError, ValueError):
    """The store needs a newer reader, uses a feature that is not known, or is no store."""

    kind = "format"


class CorruptError(UcpstoreError, ValueError):
    """Stored bytes are damaged or missing; the message names the key."""

    kind = "corrupt"


class StorageError(UcpstoreError, OSError):
    """The storage refused or failed: missing bucket, credentials, permission, space, network."""

    kind = "storage"


class OutcomeUnknownError(StorageError):
    """Whether a request or a commit took effect is not known; the message says how to look."""

    kind = "outcome_unknown"


class AgreementError(UcpstoreError, RuntimeError):
    """The ranks of a collective call did not agree, or another rank failed."""

    kind = "agreement"


class RankMissingError(AgreementError, TimeoutError):
    """Ranks did not join a collective call, or stopped answering, within the time limit."""

    kind = "rank_missing"

"""Everything llamakv refuses to do, as exceptions with typed fields.

Each class has a stable ``code`` (used in ``--json``), an exit status, a one-line message made from its fields and,
where there is one, a ``hint``: a next step the user can paste. Messages are lower case without a full stop.
"""

from __future__ import annotations

from typing import ClassVar


class LlamakvError(Exception):
    """Base of all errors llamakv raises on purpose; never raised itself.

    ``exit_status`` is the process's exit status when the error reaches the command line.
    """

    code: ClassVar[str] = "error"
    exit_status: ClassVar[int] = 1

    def __init__(self, message: str, *, hint: str | None = None, **fields: str | int | float | None) -> None:
        super().__init__(message)
        self.message = message
        self.hint = hint
        self.fields = fields


# ---------------------------------------------------------------- usage and look-up


class UsageError(LlamakvError):
    """An option, prompt or name that cannot be used as given."""

    code = "usage"
    exit_status = 2


class NotFoundError(LlamakvError):
    """A session, model or file that is not there."""

    code = "not_found"
    exit_status = 10


class ExistsError(LlamakvError):
    """Something that would have to be overwritten is already there."""

    code = "exists"
    exit_status = 11


class InterruptedByUser(LlamakvError):
    """Ctrl-C (130) or SIGTERM (143, in ``fields['status']``) ended the command."""

    code = "interrupted"
    exit_status = 130


# ---------------------------------------------------------------- store


class StoreError(LlamakvError):
    """Family: the files of a session could not be used."""

    code = "store"


class LockedError(StoreError):
    """Another process is writing the session."""

    code = "locked"
    exit_status = 12


class ConflictError(StoreError):
    """Somebody else saved the session since it was read; nothing was written."""

    code = "conflict"
    exit_status = 12


class WriteError(StoreError):
    """The operating system refused a write; the previous file is untouched."""

    code = "write"
    exit_status = 16


class ReadError(StoreError):
    """The operating system refused to let a file be read (permission, input/output error)."""

    code = "read"


class FormatError(StoreError):
    """Family: the file is not a session file this version can trust."""

    code = "format"
    exit_status = 13


class NotASessionError(FormatError):
    """The file is something else."""

    code = "not_a_session"


class NewerFormatError(FormatError):
    """The file was written by a newer format version."""

    code = "newer_format"


class DamagedError(FormatError):
    """The file contradicts itself: a digest, a length or a count is wrong."""

    code = "damaged"


# ---------------------------------------------------------------- engine


class EngineError(LlamakvError):
    """The engine refused or failed."""

    code = "engine"


class ModelFileError(EngineError):
    """The model file cannot be used: not a GGUF, no vocabulary, an unknown architecture."""

    code = "model"
    exit_status = 14


class MismatchError(EngineError):
    """A state does not fit: model, adapters or memory settings differ."""

    code = "mismatch"
    exit_status = 14


class NoRoomError(EngineError):
    """Out of cells, sequences, context or budget; nothing was changed."""

    code = "no_room"
    exit_status = 15


class AbortedError(EngineError):
    """The caller's abort check stopped the engine; ``fields['n_done']`` tokens were evaluated and are kept."""

    code = "aborted"
    exit_status = 130


class BusyError(EngineError):
    """More requests wait than are allowed; ``fields['retry_after_s']`` is when to come again."""

    code = "busy"
    exit_status = 15

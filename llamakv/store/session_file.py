"""The session file: everything the layers above need of it."""

from llamakv.store.codec import AUTO, NONE, Compress, CompressOption, Encoding
from llamakv.store.sections import StoredSection, n_cells_held, sections_up_to, truncate_sections
from llamakv.store.session_info import SessionInfo
from llamakv.store.session_reader import (
    DamagedSection,
    SessionReader,
    VerifyReport,
    read_session,
    verify_session,
)
from llamakv.store.session_writer import (
    OnSection,
    change_lineage,
    check_writable,
    compact_session,
    create_session,
    extend_session,
    mark_used,
)

__all__ = [
    "AUTO",
    "NONE",
    "Compress",
    "CompressOption",
    "DamagedSection",
    "Encoding",
    "OnSection",
    "SessionInfo",
    "SessionReader",
    "StoredSection",
    "VerifyReport",
    "change_lineage",
    "check_writable",
    "compact_session",
    "create_session",
    "extend_session",
    "mark_used",
    "n_cells_held",
    "read_session",
    "sections_up_to",
    "truncate_sections",
    "verify_session",
]

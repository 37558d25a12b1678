"""How the golden file of version 2 was written. Not to be run again: the file is what counts.

python -m tests.store.golden.write_v2
"""

from dataclasses import replace
from pathlib import Path

from llamakv.records import MemoryKind, SessionRecord
from llamakv.store.session_file import create_session, extend_session, truncate_sections
from tests.store.samples import cells, make_record, tail


def with_times(record: SessionRecord) -> SessionRecord:
    """The record with what came in version 2."""
    assert record.chat is not None
    messages = tuple(replace(item, time_s=1_700_000_100.5 + i) for i, item in enumerate(record.chat.messages))
    lineage = replace(record.lineage, ttl_s=86_400.25, pinned=True)
    return replace(record, chat=replace(record.chat, messages=messages), lineage=lineage)


if __name__ == "__main__":
    path = Path(__file__).with_name("v2-hybrid.bin")
    record = make_record(9, kind=MemoryKind.HYBRID)
    base = create_session(path, record, [cells(0, 8, n_bytes=3001), tail(4), tail(8)])
    record = with_times(make_record(7, kind=MemoryKind.HYBRID, n_saves=2))
    keep = truncate_sections(base.sections, 4)
    extend_session(base, record, keep=keep, new=[cells(4, 6, n_bytes=50), tail(6)])

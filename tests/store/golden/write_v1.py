"""How the golden files of version 1 were written. Not to be run again: the files are what counts.

python -m tests.store.golden.write_v1
"""

from pathlib import Path

from llamakv.records import MemoryKind
from llamakv.store.session_file import create_session, extend_session
from tests.store.samples import cells, make_record, tail

if __name__ == "__main__":
    path = Path(__file__).with_name("v1-hybrid.bin")
    record = make_record(5, kind=MemoryKind.HYBRID)
    base = create_session(path, record, [cells(0, 4, n_bytes=301), tail(4)])
    record = make_record(7, kind=MemoryKind.HYBRID, n_saves=2)
    extend_session(base, record, keep=base.sections, new=[cells(4, 6, n_bytes=50), tail(6)])

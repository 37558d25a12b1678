"""How the golden store of version 1 was written. Not to be run again: the files are what counts.

python -m tests.store.golden.write_store_v1
"""

import shutil
from dataclasses import replace
from pathlib import Path

from llamakv.store.objects import CLAIMS, FOLDER
from llamakv.store.session_file import SessionReader, change_lineage, create_session, extend_session, truncate_sections
from llamakv.store.store_folder import StoreBudget, make_store, write_budget
from tests.store.golden.write_v2 import with_times
from tests.store.samples import cells, make_record

if __name__ == "__main__":
    root = Path(__file__).with_name("store-v1")
    make_store(root)
    write_budget(root, StoreBudget(max_bytes=1_000_000, ttl_s=2_592_000.5))
    record = with_times(make_record(5, session_id="base"))
    base = create_session(root / "base.bin", record, [cells(0, 4, n_bytes=120)])
    record = with_times(make_record(9, session_id="base", n_saves=2))
    extend_session(base, record, keep=base.sections, new=[cells(4, 8, n_bytes=3001)])
    with SessionReader(root / "base.bin") as reader:
        record = make_record(10, session_id="child")
        lineage = replace(record.lineage, parent_id="base", parent_position=7, name="é fork")
        keep = truncate_sections(reader.info.sections, 6)
        new = [cells(6, 9, n_bytes=50)]
        create_session(root / "fork.bin", replace(record, lineage=lineage), new, source=reader, keep=keep)
    create_session(root / "pinned.bin", make_record(5, session_id="pinned"), [cells(0, 4, n_bytes=120)])
    change_lineage(
        root / "pinned.bin",
        lambda lineage: replace(lineage, pinned=True, note="keep\nthis", tags=("work", "数据"), ttl_s=3600.0),
    )
    lost = make_record(9, session_id="partial")
    create_session(root / "partial.bin", lost, [cells(0, 4, n_bytes=120)], is_partial=True)
    shutil.rmtree(root / FOLDER / CLAIMS)  # git keeps no empty folder, and a reader needs none of these
    (root / FOLDER / ".lock").unlink()

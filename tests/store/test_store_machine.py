"""Any order of saves, forks, removals, collections, failures and deaths leaves what a simple model says."""

import os
import shutil
import tempfile
from dataclasses import dataclass, replace
from pathlib import Path

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule, run_state_machine_as_test

from llamakv.errors import ConflictError, ExistsError, NotFoundError, WriteError
from llamakv.store import files
from llamakv.store.collector import collect
from llamakv.store.session_file import (
    SessionReader,
    change_lineage,
    create_session,
    extend_session,
    read_session,
    truncate_sections,
    verify_session,
)
from llamakv.store.session_store import SessionStore
from llamakv.store.store_folder import make_store
from tests.store.at_rest import left_over, referenced, there
from tests.store.samples import cells, make_record
from tests.store.test_durability import Died, FailingFiles

N_PIECE = 3

Row = tuple[int, int, int, bytes]
"""A section as the model knows it: p0, p1, p_used and its bytes."""


@dataclass(frozen=True)
class Known:
    """What a session is. ``tokens`` has one more than its sections have cells."""

    tokens: tuple[int, ...]
    rows: tuple[Row, ...]
    pinned: bool = False

    @property
    def n_cells(self):
        return len(self.tokens) - 1

    def cut(self, n_cells):
        rows = [(p0, p1, min(p_used, n_cells), data) for p0, p1, p_used, data in self.rows if p0 < n_cells]
        return replace(self, tokens=self.tokens[: n_cells + 1], rows=tuple(rows))

    def longer(self, seed, n):
        """With ``n`` more cells, and the new sections."""
        start, end = self.n_cells, self.n_cells + n
        new = []
        for p0 in range(start, end, N_PIECE):
            p1 = min(p0 + N_PIECE, end)
            new.append(cells(p0, p1, n_bytes=40 * (p1 - p0), seed=10_000 * seed + 100 * p0 + p1))
        rows = tuple((item.p0, item.p1, item.p_used, bytes(item.data)) for item in new)
        tokens = (*self.tokens[:-1], *(1000 * seed + position for position in range(start, end + 1)))
        return replace(self, tokens=tokens, rows=self.rows + rows), new


NOTHING = Known(tokens=(0,), rows=())

names = st.sampled_from("abcd")
seeds = st.integers(0, 1)
lengths = st.integers(0, 8)
operations = st.one_of(
    st.tuples(st.just("save"), names, seeds, lengths, st.booleans()),
    st.tuples(st.just("extend"), names, st.integers(0, 12), seeds, lengths),
    st.tuples(st.just("fork"), names, names, st.integers(0, 12), seeds, lengths, st.booleans()),
    st.tuples(st.just("pin"), names, st.booleans()),
    st.tuples(st.just("remove"), st.sets(names, min_size=1)),
    st.tuples(st.just("drop"), names),
    st.tuples(st.just("move_in"), names, seeds, lengths),
    st.tuples(st.just("gc")),
)


class StoreMachine(RuleBasedStateMachine):
    """A store and what should be in it."""

    def __init__(self, folder):
        super().__init__()
        self.folder = Path(tempfile.mkdtemp(dir=folder))
        self.root = self.folder / "store"
        self.patch = pytest.MonkeyPatch()
        self.patch.setattr(os, "fsync", lambda fd: None)  # what is on the disk when is for other tests
        make_store(self.root)
        self.model = {}
        self.readers = []
        self.stale = {}
        self.n_saves = 0

    def teardown(self):
        self.patch.undo()
        for reader, _ in self.readers:
            reader.close()
        if self.model.keys() == {path.stem for path in self.root.glob("*.bin")}:
            self.gc()[0]()
        shutil.rmtree(self.folder)

    def path(self, name):
        return self.root / f"{name}.bin"

    def record(self, name, known):
        self.n_saves += 1
        record = make_record(n_saves=self.n_saves, session_id=name)
        return replace(record, tokens=known.tokens, lineage=replace(record.lineage, pinned=known.pinned))

    # What each operation does, and what the model becomes. None: it makes no sense now.

    def save(self, name, seed, n, overwrite):
        known, new = NOTHING.longer(seed, n)
        record = self.record(name, known)
        if name in self.model and not overwrite:
            return lambda: self.refused(ExistsError, lambda: create_session(self.path(name), record, new)), {}
        return lambda: create_session(self.path(name), record, new, overwrite=overwrite), {name: known}

    def extend(self, name, at, seed, n):
        if name not in self.model:
            return None
        at = min(at, self.model[name].n_cells)
        known, new = self.model[name].cut(at).longer(seed, n)
        record = self.record(name, known)

        def do():
            base = read_session(self.path(name))
            keep = truncate_sections(base.sections, at)
            self.stale.setdefault(name, base)
            extend_session(base, record, keep=keep, new=new)

        return do, {name: known}

    def fork(self, source, name, at, seed, n, overwrite):
        if source not in self.model or (name in self.model and not overwrite):
            return None
        at = min(at, self.model[source].n_cells)
        known, new = replace(self.model[source].cut(at), pinned=False).longer(seed, n)
        record = self.record(name, known)

        def do():
            with SessionReader(self.path(source)) as reader:
                keep = truncate_sections(reader.info.sections, at)
                create_session(self.path(name), record, new, source=reader, keep=keep, overwrite=overwrite)

        return do, {name: known}

    def pin(self, name, pinned):
        if name not in self.model:
            return None
        known = replace(self.model[name], pinned=pinned)
        return lambda: change_lineage(self.path(name), lambda old: replace(old, pinned=pinned)), {name: known}

    def remove(self, gone):
        store = SessionStore(self.root)
        if not gone <= self.model.keys():
            return lambda: self.refused(NotFoundError, lambda: store.remove(*sorted(gone))), {}
        return lambda: store.remove(*sorted(gone)), dict.fromkeys(gone)

    def drop(self, name):
        """A removal that dies before it collects."""
        return (lambda: files.remove(self.path(name)), {name: None}) if name in self.model else None

    def move_in(self, name, seed, n):
        """A session with its sections in its own file comes from elsewhere."""
        known, new = NOTHING.longer(seed, n)
        record = self.record(name, known)

        def do():
            create_session(self.folder / "alone.bin", record, new, overwrite=True)
            os.rename(self.folder / "alone.bin", self.path(name))

        return do, {name: known}

    def gc(self):
        def do():
            collect(self.root)
            in_store = {
                section.digest
                for path in self.root.glob("*.bin")
                for section in read_session(path).sections
                if section.in_store
            }
            assert there(self.root) == in_store <= referenced(self.root)
            assert left_over(self.root) == []

        return do, {}

    def refused(self, error, call):
        with pytest.raises(error):
            call()

    def plan(self, operation):
        name, *arguments = operation
        found = getattr(self, name)(*arguments)
        if found is None:
            return None
        do, changes = found
        after = {key: value for key, value in (self.model | changes).items() if value is not None}
        return do, after

    @rule(operation=operations)
    def something_happens(self, operation):
        if (planned := self.plan(operation)) is not None:
            do, after = planned
            do()
            self.model = after

    @rule(operation=operations, n_steps=st.integers(0, 30), dies=st.booleans())
    def something_fails_or_dies(self, operation, n_steps, dies):
        if (planned := self.plan(operation)) is None:
            return
        do, after = planned
        with pytest.MonkeyPatch.context() as patch:
            FailingFiles(patch, n_steps, dies=dies)
            try:
                do()
            except (Died, WriteError):
                pass
            else:
                self.model = after
                return
        before = self.model
        candidates = [before, after]
        if operation[0] == "remove":  # one after the other
            gone = sorted(operation[1])
            candidates += [{n: v for n, v in before.items() if n not in gone[:i]} for i in range(len(gone))]
        self.model = next((model for model in candidates if self.differs(model) is None), before)

    @rule(name=names)
    def somebody_begins_to_read(self, name):
        if name in self.model:
            reader = SessionReader(self.path(name))
            reader.hold(reader.info.sections)
            self.readers.append((reader, self.model[name]))

    @precondition(lambda self: self.readers)
    @rule()
    def who_began_to_read_first_reads_all_of_it(self):
        reader, known = self.readers.pop(0)
        with reader:
            assert self.read(reader) == known

    @rule(name=names)
    def somebody_saves_what_he_resumed_long_ago(self, name):
        base = self.stale.pop(name, None)
        if base is None or (self.path(name).exists() and read_session(self.path(name)).commit == base.commit):
            return
        with pytest.raises((ConflictError, NotFoundError)):
            extend_session(base, base.record, keep=base.sections, new=())

    def read(self, reader):
        record = reader.info.record
        sections = list(reader.read(reader.info.sections))
        rows = tuple((item.p0, item.p1, item.p_used, bytes(item.data)) for item in sections)
        return Known(tokens=record.tokens, rows=rows, pinned=record.lineage.pinned)

    def differs(self, model):
        """What is not as a model says; None if nothing is."""
        if model.keys() != {path.stem for path in self.root.glob("*.bin")}:
            return "names"
        for name, known in model.items():
            with SessionReader(self.path(name)) as reader:
                if self.read(reader) != known:
                    return name
        return None

    @invariant()
    def every_session_is_what_the_model_says(self):
        assert self.differs(self.model) is None

    @invariant()
    def no_section_is_damaged(self):
        for name in self.model:
            assert verify_session(self.path(name)).is_sound


def test_any_order_of_operations_leaves_what_the_model_says(tmp_path):
    run_state_machine_as_test(
        lambda: StoreMachine(tmp_path), settings=settings(max_examples=20, stateful_step_count=25, deadline=None)
    )


@pytest.mark.slow
def test_many_more_orders_of_operations_leave_what_the_model_says(tmp_path):
    run_state_machine_as_test(
        lambda: StoreMachine(tmp_path),
        settings=settings(max_examples=400, stateful_step_count=60, deadline=None, derandomize=False),
    )

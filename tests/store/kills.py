"""Processes that work in one store, each killed at a random moment and followed by another.

python -m tests.store.kills STORE SECONDS SEED

What a section holds follows from the session's tokens, so that whoever reads one can tell whether it is right. The
answer is a JSON document: how often each operation ended how, how many processes were killed, and what went wrong.
"""

import json
import os
import random
import signal
import sys
import time
import traceback
from collections import Counter
from dataclasses import replace
from pathlib import Path

from llamakv.errors import ConflictError, ExistsError, LockedError, NotFoundError
from llamakv.records import SectionKind, StateSection
from llamakv.store import planes
from llamakv.store.digests import digest_bytes
from llamakv.store.moving import move_session
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
from tests.store.samples import make_record

N_PROCESSES = 8
NAMES = [f"session-{i}" for i in range(10)]
N_PIECE = 8
MAX_CELLS = 64
ALLOWED = (LockedError, ConflictError, NotFoundError, ExistsError)


def content(tokens, p0, p1):
    """The bytes of a section that begins at ``p0``, whatever comes after its first token."""
    digest = digest_bytes(json.dumps([tokens[: p0 + 1], p1]).encode())
    noise = random.Random(digest).randbytes(150 * (p1 - p0))
    return noise + bytes(len(noise) // 2)


def grown(tokens, n, run):
    """Tokens with ``n`` more cells, and the sections of these; ``run`` tells this continuation from others."""
    start, end = len(tokens) - 1, len(tokens) - 1 + n
    longer = (*tokens[:-1], *[run] * (n + 1))
    sections = (
        StateSection(
            kind=SectionKind.CELLS,
            p0=p0,
            p1=min(p0 + N_PIECE, end),
            p_used=min(p0 + N_PIECE, end),
            data=memoryview(content(longer, p0, min(p0 + N_PIECE, end))),
        )
        for p0 in range(start, end, N_PIECE)
    )
    return longer, sections


def record_of(tokens, session_id):
    record = make_record(session_id=session_id, n_saves=len(tokens))
    return replace(record, tokens=tokens, lineage=replace(record.lineage, updated_s=time.time()))


def check(reader):
    """Read all of a session and compare. Raises: AssertionError."""
    tokens, position = reader.info.record.tokens, 0
    for section in reader.read(reader.info.sections):
        where = f"{reader.info.path} [{section.p0}, {section.p1})"
        assert section.p0 == position, where
        assert bytes(section.data) == content(tokens, section.p0, section.p1), where
        position = section.p_used
    assert position == len(tokens) - 1, reader.info.path


class Worker:
    """Does one thing after the other in a store, for ever."""

    def __init__(self, root, seed):
        self.root, self.store, self.chance = root, SessionStore(root), random.Random(seed)

    def path(self):
        return self.root / f"{self.chance.choice(NAMES)}.bin"

    def more(self):
        return self.chance.randint(1, 3 * N_PIECE), self.chance.randrange(1, 1 << 30)

    def save(self):
        path, (n, run) = self.path(), self.more()
        tokens, sections = grown((0,), n, run if self.chance.random() < 0.5 else n)
        create_session(path, record_of(tokens, f"{run}"), sections, overwrite=self.chance.random() < 0.3)

    def extend(self):
        base = read_session(self.path())
        tokens, (n, run) = base.record.tokens, self.more()
        n_kept = len(tokens) - 1
        if n_kept > MAX_CELLS or self.chance.random() < 0.3:
            n_kept = self.chance.randint(0, min(n_kept, MAX_CELLS))
        longer, sections = grown(tokens[: n_kept + 1], n, run)
        keep = truncate_sections(base.sections, n_kept)
        extend_session(base, record_of(longer, base.record.lineage.session_id), keep=keep, new=sections)

    def fork(self):
        with SessionReader(self.path()) as reader:
            if self.chance.random() < 0.2:
                check(reader)
            tokens, (n, run) = reader.info.record.tokens, self.more()
            n_kept = self.chance.randint(0, min(len(tokens) - 1, MAX_CELLS))
            longer, sections = grown(tokens[: n_kept + 1], n, run)
            create_session(
                self.path(),
                record_of(longer, f"{run}"),
                sections,
                source=reader,
                keep=truncate_sections(reader.info.sections, n_kept),
                overwrite=self.chance.random() < 0.5,
            )

    def resume(self):
        with SessionReader(self.path()) as reader:
            check(reader)

    def verify(self):
        report = verify_session(self.path())
        assert report.is_sound, report

    def pin(self):
        pinned = self.chance.random() < 0.5
        change_lineage(self.path(), lambda lineage: replace(lineage, pinned=pinned, note=f"{self.chance.random()}"))

    def remove(self):
        self.store.remove(self.chance.choice(NAMES))

    def prune(self):
        names = self.store.names()
        self.store.remove(*self.chance.sample(names, min(3, len(names))))

    def move(self):
        path, target = self.chance.sample(NAMES, 2)
        overwrite = self.chance.random() < 0.3
        move_session(self.root / f"{path}.bin", self.root / f"{target}.bin", name=target, overwrite=overwrite)

    def gc(self):
        assert self.store.collect() is not None, "a session could not be read"

    def work(self, log):
        operations = [self.save, self.extend, self.fork, self.resume, self.verify, self.pin, self.remove, self.gc]
        operations += [self.move, self.save, self.extend, self.extend, self.fork, self.resume, self.prune]
        while True:
            operation = self.chance.choice(operations)
            how = "done"
            try:
                operation()
            except ALLOWED as error:
                how = error.code
            os.write(log, f"{operation.__name__} {how}\n".encode())


def start(root, folder, seed):
    """Fork a worker; return its process id."""
    child = os.fork()
    if child:
        return child
    status = 1
    try:
        log = os.open(folder / "log", os.O_WRONLY | os.O_APPEND | os.O_CREAT, 0o600)
        Worker(root, seed).work(log)
    except BaseException:
        with open(folder / f"failed-{os.getpid()}", "w") as file:
            traceback.print_exc(file=file)
    finally:
        os._exit(status)


def main(root, seconds, seed):
    """Run, and return what happened."""
    chance = random.Random(seed)
    folder = root.parent / "kills"
    folder.mkdir()
    planes.allocate(1)  # imported once for all
    children = [start(root, folder, chance.random()) for _ in range(N_PROCESSES)]
    n_killed = 0
    end_s = time.monotonic() + seconds
    while time.monotonic() < end_s:
        time.sleep(chance.uniform(0.0, 0.1))
        child = children.pop(chance.randrange(len(children)))
        os.kill(child, signal.SIGKILL)
        n_killed += os.waitpid(child, 0)[1] == signal.SIGKILL
        children.append(start(root, folder, chance.random()))
    for child in children:
        os.kill(child, signal.SIGKILL)
        os.waitpid(child, 0)
    counts = Counter((folder / "log").read_text().splitlines())
    return {
        "counts": dict(sorted(counts.items())),
        "killed": n_killed,
        "failed": [path.read_text() for path in folder.glob("failed-*")],
    }


if __name__ == "__main__":
    print(json.dumps(main(Path(sys.argv[1]), float(sys.argv[2]), int(sys.argv[3]))))

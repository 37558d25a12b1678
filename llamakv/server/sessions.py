"""What can be done with the conversations that are kept. All of it takes its time: it is for threads, not the loop."""

from __future__ import annotations

import itertools
import time
from collections.abc import Callable, Sequence
from dataclasses import asdict

from llamakv.engine.contract import Scheduler
from llamakv.engine.prefix import n_common
from llamakv.errors import ExistsError, LockedError, NoRoomError, NotFoundError
from llamakv.ops.copying import Within, copy_session
from llamakv.ops.inspect import report_of
from llamakv.server.contract import SessionLine
from llamakv.server.conversations import Conversation, Conversations
from llamakv.server.engine_thread import EngineThread
from llamakv.server.folders import Folders, changed_s, path_of
from llamakv.server.jobs import Job
from llamakv.server.loader import Loader
from llamakv.server.saver import Saver
from llamakv.server.sizes import Room, n_to_pin
from llamakv.store.session_file import read_session
from llamakv.store.session_store import check_name


class Sessions:
    """Lists, saves, forks, pins and deletes them. ``under_way`` gives what is being answered in a space, with names;
    ``prefix_share`` of the room may be pinned."""

    def __init__(
        self,
        scheduler: Scheduler,
        engine: EngineThread,
        saver: Saver,
        loader: Loader,
        conversations: Conversations,
        folders: Folders,
        room: Room,
        *,
        prefix_share: float,
        within: Within,
        under_way: Callable[[str], list[tuple[Job, str]]],
    ) -> None:
        self._scheduler = scheduler
        self._engine = engine
        self._saver = saver
        self._loader = loader
        self._conversations = conversations
        self._folders = folders
        self._room = room
        self._prefix_share = prefix_share
        self._within = within
        self._under_way = under_way

    def pinned(self) -> list[Conversation]:
        """Those that stay in memory whatever comes."""
        return [one for one in self._conversations.live() if one.is_pinned]

    def lines(self, space: str) -> list[SessionLine]:
        """All of a space, the one used last first."""
        self._loader.scan(space)
        conversations = self._conversations
        with conversations.lock:
            known = conversations.of(space)
            active = set(conversations.actives(space))
        shared = shared_cells([one for one in known if one.run is not None])
        lines = [line_of(one, n_shared=shared.get(one, 0), is_active=one.name in active) for one in known]
        lines += self._lines_under_way(space, {one.name for one in known})
        return sorted(lines, key=lambda line: line.used_s, reverse=True)

    def _lines_under_way(self, space: str, known: set[str]) -> list[SessionLine]:
        now_s = time.time()
        return [
            SessionLine(
                name=name,
                n_tokens=len(job.run.tokens) if job.run is not None else len(job.request.tokens),
                n_turns=0,
                n_cells_live=0 if job.is_waiting or job.run is None else len(job.run.tokens) - 1,
                n_cells_shared=0 if job.run is None else job.run.n_reused,
                is_saved=False,
                is_pinned=False,
                is_active=True,
                used_s=now_s,
                stored_bytes=0,
                first_text="",
            )
            for job, name in self._under_way(space)
            if name not in known
        ]

    def _line(self, one: Conversation) -> SessionLine:
        shared = shared_cells(self._conversations.live(one.space))
        is_active = self._conversations.is_active(one.space, one.name)
        return line_of(one, n_shared=shared.get(one, 0), is_active=is_active)

    def _find(self, name: str, space: str) -> Conversation:
        one = self._conversations.get(space, name)
        if one is None:
            self._loader.scan(space)
            one = self._conversations.get(space, name)
        if one is None:
            if self._conversations.is_active(space, name):
                raise LockedError(f"session '{name}' is being written for the first time")
            raise NotFoundError(f"no session is called '{name}'")
        return one

    def save(self, name: str, new_name: str | None, space: str) -> SessionLine:
        """Have one in the store, under its name or as a copy. Raises: as ``Service.save``."""
        one = self._find(name, space)
        if new_name is None or new_name == name:
            self._saver.call(lambda: self._saver.save(one)).result()
            return self._line(one)
        return self._line(self._copy(one, new_name, None))

    def fork(self, name: str, new_name: str, space: str, at: str | None) -> SessionLine:
        """One that begins as another. Raises: as ``Service.fork``."""
        return self._line(self._copy(self._find(name, space), new_name, at))

    def _copy(self, one: Conversation, new_name: str, at: str | None) -> Conversation:
        """Raises: as ``fork`` of the contract."""
        check_name(new_name)
        root = self._folders.of(one.space)
        if root is None:
            raise NotFoundError(
                "sessions are forked in the store, and the server has none", hint="leave --no-store out"
            )
        if self._conversations.get(one.space, new_name) is not None or not self._conversations.begin(
            one.space, new_name
        ):
            raise ExistsError(f"a session is called '{new_name}' already", hint="choose another name")

        def copy() -> Conversation:
            if not one.is_saved:
                self._saver.save(one)
            target = path_of(root, new_name)
            info = copy_session(path_of(root, one.name), target, at=at, name=new_name, within=self._within).info
            made = self._loader.stub(info, one.space, name=new_name, changed_s=changed_s(target))
            made.messages = ()
            self._conversations.add(made)
            return made

        try:
            return self._saver.call(copy).result()
        finally:
            self._conversations.end(one.space, new_name)

    def resume(self, name: str, space: str) -> SessionLine:
        """Bring one into memory. Raises: as ``Service.resume``."""
        return self._line(self._resume(name, space))

    def _resume(self, name: str, space: str) -> Conversation:
        check_name(name)
        if space not in self._loader.has_scanned:
            self._loader.scan(space)
        return self._loader.bring_session(space, name)

    def pin(self, name: str, space: str, *, pinned: bool) -> SessionLine:
        """Keep its cells whatever comes, or no longer. Raises: as ``Service.pin``."""
        return self._line(self._pin(name, space, pinned=pinned))

    def _pin(self, name: str, space: str, *, pinned: bool) -> Conversation:
        one = self._resume(name, space) if pinned else self._find(name, space)
        if not pinned:
            with self._conversations.lock:
                one.is_pinned = False
                if one.run is not None:
                    self._scheduler.pin(one.run, is_pinned=False)
            return one
        with self._conversations.lock:
            others = [other for other in self.pinned() if other is not one]
            n_cells = sum(other.n_tokens - 1 for other in others) + one.n_tokens - 1
            n_cells_max = self._scheduler.counts.n_cells_max
            most = n_to_pin(n_cells_max, self._prefix_share)
            n_most = max(n_to_pin(self._room.n_pinned, self._prefix_share), 1)
            if n_cells > most or len(others) + 1 > n_most:
                wanted = f"{len(others) + 1} pinned sessions would take {n_cells} cells"
                if space:  # what other keys have is not told
                    wanted = f"{one.n_tokens - 1} cells more cannot be pinned beside those that are"
                raise NoRoomError(
                    f"{wanted}; {most} of {n_cells_max} cells and {n_most} sequences may be pinned",
                    hint="unpin another one, or start the server with a larger --prefix-share or --cells",
                )
            run = one.run
            if run is not None:
                self._scheduler.pin(run, is_pinned=True)  # first: now they go no more
            if run is None or not self._scheduler.has_cells(run):
                raise NoRoomError(f"the cells of session '{name}' were given to others just now", hint="try again")
            one.is_pinned = True
        return one

    def delete(self, name: str, space: str) -> None:
        """Forget one, in memory and in the store. Raises: as ``Service.delete``."""
        one = self._find(name, space)
        if not self._conversations.begin(space, name):
            raise LockedError(f"session '{name}' is being written")
        try:

            def delete() -> None:
                self._saver.remove(one)
                with self._conversations.lock:
                    self._conversations.remove(one)
                    run, one.run, one.is_gone = one.run, None, True
                if run is not None:
                    self._scheduler.release(run)

            self._saver.call(delete).result()
        finally:
            self._conversations.end(space, name)
        self._engine.call(lambda: None).result()  # so that counts are told as they are now

    def inspect(self, name: str, space: str) -> dict[str, object]:
        """All about one. Raises: as ``Service.inspect``."""
        one = self._find(name, space)
        found: dict[str, object] = {"name": name, "line": asdict(self._line(one))}
        root = self._folders.of(space)
        with self._conversations.lock:
            messages = one.messages
        if root is not None and one.is_saved:
            report = report_of(read_session(path_of(root, one.name)))
            record = report.info.record
            messages = messages or report.messages
            found |= {
                "id": record.lineage.session_id,
                "kind": record.kind.value,
                "tokens": report.tokens,
                "cells": report.cells,
                "turns": report.turns,
                "raw_bytes": report.raw_bytes,
                "stored_bytes": report.stored_bytes,
                "sections": len(report.info.sections),
                "n_saves": record.lineage.n_saves,
                "created_s": record.lineage.created_s,
                "updated_s": record.lineage.updated_s,
                "parent_id": record.lineage.parent_id,
                "identity": asdict(record.identity),
                "settings": asdict(record.settings),
                "sampling": asdict(record.sampling),
                "text": record.text,
            }
        found["messages"] = [asdict(message) for message in messages]
        return found


def shared_cells(live: Sequence[Conversation]) -> dict[Conversation, int]:
    """How many cells each conversation in memory has that another of them has too."""
    shared = dict.fromkeys(live, 0)
    ordered = sorted(live, key=lambda one: one.tokens)
    for one, other in itertools.pairwise(ordered):
        n = n_common(one.tokens[:-1], other.tokens[:-1])
        shared[one], shared[other] = max(shared[one], n), max(shared[other], n)
    return shared


def n_distinct_cells(live: Sequence[Conversation]) -> int:
    """How many cells conversations in memory have, shared ones counted once."""
    ordered = sorted(one.tokens[:-1] for one in live)
    n_shared = sum(n_common(one, other) for one, other in itertools.pairwise(ordered))
    return sum(map(len, ordered)) - n_shared


def line_of(one: Conversation, *, n_shared: int, is_active: bool) -> SessionLine:
    """A conversation as it is told."""
    return SessionLine(
        name=one.name,
        n_tokens=one.n_tokens,
        n_turns=one.n_turns,
        n_cells_live=one.n_tokens - 1 if one.run is not None else 0,
        n_cells_shared=n_shared,
        is_saved=one.is_saved,
        is_pinned=one.is_pinned,
        is_active=is_active,
        used_s=one.used_s,
        stored_bytes=one.n_stored_bytes,
        first_text=one.first_text,
    )

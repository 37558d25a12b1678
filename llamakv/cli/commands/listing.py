"""``ls``: the sessions in a store, as a list or by lineage. The engine is not needed."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Sequence
from typing import TYPE_CHECKING, Annotated

import typer

from llamakv.cli import refs, requests
from llamakv.cli.commands.grouping import takes_options
from llamakv.cli.commands.options import StoreGroup
from llamakv.cli.commands.values import not_empty
from llamakv.cli.output import Json, Output, error_json, to_json

if TYPE_CHECKING:
    from llamakv.cli.render.progress import ProgressLine
    from llamakv.ops.listing import ListedSession
    from llamakv.records import MemorySettings, ModelIdentity
    from llamakv.store.summary import SessionSummary

Tree = Annotated[
    bool,
    typer.Option("--tree", metavar="",
                 help="Show each below the one it was branched off from. With --json the list is the same: see "
                      "parent_id."),
]  # fmt: skip
Tag = Annotated[
    list[str] | None,
    typer.Option("--tag", metavar="TAG", parser=not_empty, help="Only sessions with this tag; repeatable: with all."),
]

_N_SHOWN = 200
"""Files that are read in less than a moment."""


@takes_options
def ls(output: Output, store: StoreGroup, tree: Tree = False, tag: Tag = None) -> None:
    """List the sessions in the store, the newest first.

    Example: llamakv ls --tree
    """
    from llamakv.ops.listing import having_tags, list_sessions

    root = refs.existing_store(store.store)
    with _progress(output) as on_progress:
        everything = list_sessions(root, ttl_s=requests.ttl_variable(), on_progress=on_progress)
    shown = having_tags(everything, tag) if tag else everything
    if output.json:
        output.document({"store": str(root), "sessions": list(_sessions_json(shown))})
    elif not shown:
        output.note(f"no sessions in {root}" + (f" with {' and '.join(map(repr, tag))}" if tag else ""))
    else:
        from llamakv.cli import listed

        output.write_styled(listed.tree(shown, everything) if tree else listed.table(shown))


@contextlib.contextmanager
def _progress(output: Output) -> Iterator[Callable[[int, int], None]]:
    """A line that says how many sessions were read, for a store that nobody listed before."""
    lines: list[ProgressLine] = []

    def update(n_done: int, n: int) -> None:
        if n < _N_SHOWN:
            return
        if not lines:
            from llamakv.cli.render.progress import ProgressLine

            lines.append(ProgressLine(quiet=output.quiet))
        lines[0].update("survey", n_done, n)

    try:
        yield update
    finally:
        for line in lines:
            line.clear()


def _sessions_json(sessions: Sequence[ListedSession]) -> Iterator[Json]:
    models: dict[ModelIdentity | MemorySettings, Json] = {}  # most sessions have the same

    def model_json(part: ModelIdentity | MemorySettings) -> Json:
        if part not in models:
            models[part] = to_json(part)
        return models[part]

    for session in sessions:
        common: dict[str, Json] = {
            "name": session.name,
            "path": str(session.path),
            "file_bytes": session.n_bytes if session.summary is None else session.summary.file_bytes,
            "error": None if session.error is None else error_json(session.error),
        }
        if session.summary is not None:
            common |= _summary_json(session, session.summary)
            common["identity"] = model_json(session.summary.identity)
            common["settings"] = model_json(session.summary.settings)
        yield common


def _summary_json(session: ListedSession, summary: SessionSummary) -> dict[str, Json]:
    return {
        "id": summary.session_id,
        "parent_id": summary.parent_id,
        "parent_position": summary.parent_position,
        "kind": summary.kind.value,
        "tokens": summary.n_tokens,
        "cells": summary.n_cells,
        "turns": summary.n_turns,
        "raw_bytes": summary.raw_bytes,
        "stored_bytes": summary.stored_bytes,
        "object_bytes": summary.object_bytes,
        "n_saves": summary.n_saves,
        "created_s": to_json(summary.created_s),
        "updated_s": to_json(summary.updated_s),
        "used_s": summary.used_s,
        "expires_s": None if session.expires_s is None else to_json(session.expires_s),
        "note": summary.note,
        "tags": list(summary.tags),
        "pinned": summary.pinned,
        "ttl_s": None if summary.ttl_s is None else to_json(summary.ttl_s),
    }

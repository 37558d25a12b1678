"""``ls``, ``rm``, ``verify`` and ``compact``: keeping house among sessions. None of them needs the engine."""

from __future__ import annotations

import sys
import time
from typing import TYPE_CHECKING, Annotated

import typer

from llamakv.cli import config, describe, streams
from llamakv.cli.commands.grouping import takes_options
from llamakv.cli.commands.options import Ref, StoreGroup, complete_session
from llamakv.cli.output import Json, Output
from llamakv.errors import UsageError

if TYPE_CHECKING:
    from llamakv.cli import render
    from llamakv.ops.sessions import ListedSession

Refs = Annotated[
    list[str],
    typer.Argument(metavar="REF...", autocompletion=complete_session, show_default=False,
                   help="Sessions: names in the store, or paths to session files."),
]  # fmt: skip
Yes = Annotated[bool, typer.Option("--yes", "-y", metavar="", help="Do not ask.")]


@takes_options
def ls(output: Output, store: StoreGroup) -> None:
    """List the sessions in the store, the newest first.

    Example: llamakv ls
    """
    from llamakv.ops.sessions import list_sessions

    root = config.store_dir(store.store)
    found = list_sessions(root)
    if output.json:
        output.document({"store": str(root), "sessions": [_listed_json(session) for session in found]})
        return
    if not found:
        output.note(f"no sessions in {root}")
        return
    from llamakv.cli import render

    now_s = time.time()
    rows = [_row(session, now_s) for session in found]
    headings = ("NAME", "TOKENS", "TURNS", "SIZE", "SAVED", "MODEL")
    output.write_styled(render.table(headings, rows, right=(1, 2, 3)))


def _row(session: ListedSession, now_s: float) -> tuple[render.Cell, ...]:
    from llamakv.cli import render
    from llamakv.ops.inspect import report_of

    size = render.size(session.n_bytes)
    if session.info is None:
        reason = session.error.message if session.error is not None else "unreadable"
        return (session.name, "", "", size, render.alarm("damaged"), render.dim(reason))
    record = session.info.record
    return (
        session.name,
        f"{len(record.tokens):,}",
        f"{report_of(session.info).turns:,}" if record.chat else "raw",
        size,
        render.age(record.lineage.updated_s, now_s),
        describe.model_name(record.identity),
    )


def _listed_json(session: ListedSession) -> Json:
    from llamakv.cli.output import error_json

    common: dict[str, Json] = {
        "name": session.name,
        "path": str(session.path),
        "file_bytes": session.n_bytes,
        "error": None if session.error is None else error_json(session.error),
    }
    if session.info is None:
        return common
    return {**common, **describe.summary_json(session.info)}


@takes_options
def rm(output: Output, refs: Refs, store: StoreGroup, yes: Yes = False) -> None:
    """Remove sessions.

    Example: llamakv rm -y notes draft.bin
    """
    from llamakv.cli import refs as references
    from llamakv.ops.sessions import remove_sessions

    root = config.store_dir(store.store)
    found = [references.existing(root, ref) for ref in refs]
    if not yes:
        names = ", ".join(references.shown(session) for session in found)
        if output.json or not streams.is_terminal(sys.stdin):
            raise UsageError("removing needs -y where nobody can be asked", hint=f"llamakv rm -y {' '.join(refs)}")
        if not output.ask(f"remove {names}?"):
            output.note("nothing removed")
            raise typer.Exit(1)
    removed = remove_sessions(root, tuple(refs))
    output.document({"removed": [str(path) for path in removed]})
    if not output.json:
        for session in found:
            output.note(f"removed {references.shown(session)}")


@takes_options
def verify(output: Output, ref: Ref, store: StoreGroup) -> None:
    """Read all of a session and check every digest.

    Example: llamakv verify session.bin
    """
    from llamakv.cli import refs as references
    from llamakv.cli import render
    from llamakv.cli.reporting import running
    from llamakv.ops import sessions

    found = references.existing(config.store_dir(store.store), ref)
    with running(output):
        info = sessions.verify(found.path)
    output.interrupts.check()
    data = describe.summary_json(info)
    output.document({"path": str(found.path), **data})
    if not output.json:
        n_raw = render.size(info.n_raw_bytes)
        output.write(
            f"{references.shown(found)} is whole: {render.count(len(info.record.tokens), 'token')}, "
            f"{render.count(len(info.sections), 'section')}, {n_raw} of state\n"
        )


@takes_options
def compact(output: Output, ref: Ref, store: StoreGroup) -> None:
    """Rewrite a session file without what it no longer uses.

    Example: llamakv compact session.bin
    """
    from llamakv.cli import refs as references
    from llamakv.cli import render
    from llamakv.cli.reporting import running
    from llamakv.ops import sessions

    found = references.existing(config.store_dir(store.store), ref)
    n_before = found.path.stat().st_size
    with running(output):
        sessions.compact(found.path)
    n_after = found.path.stat().st_size
    output.document({"path": str(found.path), "bytes_before": n_before, "bytes_after": n_after})
    if not output.json:
        output.write(f"{references.shown(found)}: {render.size(n_before)} before, {render.size(n_after)} now\n")

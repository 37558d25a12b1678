"""``rm`` and ``compact``: keeping house among sessions. None of them needs the engine."""

from __future__ import annotations

import sys
from typing import Annotated

import typer

from llamakv.cli import config, streams
from llamakv.cli.commands.grouping import takes_options
from llamakv.cli.commands.options import Ref, StoreGroup, complete_session
from llamakv.cli.output import Output
from llamakv.errors import UsageError

Refs = Annotated[
    list[str],
    typer.Argument(metavar="REF...", autocompletion=complete_session, show_default=False,
                   help="Sessions: names in the store, or paths to session files."),
]  # fmt: skip
Yes = Annotated[bool, typer.Option("--yes", "-y", metavar="", help="Do not ask.")]


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

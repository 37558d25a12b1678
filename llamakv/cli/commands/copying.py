"""``mv``, ``cp``, ``export`` and ``import``: sessions in other places. None of them needs the engine."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from llamakv.cli import config, describe, requests, streams
from llamakv.cli.commands.grouping import takes_options
from llamakv.cli.commands.options import BudgetGroup, Force, Ref, StoreGroup, complete_session
from llamakv.cli.output import Json, Output
from llamakv.errors import UsageError

if TYPE_CHECKING:
    from llamakv.cli.refs import Target
    from llamakv.ops.copying import Within
    from llamakv.store.session_file import SessionInfo

_N_PIECE = 1 << 20

PlacedRef = Annotated[
    str,
    typer.Argument(metavar="REF", autocompletion=complete_session, show_default=False,
                   help="Session: a name in the store, or a path; REF@turn2 is only its beginning."),
]  # fmt: skip
NewRef = Annotated[
    str,
    typer.Argument(metavar="NEW", show_default=False, help="Where to: a name in the store, or a path. It must be new."),
]
OutFile = Annotated[
    Path,
    typer.Argument(metavar="FILE", show_default=False, help="File to write; - is standard output. It must be new."),
]
InFile = Annotated[
    Path,
    typer.Argument(metavar="FILE", show_default=False, help="Session file to take in; - is standard input."),
]
Name = Annotated[
    str | None,
    typer.Argument(metavar="[NAME]", show_default=False,
                   help="Name in the store (default: the one it had, or the file's)."),
]  # fmt: skip


@takes_options
def mv(output: Output, ref: Ref, new: NewRef, store: StoreGroup, force: Force = False) -> None:
    """Give a session another name or place.

    Example: llamakv mv plan holiday
    """
    from llamakv.cli import refs
    from llamakv.ops.copying import move_session

    root = config.store_dir(store.store)
    found, target = refs.existing(root, ref), refs.target(root, new)
    within = _within(output, BudgetGroup())
    info = move_session(found.path, target.path, name=target.name, overwrite=force, within=within)
    output.document({"from": str(found.path), **_made_json(target, info)})
    if not output.json:
        output.note(f"moved {refs.shown(found)} to {refs.shown(target)}")


@takes_options
def cp(
    output: Output, ref: PlacedRef, new: NewRef, store: StoreGroup, budget: BudgetGroup, force: Force = False
) -> None:
    """Make a session that begins as another one does, whole or up to a place; in the store both share what is stored.

    Example: llamakv cp plan@turn2 plan-rain
    """
    from llamakv.cli import refs, render
    from llamakv.ops.copying import copy_session

    root = config.store_dir(store.store)
    found, at = refs.existing_at(root, ref)
    target = refs.fresh(root, new, overwrite=force, hint="add --force to replace it")
    within = _within(output, budget)
    copied = copy_session(found.path, target.path, at=at, name=target.name, overwrite=force, within=within)
    info = copied.info
    output.document({"from": str(found.path), "at": at, "to_read": copied.n_to_read, **_made_json(target, info)})
    if output.json:
        return
    tokens = render.count(len(info.record.tokens), "token")
    output.note(
        f"copied {refs.shown(found, at)} to {refs.shown(target)}: {tokens}, {render.size(info.n_written)} written"
    )
    if copied.n_to_read:
        output.notice(
            f"this model's memory cannot be cut there: {render.count(copied.n_to_read, 'token')} will be read again "
            f"when {refs.shown(target)} is resumed"
        )


@takes_options
def export(output: Output, ref: PlacedRef, file: OutFile, store: StoreGroup, force: Force = False) -> None:
    """Write a session as a file of its own, to keep elsewhere or to give away.

    Example: llamakv export plan plan.bin
    """
    from llamakv.cli import refs, render
    from llamakv.ops.copying import export_session, exported

    found, at = refs.existing_at(config.store_dir(store.store), ref)
    if str(file) == "-":
        if output.json:
            raise UsageError("standard output cannot take both a session and JSON", hint=f"llamakv export {ref} FILE")
        if streams.is_terminal(sys.stdout):
            raise UsageError(
                "a session is not written to a terminal", hint=f"llamakv export {ref} - | ssh host llamakv import -"
            )
        with exported(found.path, at=at) as (info, pieces):
            output.write_bytes(pieces)
        output.note(f"exported {refs.shown(found, at)}: {render.size(info.n_raw_bytes)} of state")
        return
    info = export_session(found.path, file, at=at, overwrite=force)
    output.document(
        {
            "session": refs.shown(found),
            "path": str(found.path),
            "at": at,
            "file": str(file),
            "file_bytes": info.n_file_bytes,
            **describe.summary_json(info),
        }
    )
    if not output.json:
        output.note(f"exported {refs.shown(found, at)} to {file}: {render.size(info.n_file_bytes)}")


@takes_options
def import_(
    output: Output, file: InFile, store: StoreGroup, budget: BudgetGroup, name: Name = None, force: Force = False
) -> None:
    """Take a session file into the store; what the store has of it already is shared.

    Example: llamakv import plan.bin
    """
    from llamakv.cli import refs, render
    from llamakv.ops.copying import import_bytes, import_session

    root = config.store_dir(store.store)
    wanted = None if name is None else requests.argument(name)
    if str(file) == "-":
        if streams.is_terminal(sys.stdin):
            raise UsageError("standard input is a terminal, not a session", hint="llamakv import FILE")
        info = import_bytes(_stdin(), root, name=wanted, overwrite=force, within=_within(output, budget))
    else:
        info = import_session(file, root, name=wanted, overwrite=force, within=_within(output, budget))
    target = refs.Target(ref=info.path.stem, path=info.path, name=info.record.lineage.name)
    output.document({"file": str(file), "written_bytes": info.n_written, **_made_json(target, info)})
    if not output.json:
        tokens = render.count(len(info.record.tokens), "token")
        output.note(f"imported {refs.shown(target)}: {tokens}, {render.size(info.n_written)} written")


def _stdin() -> Iterator[bytes]:
    while piece := sys.stdin.buffer.read(_N_PIECE):
        yield piece


def _within(output: Output, budget: BudgetGroup) -> Within:
    from llamakv.ops.copying import Within
    from llamakv.ops.requests import Reporter

    return Within(budget=requests.budget(budget), reporter=Reporter(notice=output.notice, warning=output.warning))


def _made_json(target: Target, info: SessionInfo) -> dict[str, Json]:
    from llamakv.cli import refs

    return {
        "session": refs.shown(target),
        "path": str(target.path),
        "name": info.record.lineage.name,
        "parent_id": info.record.lineage.parent_id,
        "parent_position": info.record.lineage.parent_position,
        **describe.summary_json(info),
    }

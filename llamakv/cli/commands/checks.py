"""``verify`` and ``repair``: finding damage, and keeping what is sound. None of them needs the engine."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from shlex import quote
from typing import TYPE_CHECKING, Annotated

import typer

from llamakv.cli import config, describe
from llamakv.cli.commands.grouping import takes_options
from llamakv.cli.commands.options import StoreGroup, complete_session
from llamakv.cli.output import Json, Output, error_json
from llamakv.errors import DamagedError, LlamakvError

if TYPE_CHECKING:
    from llamakv.cli import render
    from llamakv.cli.refs import Target
    from llamakv.ops.checking import CheckedSession, StoreCheck
    from llamakv.ops.repair import RepairedSession, RepairReport
    from llamakv.store.checking import CheckedObject
    from llamakv.store.session_file import SessionInfo

PARTLY_DONE = 3
MOST_ROWS = 20

OptionalRefs = Annotated[
    list[str] | None,
    typer.Argument(metavar="[REF]...", autocompletion=complete_session, show_default=False,
                   help="Sessions: names in the store, or paths to session files. None: the whole store."),
]  # fmt: skip
Fast = Annotated[
    bool,
    typer.Option("--fast", metavar="", help="Check that all is there and of the right length, but no digests."),
]
DryRun = Annotated[bool, typer.Option("--dry-run", metavar="", help="Say what would be done, and change nothing.")]


# ---------------------------------------------------------------- verify


@takes_options
def verify(output: Output, store: StoreGroup, refs: OptionalRefs = None, fast: Fast = False) -> None:
    """Read all of some sessions, or of the whole store, and check every digest.

    Example: llamakv verify session.bin
    """
    from llamakv.cli import refs as references
    from llamakv.cli.reporting import running
    from llamakv.ops.checking import verify_sessions, verify_store

    root = references.existing_store(store.store)
    found = [references.existing(root, ref) for ref in refs or ()]
    with running(output) as reporter:
        if found:
            sessions = verify_sessions([target.path for target in found], reporter, fast=fast)
        else:
            check = verify_store(root, reporter, fast=fast)
    if found:
        _tell_sessions(output, found, sessions, fast=fast)
    else:
        _tell_store(output, check)


def _tell_sessions(output: Output, found: Sequence[Target], sessions: Sequence[CheckedSession], *, fast: bool) -> None:
    errors = [error for session in sessions if (error := _error_of(session)) is not None]
    if output.json:
        details: list[Json] = [_session_json(session) for session in sessions]
        only = describe.summary_json(sessions[0].info) if len(sessions) == 1 and sessions[0].info is not None else {}
        data = {"path": str(sessions[0].path), **only} if len(sessions) == 1 else {}
        output.document(
            {**data, "fast": fast, "sessions": details},
            status="error" if errors else "ok",
            errors=[error_json(error) for error in errors],
        )
    else:
        for target, session in zip(found, sessions, strict=True):
            if session.is_sound:
                output.write(_sound_text(target, session, fast=fast) + "\n")
        for error in errors:
            output.show(error)
    if errors:
        raise typer.Exit(max(error.exit_status for error in errors))


def _sound_text(target: Target, session: CheckedSession, *, fast: bool) -> str:
    from llamakv.cli import refs, render

    assert session.info is not None
    assert session.rest is not None
    info, n_tokens, n_cells = session.info, len(session.info.record.tokens), session.rest.n_cells
    what = "has all its parts" if fast else "is whole"
    sections = render.count(len(info.sections), "section")
    if n_cells < n_tokens - 1:
        return (
            f"{refs.shown(target)} {what}, but some of its state was lost before: {n_cells:,} of {n_tokens:,} tokens "
            f"have it, in {sections}; the next resume reads the others again"
        )
    parts = [render.count(n_tokens, "token"), sections]
    return f"{refs.shown(target)} {what}: {', '.join(parts)}, {render.size(info.n_raw_bytes)} of state"


def _error_of(session: CheckedSession) -> LlamakvError | None:
    """What is wrong with a session, as an error with the next step."""
    if session.error is not None:
        if isinstance(session.error, DamagedError):
            session.error.hint = session.error.hint or f"llamakv repair {quote(str(session.path))} keeps what it can"
        return session.error
    if not session.bad or session.info is None or session.rest is None:
        return None
    first = min(session.bad, key=lambda found: found.section.p0)
    n_tokens = len(session.info.record.tokens)
    return DamagedError(
        f"{session.path} is damaged: {len(session.bad)} of {len(session.info.sections)} sections, the first at "
        f"positions {first.section.p0} to {first.section.p1}: {first.reason}",
        hint=f"llamakv repair {quote(str(session.path))} keeps its {n_tokens:,} tokens and the state of the first "
        f"{session.rest.n_cells:,}",
        path=str(session.path),
    )


def _session_json(session: CheckedSession) -> dict[str, Json]:
    info, rest = session.info, session.rest
    return {
        "name": session.name,
        "path": str(session.path),
        "sound": session.is_sound,
        "tokens": None if info is None else len(info.record.tokens),
        "usable_cells": None if rest is None else rest.n_cells,
        "sections": None if info is None else len(info.sections),
        "error": None if session.error is None else error_json(session.error),
        "damage": [
            {
                "kind": found.section.kind.value,
                "p0": found.section.p0,
                "p1": found.section.p1,
                "digest": found.section.digest,
                "trouble": found.trouble.value,
                "reason": found.reason,
            }
            for found in session.bad
        ],
    }


def _tell_store(output: Output, check: StoreCheck) -> None:
    from llamakv.cli import render

    n_wrong = check.n_wrong
    error = DamagedError(
        f"{render.count(n_wrong, 'thing is', 'things are')} wrong in the store '{check.root}'",
        hint=f"{_again('repair', check.root)} keeps all that is sound",
        path=str(check.root),
    )
    if output.json:
        errors = [error_json(error)] if n_wrong else []
        output.document(_store_json(check), status="error" if n_wrong else "ok", errors=errors)
    else:
        _write_store(output, check)
        if n_wrong:
            output.show(error)
    if n_wrong:
        raise typer.Exit(error.exit_status)


def _again(command: str, root: Path) -> str:
    """A command about a store, as the user has to type it."""
    return f"llamakv {command}" if root == config.store_dir(None) else f"llamakv {command} --store {quote(str(root))}"


def _write_store(output: Output, check: StoreCheck) -> None:
    from llamakv.cli import render

    if check.n_wrong:
        output.write_styled(_first_rows(("WRONG", "WHAT", "HITS"), _wrong_rows(check)))
        hit = [(session, session.info) for session in check.sessions if session.bad and session.info is not None]
        if hit:
            rows = [_usable_row(session, info) for session, info in hit]
            output.write_styled("\n" + _first_rows(("SESSION", "TOKENS", "STATE THAT CAN BE USED"), rows, right=(1,)))
    elif not check.sessions and not check.n_objects:
        output.note(f"no sessions in {check.root}")
    elif not output.quiet:
        what = "has all its parts" if check.is_fast else "is whole"
        parts = [render.count(len(check.sessions), "session"), render.count(check.n_objects, "section")]
        parts += [] if check.is_fast else [f"{render.size(check.n_bytes)} read"]
        output.write(f"{check.root} {what}: {', '.join(parts)}\n")
    if check.n_orphans:
        what = render.count(check.n_orphans, "section")
        again = _again("gc", check.root)
        output.note(f"{what} of no session: {render.size(check.n_orphan_bytes)}, which {again} removes")


def _first_rows(headings: Sequence[str], rows: Sequence[Sequence[render.Cell]], *, right: Sequence[int] = ()) -> str:
    from llamakv.cli import render

    table = render.table(headings, rows[:MOST_ROWS], right=right)
    n_more = len(rows) - MOST_ROWS
    return table + (render.heading(f"and {n_more:,} more (--json has all)") if n_more > 0 else "")


def _wrong_rows(check: StoreCheck) -> list[tuple[render.Cell, ...]]:
    from llamakv.cli import render
    from llamakv.ops.checking import trouble_of
    from llamakv.ops.sizes import listed

    rows: list[tuple[render.Cell, ...]] = []
    if check.error is not None:
        rows.append((render.alarm("damaged"), ".store, the budget", ""))
    for session in check.sessions:
        if session.error is not None:
            rows.append((render.alarm(trouble_of(session.error).value), f"session {session.name}", session.name))
    for found in check.bad_objects:
        rows.append((_trouble(found), f"section {found.digest[:16]}", listed(check.users[found.digest])))
    for session in check.sessions:
        for bad in session.bad:
            if not bad.section.in_store:
                where = f"{bad.section.kind} [{bad.section.p0}, {bad.section.p1})"
                rows.append((render.alarm(bad.trouble.value), f"{where} in its own file", session.name))
    return rows


def _trouble(found: CheckedObject) -> render.Cell:
    from llamakv.cli import render

    return render.alarm(found.trouble.value if found.trouble is not None else "")


def _usable_row(session: CheckedSession, info: SessionInfo) -> tuple[render.Cell, ...]:
    n_cells = 0 if session.rest is None else session.rest.n_cells
    n_tokens = len(info.record.tokens)
    return session.name, f"{n_tokens:,}", f"of the first {n_cells:,} tokens" if n_cells else "none"


def _store_json(check: StoreCheck) -> Json:
    return {
        "store": str(check.root),
        "fast": check.is_fast,
        "wrong": check.n_wrong,
        "error": None if check.error is None else error_json(check.error),
        "sessions": [_session_json(session) for session in check.sessions],
        "objects": check.n_objects,
        "read_bytes": check.n_bytes,
        "bad_objects": [
            {
                "digest": found.digest,
                "trouble": None if found.trouble is None else found.trouble.value,
                "reason": found.reason,
                "sessions": list(check.users[found.digest]),
            }
            for found in check.bad_objects
        ],
        "orphaned_objects": check.n_orphans,
        "orphaned_bytes": check.n_orphan_bytes,
    }


# ---------------------------------------------------------------- repair


@takes_options
def repair(output: Output, store: StoreGroup, refs: OptionalRefs = None, dry_run: DryRun = False) -> None:
    """Leave out what is damaged in some sessions, or in the whole store, and keep the rest usable.

    Example: llamakv repair --dry-run
    """
    from llamakv.cli import refs as references
    from llamakv.cli.reporting import running
    from llamakv.ops.repair import repair_sessions, repair_store

    root = references.existing_store(store.store)
    found = [references.existing(root, ref) for ref in refs or ()]
    with running(output) as reporter:
        if found:
            report = repair_sessions([target.path for target in found], reporter, is_dry_run=dry_run)
        else:
            report = repair_store(root, reporter, is_dry_run=dry_run)
    status = _repair_status(report)
    output.document(_repair_json(report), status="ok" if status == 0 else "partial")
    if not output.json:
        shown = [references.shown(target) for target in found] or [session.name for session in report.sessions]
        _write_repaired(output, report, shown)
        if not found and not report.sessions:
            output.note(f"no sessions in {root}")
    if status:
        raise typer.Exit(status)


def _repair_status(report: RepairReport) -> int:
    """13 where something is still damaged, 3 where only sessions that are being written were left out."""
    if report.is_sound:
        return 0
    left = {session.outcome.value for session in report.sessions if not session.outcome.is_right}
    return PARTLY_DONE if left == {"locked"} and not report.is_dry_run else DamagedError.exit_status


def _write_repaired(output: Output, report: RepairReport, shown: Sequence[str]) -> None:
    from llamakv.cli import render

    named = list(zip(shown, report.sessions, strict=True))
    rows = [_repaired_row(name, session) for name, session in named if session.outcome.value != "sound"]
    if rows:
        output.write_styled(render.table(("SESSION", "TOKENS", "KEPT", "TO READ", "WRONG"), rows, right=(1, 2, 3)))
    if not output.quiet or rows:
        for line in _repaired_lines(report):
            output.write(f"{line}\n")
    for name, session in named:
        if not session.outcome.is_right:
            output.warning(f"{name} was left alone: {session.reason}")
    if report.n_objects_left:
        what = render.count(report.n_objects_left, "damaged section")
        output.warning(f"{what} of other sessions, too: llamakv repair without a REF repairs them")


def _repaired_row(name: str, session: RepairedSession) -> tuple[render.Cell, ...]:
    from llamakv.cli import render

    amounts = ("", "", "")
    if session.n_tokens:
        amounts = (f"{session.n_tokens:,}", f"{session.n_cells:,}", f"{session.n_to_read:,}")
    if not session.outcome.is_right:
        return (name, *amounts, render.alarm(f"left alone: {session.wrong}"))
    return (name, *amounts, session.wrong + (f", now {session.moved_to.name}" if session.moved_to is not None else ""))


def _repaired_lines(report: RepairReport) -> list[str]:
    """What was done, or would be, a line each."""
    from llamakv.cli import render

    outcomes = [session.outcome.value for session in report.sessions]
    n_repaired, n_back, n_moved = (outcomes.count(outcome) for outcome in ("repaired", "went_back", "moved"))
    n_all = render.count(len(outcomes), "session")
    lines = []
    if n_repaired:
        lines.append(f"repair {n_repaired:,} of {n_all}: all tokens and messages are kept")
    if n_back:
        lines.append(f"go back to the save before the last in {render.count(n_back, 'session')}")
    if n_moved:
        lines.append(f"move aside {render.count(n_moved, 'file')} that cannot be read")
    if report.n_objects:
        lines.append(f"remove {render.count(report.n_objects, 'damaged section')}")
    if report.is_store_written:
        lines.append("write the store's own file again, without a budget (llamakv budget)")
    if report.n_temporaries:
        lines.append(f"remove {render.count(report.n_temporaries, 'file')} of killed writers")
    if not lines and all(outcome == "sound" for outcome in outcomes):
        return [f"nothing wrong in {n_all}"]
    return [_told(line, report) for line in lines]


def _told(line: str, report: RepairReport) -> str:
    """A line about what would be done, as one about what was done unless nothing was."""
    if report.is_dry_run:
        return f"would {line}"
    verb, _, rest = line.partition(" ")
    past = {"repair": "repaired", "go": "went", "move": "moved", "remove": "removed", "write": "wrote"}
    return f"{past[verb]} {rest}"


def _repair_json(report: RepairReport) -> Json:
    return {
        "dry_run": report.is_dry_run,
        "sound": report.is_sound,
        "sessions": [
            {
                "name": session.name,
                "path": str(session.path),
                "outcome": session.outcome.value,
                "wrong": session.wrong,
                "reason": session.reason,
                "tokens": session.n_tokens,
                "kept_cells": session.n_cells,
                "tokens_to_read": session.n_to_read,
                "moved_to": None if session.moved_to is None else str(session.moved_to),
            }
            for session in report.sessions
        ],
        "store_written": report.is_store_written,
        "objects_removed": report.n_objects,
        "objects_left": report.n_objects_left,
        "temporaries_removed": report.n_temporaries,
    }

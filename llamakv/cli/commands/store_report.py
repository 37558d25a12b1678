"""What a store holds and takes, for ``inspect --store``: as text and as JSON."""

from __future__ import annotations

import time
from pathlib import Path
from typing import TYPE_CHECKING

from llamakv.cli import config, describe, requests
from llamakv.cli.output import Json, Output, error_json
from llamakv.errors import NotFoundError

if TYPE_CHECKING:
    from llamakv.cli import render
    from llamakv.ops.store_report import SessionUse, StoreReport

MOST_ROWS = 20


def inspect_store(output: Output, root: Path) -> None:
    """Show what a store holds and takes.

    Raises:
        NotFoundError: it is not there, and is not the default one either.
    """
    from llamakv.cli.reporting import running
    from llamakv.ops.budget import limits_of
    from llamakv.ops.store_report import report_store

    if not root.is_dir() and root != config.store_dir(None):
        raise NotFoundError(f"there is no store '{root}'", hint="llamakv inspect --store", path=str(root))
    limits = limits_of(root, max_bytes=requests.max_bytes_variable(), ttl_s=requests.ttl_variable())
    with running(output) as reporter:
        report = report_store(root, reporter, limits=limits)
    if output.json:
        output.document(_report_json(report))
        return
    _write_report(output, report)


def _write_report(output: Output, report: StoreReport) -> None:
    from llamakv.cli import render

    output.write_styled(render.report(_facts(report)))
    if report.models:
        rows = [
            (describe.model_name(use.identity), f"{use.n_sessions:,}", render.size(use.n_bytes))
            for use in report.models[:MOST_ROWS]
        ]
        output.write_styled("\n" + render.table(("MODEL", "SESSIONS", "SIZE"), rows, right=(1, 2)))
    if report.sessions:
        now_s = time.time()
        listed = [_row(use, now_s) for use in report.sessions[:MOST_ROWS]]
        headings = ("SESSION", "TOKENS", "ALONE", "SHARED", "USED", "")
        output.write_styled("\n" + render.table(headings, listed, right=(1, 2, 3)))
        n_more = len(report.sessions) - MOST_ROWS
        if n_more > 0:
            output.write_styled(render.heading(f"{render.count(n_more, 'more session')}: --json lists all"))
    for session in report.survey.unreadable:
        output.warning(f"{session.name} cannot be read: {session.error.message}")


def _row(use: SessionUse, now_s: float) -> tuple[render.Cell, ...]:
    from llamakv.cli import render

    session = use.session
    notes = [*(["pinned"] if session.lineage.pinned else []), *session.lineage.tags]
    return (
        session.name,
        f"{session.n_tokens:,}",
        render.size(use.n_unique),
        render.size(use.n_shared) if use.n_shared else "",
        render.age(session.used_s, now_s),
        render.dim(", ".join(notes)),
    )


def _facts(report: StoreReport) -> list[tuple[str, str]]:
    from llamakv.cli import render

    survey = report.survey
    sessions = render.count(len(survey.sessions) + len(survey.unreadable), "session")
    if report.n_pinned:
        sessions += f" · {report.n_pinned:,} pinned"
    if survey.unreadable:
        sessions += f" · {len(survey.unreadable):,} that cannot be read (llamakv repair)"
    sections, index = render.count(len(survey.object_bytes), "section"), render.size(survey.n_index_bytes)
    rows = [
        ("store", str(survey.root)),
        ("holds", sessions),
        ("takes", f"{render.size(survey.n_bytes)} on disk: {sections}, {render.size(survey.n_object_bytes)}; "
                  f"session files, {index}"),
    ]  # fmt: skip
    if report.n_stored:
        rows += [
            ("sharing", f"{render.size(report.n_stored_apart)} in all sessions, stored once as "
                        f"{render.size(report.n_stored)} ({report.n_stored_apart / report.n_stored:.2f} : 1)"),
            ("compression", f"{render.size(report.n_raw)} of state as {render.size(report.n_stored)} "
                            f"({report.n_raw / report.n_stored:.2f} raw over stored)"),
        ]  # fmt: skip
    if report.by_use:
        oldest, newest = report.by_use[0], report.by_use[-1]
        rows += [
            ("used first", f"{render.moment(oldest.used_s)} · {oldest.name}"),
            ("used last", f"{render.moment(newest.used_s)} · {newest.name}"),
        ]
    limits = report.limits
    parts = [] if limits.max_bytes is None else [render.size(limits.max_bytes)]
    parts += [] if limits.ttl_s is None else [f"{render.span(limits.ttl_s)} unused"]
    rows.append(("budget", ", ".join(parts) or "no limit (llamakv budget)"))
    if survey.orphans:
        count = render.count(len(survey.orphans), "section")
        rows.append(("left over", f"{count} of no session, {render.size(report.n_orphan_bytes)} (llamakv gc)"))
    rows.append(("prune", f"would free {render.size(report.n_prunable)} now"))
    return rows


def _report_json(report: StoreReport) -> Json:
    survey = report.survey
    names = [session.name for session in report.by_use]
    return {
        "store": str(survey.root),
        "bytes": survey.n_bytes,
        "index_bytes": survey.n_index_bytes,
        "object_bytes": survey.n_object_bytes,
        "objects": len(survey.object_bytes),
        "stored_bytes": report.n_stored,
        "stored_apart_bytes": report.n_stored_apart,
        "raw_bytes": report.n_raw,
        "apart_over_stored": report.n_stored_apart / report.n_stored if report.n_stored else None,
        "raw_over_stored": report.n_raw / report.n_stored if report.n_stored else None,
        "pinned": report.n_pinned,
        "orphaned_objects": len(survey.orphans),
        "orphaned_bytes": report.n_orphan_bytes,
        "prunable_bytes": report.n_prunable,
        "max_bytes": report.limits.max_bytes,
        "ttl_s": report.limits.ttl_s,
        "used_first": names[0] if names else None,
        "used_last": names[-1] if names else None,
        "models": [
            {
                "name": describe.model_name(use.identity),
                "digest": use.identity.digest,
                "sessions": use.n_sessions,
                "bytes": use.n_bytes,
            }
            for use in report.models
        ],
        "sessions": [_session_json(use) for use in report.sessions],
        "unreadable": [
            {"name": session.name, "path": str(session.path), "error": error_json(session.error)}
            for session in survey.unreadable
        ],
    }


def _session_json(use: SessionUse) -> Json:
    session = use.session
    return {
        "name": session.name,
        "path": str(session.path),
        "tokens": session.n_tokens,
        "unique_bytes": use.n_unique,
        "shared_bytes": use.n_shared,
        "used_s": session.used_s,
        "pinned": session.lineage.pinned,
        "tags": list(session.lineage.tags),
        "ttl_s": session.lineage.ttl_s,
    }

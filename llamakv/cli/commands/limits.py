"""``budget``, ``prune`` and ``gc``: what a store may take, and making it take less. None of them needs the engine."""

from __future__ import annotations

import time
from collections.abc import Mapping
from typing import TYPE_CHECKING, Annotated

import typer

from llamakv.cli import config, refs, requests
from llamakv.cli.commands.grouping import takes_options
from llamakv.cli.commands.options import MaxBytes, StoreGroup
from llamakv.cli.commands.values import not_empty, size_limit, time_limit, time_span, whole
from llamakv.cli.output import Json, Output
from llamakv.errors import UsageError

if TYPE_CHECKING:
    from llamakv.cli import render
    from llamakv.ops.budget import BudgetReport
    from llamakv.ops.pruning import PruneReport
    from llamakv.store.collector import Collected
    from llamakv.store.retention import Verdict

PARTLY_DONE = 3

DryRun = Annotated[bool, typer.Option("--dry-run", metavar="", help="Say what would be done, and change nothing.")]


# ---------------------------------------------------------------- budget

NewMaxBytes = Annotated[
    float | None,
    typer.Option("--max-bytes", metavar="SIZE", parser=size_limit,
                 help="Most the store may take: 100MB, 20GiB (with i: powers of 1024), or none."),
]  # fmt: skip
NewTtl = Annotated[
    float | None,
    typer.Option("--ttl", metavar="TIME", parser=time_limit,
                 help="How long a session may stay unused: 30m, 12h, 7d, 2w, seconds, or none."),
]  # fmt: skip


@takes_options
def budget(output: Output, store: StoreGroup, max_bytes: NewMaxBytes = None, ttl: NewTtl = None) -> None:
    """Show or set what the store may take, and how long unused sessions stay in it.

    Example: llamakv budget --max-bytes 20GB --ttl 30d
    """
    from llamakv.ops.budget import budget_report, set_budget

    root = config.store_dir(store.store)
    overrides = {"max_bytes": requests.max_bytes_variable(), "ttl_s": requests.ttl_variable()}
    if max_bytes is not None or ttl is not None:
        set_budget(root, max_bytes=max_bytes, ttl_s=ttl)
    report = budget_report(root, **overrides)
    if output.json:
        output.document(_budget_json(report))
        return
    output.write_styled(_budget_text(report, overrides))
    if report.n_over:
        from llamakv.cli.render import size

        output.notice(f"the store takes {size(report.n_over)} too much; the next save removes that, or: llamakv prune")


def _budget_json(report: BudgetReport) -> Json:
    return {
        "store": str(report.root),
        "max_bytes": report.budget.max_bytes,
        "ttl_s": report.budget.ttl_s,
        "effective_max_bytes": report.max_bytes,
        "effective_ttl_s": report.ttl_s,
        "bytes": report.n_bytes,
        "sessions": report.n_sessions,
        "over_bytes": report.n_over,
    }


def _budget_text(report: BudgetReport, overrides: Mapping[str, float | None]) -> str:
    from llamakv.cli import render

    most = "no limit" if report.max_bytes is None else render.size(report.max_bytes)
    if report.max_bytes is not None:
        most += f" · {report.n_bytes / report.max_bytes:.0%} used"
    ttl = "no limit" if report.ttl_s is None else f"{render.span(report.ttl_s)} unused"
    for name, variable in (("max_bytes", config.MAX_BYTES_VARIABLE), ("ttl_s", config.TTL_VARIABLE)):
        if overrides[name] is not None:
            note = f" (${variable})"
            most, ttl = (most + note, ttl) if name == "max_bytes" else (most, ttl + note)
    return render.report(
        [
            ("store", str(report.root)),
            ("takes", f"{render.size(report.n_bytes)} in {render.count(report.n_sessions, 'session')}"),
            ("may take", most),
            ("time to live", ttl),
        ]
    )


# ---------------------------------------------------------------- prune

KeepLast = Annotated[
    int | None,
    typer.Option("--keep-last", metavar="N", parser=whole(1, 2**31 - 1), help="Keep the N used last."),
]
KeepWithin = Annotated[
    float | None,
    typer.Option("--keep-within", metavar="TIME", parser=time_span,
                 help="Keep those used within this time: 12h, 7d, 2w."),
]  # fmt: skip
KeepTag = Annotated[
    list[str] | None,
    typer.Option("--keep-tag", metavar="TAG", parser=not_empty, help="Keep those with this tag; repeatable."),
]
PruneTtl = Annotated[
    float | None,
    typer.Option("--ttl", metavar="TIME", parser=time_limit,
                 help=f"How long a session without a time of its own may stay unused: 7d, none (default: "
                      f"${config.TTL_VARIABLE} or the store's budget)."),
]  # fmt: skip


@takes_options
def prune(
    output: Output,
    store: StoreGroup,
    keep_last: KeepLast = None,
    keep_within: KeepWithin = None,
    keep_tag: KeepTag = None,
    max_bytes: MaxBytes = None,
    ttl: PruneTtl = None,
    dry_run: DryRun = False,
) -> None:
    """Remove sessions that expired or are over the budget, or all that no --keep rule keeps.

    Example: llamakv prune --keep-last 10 --keep-tag release --dry-run
    """
    from llamakv.cli.reporting import running
    from llamakv.ops.budget import rules_of
    from llamakv.ops.pruning import prune as prune_store

    root = refs.existing_store(store.store)
    has_keep = keep_last is not None or keep_within is not None or bool(keep_tag)
    if has_keep and ttl is not None:
        raise UsageError(
            "--ttl has no meaning beside --keep-last, --keep-within and --keep-tag: what they do not keep goes",
            hint="llamakv prune --keep-within TIME",
        )
    rules = rules_of(
        root,
        last=keep_last,
        within_s=keep_within,
        tags=tuple(keep_tag or ()),
        max_bytes=max_bytes,
        ttl_s=ttl,
        default_max_bytes=requests.max_bytes_variable(),
        default_ttl_s=requests.ttl_variable(),
    )
    with running(output) as reporter:
        report = prune_store(root, rules, reporter, is_dry_run=dry_run)
    output.document(_prune_json(report), status="partial" if report.skipped else "ok")
    if not output.json:
        _write_pruned(output, report)
    if report.skipped:
        raise typer.Exit(PARTLY_DONE)


def _write_pruned(output: Output, report: PruneReport) -> None:
    from llamakv.cli import render

    if not report.verdicts:
        output.note(f"no sessions in {report.root}")
    elif not output.quiet:
        now_s = time.time()
        rows = [_verdict_row(verdict, report, now_s) for verdict in report.verdicts]
        output.write_styled(render.table(("", "NAME", "USED", "SIZE", "WHY"), rows, right=(3,)))
        output.write(_pruned_text(report) + "\n")
    for name in report.skipped:
        output.warning(f"{name!r} is being written, or was used meanwhile: left alone")
    rules = report.rules
    if not rules.has_keep and rules.max_bytes is None and not any(v.limit_s is not None for v in report.verdicts):
        output.note("nothing says what may go: llamakv budget --max-bytes 20GB --ttl 30d, or --keep-last 10 here")
    if report.n_over:
        output.warning(
            f"the store still takes {render.size(report.n_over)} more than {render.size(rules.max_bytes or 0)}: what "
            "is left is pinned or in use"
        )


def _pruned_text(report: PruneReport) -> str:
    from llamakv.cli import render

    n_gone, n_all = len(report.removed), render.count(len(report.verdicts), "session")
    freed, left = render.size(report.n_bytes_freed), render.size(report.n_bytes_left)
    if not n_gone and not report.n_bytes_freed:
        return f"nothing to remove: {n_all}, {left}"
    if report.n_orphan_bytes:
        freed += f" ({render.size(report.n_orphan_bytes)} of no session)"
    if report.is_dry_run:
        return f"would remove {n_gone:,} of {n_all} and free {freed}, leaving {left}"
    return f"removed {n_gone:,} of {n_all}, freed {freed}, {left} left"


def _verdict_row(verdict: Verdict, report: PruneReport, now_s: float) -> tuple[render.Cell, ...]:
    from llamakv.cli import render

    session = verdict.session
    is_skipped = session.name in report.skipped
    action = "skipped" if is_skipped else "kept" if verdict.is_kept else "would go" if report.is_dry_run else "removed"
    return (
        render.dim(action) if verdict.is_kept else render.alarm(action),
        session.name,
        render.age(session.used_s, now_s),
        render.size(session.n_file_bytes + session.n_object_bytes),
        _why(verdict, report),
    )


def _why(verdict: Verdict, report: PruneReport) -> str:
    from llamakv.cli.render import size, span

    rules, limit = report.rules, "" if verdict.limit_s is None else span(verdict.limit_s)
    texts = {
        "pinned": "pinned",
        "in_use": "in use",
        "last": f"among the last {rules.last or 0:,} used",
        "within": f"used within {span(rules.within_s or 0)}",
        "tag": f"has tag {verdict.tag}",
        "no_limit": "no limit",
        "fresh": f"may stay unused for {limit}",
        "expired": f"unused for more than {limit}",
        "over_budget": f"over the budget of {size(rules.max_bytes or 0)}",
        "no_rule": "no rule keeps it",
    }
    return texts[verdict.reason.value]


def _prune_json(report: PruneReport) -> Json:
    return {
        "store": str(report.root),
        "dry_run": report.is_dry_run,
        "sessions": [
            {
                "name": verdict.session.name,
                "path": str(verdict.session.path),
                "kept": verdict.is_kept,
                "skipped": verdict.session.name in report.skipped,
                "reason": verdict.reason.value,
                "used_s": verdict.session.used_s,
                "bytes": verdict.session.n_file_bytes + verdict.session.n_object_bytes,
                "pinned": verdict.session.lineage.pinned,
                "tags": list(verdict.session.lineage.tags),
            }
            for verdict in report.verdicts
        ],
        "removed": [verdict.session.name for verdict in report.removed],
        "freed_bytes": report.n_bytes_freed,
        "orphaned_bytes": report.n_orphan_bytes,
        "left_bytes": report.n_bytes_left,
        "over_bytes": report.n_over,
        **_collected_json(report.collected),
    }


# ---------------------------------------------------------------- gc


@takes_options
def gc(output: Output, store: StoreGroup, dry_run: DryRun = False) -> None:
    """Remove sections that no session refers to, and what killed writers left behind.

    Example: llamakv gc --dry-run
    """
    from llamakv.cli import render
    from llamakv.cli.reporting import running
    from llamakv.ops.pruning import gc as collect

    root = refs.existing_store(store.store)
    with running(output) as reporter:
        found = collect(root, reporter, is_dry_run=dry_run)
    output.document({"store": str(root), "dry_run": dry_run, **_collected_json(found)})
    if output.json or output.quiet:
        return
    verb = "would remove" if dry_run else "removed"
    what = f"{render.count(found.n_objects, 'section')} of no session, {render.size(found.n_bytes)}"
    if found.n_temporaries:
        what += f", and {render.count(found.n_temporaries, 'temporary file')}"
    output.write(f"{verb} {what}\n" if found.n_objects or found.n_temporaries else "nothing to remove\n")


def _collected_json(found: Collected) -> dict[str, Json]:
    return {"objects": found.n_objects, "object_bytes": found.n_bytes, "temporaries": found.n_temporaries}

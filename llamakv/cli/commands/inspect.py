"""``inspect``: what a session is and what it takes, from two small reads and without the engine."""

from __future__ import annotations

from typing import TYPE_CHECKING, Annotated

import typer

from llamakv.cli import config, describe
from llamakv.cli.commands.grouping import takes_options
from llamakv.cli.commands.options import Ref, StoreGroup
from llamakv.cli.output import Json, Output, to_json
from llamakv.errors import UsageError

if TYPE_CHECKING:
    from llamakv.cli.refs import Target
    from llamakv.ops.inspect import SessionReport

MOST_ROWS = 12

History = Annotated[bool, typer.Option("--history", metavar="", help="Print all messages instead, with their roles.")]
Tokens = Annotated[bool, typer.Option("--tokens", metavar="", help="Print all token ids instead, one a line.")]
Sections = Annotated[
    bool, typer.Option("--sections", metavar="", help=f"List all sections, not the first {MOST_ROWS} only.")
]


@takes_options
def inspect(
    output: Output,
    ref: Ref,
    store: StoreGroup,
    history: History = False,
    tokens: Tokens = False,
    sections: Sections = False,
) -> None:
    """Show what a session holds: model, settings, tokens, messages, and its size in memory and on disk.

    Example: llamakv inspect session.bin
    """
    from llamakv.cli import refs
    from llamakv.ops.inspect import inspect_session

    if history and tokens:
        raise UsageError("--history and --tokens exclude each other", hint=f"llamakv inspect --history {ref}")
    found = refs.existing(config.store_dir(store.store), ref)
    report = inspect_session(found.path)
    if output.json:
        output.document(_report_json(found, report, history=history, tokens=tokens))
    elif history:
        _write_history(output, report)
    elif tokens:
        output.write("".join(f"{token}\n" for token in report.info.record.tokens))
    else:
        _write_report(output, found, report, all_sections=sections)


def _report_json(found: Target, report: SessionReport, *, history: bool, tokens: bool) -> Json:
    info = report.info
    record = info.record
    data: dict[str, Json] = {
        "session": found.ref,
        "path": str(found.path),
        **describe.summary_json(info),
        "file_bytes": info.n_file_bytes,
        "dead_bytes": info.n_dead_bytes,
        "raw_over_stored": _ratio(info.n_raw_bytes, info.n_stored_bytes),
        "n_ctx": record.n_ctx,
        "sections": [describe.section_json(section) for section in info.sections],
        "versions": to_json(record.versions),
        "sampling": to_json(record.sampling),
        "lineage": to_json(record.lineage),
        "first_text": report.first_text,
        "last_text": report.last_text,
    }
    if history:
        data["messages"] = to_json(record.chat.messages if record.chat else ())
    if tokens:
        data["token_ids"] = list(record.tokens)
    return data


def _ratio(n_raw: int, n_stored: int) -> float | None:
    return n_raw / n_stored if n_stored else None


def _write_history(output: Output, report: SessionReport) -> None:
    record = report.info.record
    if record.chat is None:
        output.write(f"{record.text or ''}\n")
        return
    output.write(describe.history_text(record.chat.messages))


def _write_report(output: Output, found: Target, report: SessionReport, *, all_sections: bool) -> None:
    from llamakv.cli import render

    output.write_styled(render.report(_facts(found, report)))
    listed = report.info.sections
    if not listed:
        return
    rows = [describe.section_row(index, section) for index, section in enumerate(listed)]
    n_more = 0 if all_sections or len(rows) <= MOST_ROWS else len(rows) - MOST_ROWS
    if n_more:
        rows = [*rows[: MOST_ROWS - 1], rows[-1]]
    headings = ("SECTION", "POSITIONS", "RAW", "STORED", "ENCODING", "DIGEST")
    output.write_styled("\n" + render.table(headings, rows, right=(2, 3)))
    if n_more:
        output.write_styled(render.heading(f"{n_more} more sections: --sections lists all {len(listed)}"))


def _facts(found: Target, report: SessionReport) -> list[tuple[str, str]]:
    from llamakv.cli import render

    info = report.info
    record = info.record
    identity, versions, lineage = record.identity, record.versions, record.lineage
    ratio = _ratio(info.n_raw_bytes, info.n_stored_bytes)
    size = f"{render.size(info.n_file_bytes)} on disk · {render.size(info.n_raw_bytes)} of state"
    if ratio is not None:
        size += f" stored as {render.size(info.n_stored_bytes)} ({ratio:.2f} raw over stored)"
    if info.n_dead_bytes * 10 > info.n_file_bytes:
        size += f" · {render.size(info.n_dead_bytes)} unused (llamakv compact {found.ref})"
    kind = render.count(report.turns, "turn") if record.chat else "raw text"
    rows = [
        ("session", f"{found.name} ({found.path})" if found.name else str(found.path)),
        ("tokens", f"{len(record.tokens):,} · {report.cells:,} cells · {kind} · n_ctx {record.n_ctx:,}"),
        ("size", size),
        ("model", f"{describe.model_name(identity)} · {identity.architecture} · {record.kind}"),
        ("identity", f"{identity.digest[:16]}… · {identity.n_bytes:,} bytes"),
        *(("adapter", f"{adapter.digest[:16]}… scale {adapter.scale:g}") for adapter in identity.adapters),
        ("settings", describe.settings_text(record.settings)),
        ("sampling", describe.sampling_text(record.sampling)),
        ("made by", f"llamakv {lineage.llamakv_version or '?'} · llama-cpp-python {versions.binding} · "
                    f"llama.cpp {versions.llama_cpp} ({versions.commit}) · {versions.backend}"),
        ("created", render.moment(lineage.created_s)),
        ("saved", f"{render.moment(lineage.updated_s)} · {render.count(lineage.n_saves, 'save')}"),
        *([("note", lineage.note)] if lineage.note else []),
    ]  # fmt: skip
    if lineage.parent_id is not None:
        rows.append(("parent", f"{lineage.parent_id} at position {lineage.parent_position}"))
    rows.append(("first text", render.excerpt(report.first_text)))
    rows.append(("last text", render.excerpt(report.last_text)))
    return rows

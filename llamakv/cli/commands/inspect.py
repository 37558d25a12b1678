"""``inspect``: what a session is and what it takes, from two small reads and without the engine."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, Annotated, Any

import typer
from typer.core import TyperCommand

from llamakv.cli import config, describe
from llamakv.cli.commands.grouping import takes_options
from llamakv.cli.commands.options import StoreGroup, complete_session
from llamakv.cli.commands.store_report import inspect_store
from llamakv.cli.output import Json, Output, to_json
from llamakv.errors import UsageError

if TYPE_CHECKING:
    from llamakv.cli.refs import Target
    from llamakv.ops.inspect import SessionReport

MOST_ROWS = 12

History = Annotated[bool, typer.Option("--history", metavar="", help="Print all messages instead, with their roles.")]
OptionalRef = Annotated[
    str | None,
    typer.Argument(metavar="[REF]", autocompletion=complete_session, show_default=False,
                   help="Session: a name in the store, or a path to a session file. None: see --store."),
]  # fmt: skip
Tokens = Annotated[bool, typer.Option("--tokens", metavar="", help="Print all token ids instead, one a line.")]
Sections = Annotated[
    bool, typer.Option("--sections", metavar="", help=f"List all sections, not the first {MOST_ROWS} only.")
]


class InspectCommand(TyperCommand):
    """Knows ``--store`` without a folder, which is the default store."""

    def make_context(self, info_name: str | None, args: list[str], *rest: Any, **extra: Any) -> Any:
        """See ``TyperCommand``."""
        return super().make_context(info_name, _with_folders(args), *rest, **extra)


def _with_folders(arguments: Sequence[str]) -> list[str]:
    """Arguments in which each ``--store`` has a folder: the default one where nothing follows, or another option."""
    found: list[str] = []
    is_option = True
    for index, argument in enumerate(arguments):
        found.append(argument)
        is_option = is_option and argument != "--"
        is_bare = index + 1 == len(arguments) or arguments[index + 1].startswith("-")
        if is_option and argument == "--store" and is_bare:
            found.append(str(config.store_dir(None)))
    return found


@takes_options
def inspect(
    output: Output,
    store: StoreGroup,
    ref: OptionalRef = None,
    history: History = False,
    tokens: Tokens = False,
    sections: Sections = False,
) -> None:
    """Show what a session holds and takes or, with --store alone, what a whole store does.

    Example: llamakv inspect session.bin
    """
    from llamakv.cli import refs
    from llamakv.ops.inspect import inspect_session

    if history and tokens:
        raise UsageError("--history and --tokens exclude each other", hint=f"llamakv inspect --history {ref}")
    if ref is None:
        if store.store is None or history or tokens or sections:
            raise UsageError("missing argument 'REF': a session, or --store alone", hint="llamakv inspect --store")
        inspect_store(output, config.store_dir(store.store))
        return
    found, at = refs.existing_at(config.store_dir(store.store), ref)
    report = inspect_session(found.path, at=at)
    if at is not None:
        found = replace(found, ref=ref, name=refs.shown(found, at))
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
        *([("labels", " ".join([*(["pinned"] if lineage.pinned else []), *(f"#{tag}" for tag in lineage.tags)]))]
          if lineage.pinned or lineage.tags else []),
        *([("note", lineage.note)] if lineage.note else []),
    ]  # fmt: skip
    if lineage.parent_id is not None:
        rows.append(("parent", f"{lineage.parent_id} at position {lineage.parent_position}"))
    rows.append(("first text", render.excerpt(report.first_text)))
    rows.append(("last text", render.excerpt(report.last_text)))
    return rows

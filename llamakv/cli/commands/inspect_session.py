"""``inspect REF``: what a session is and what it takes, from two small reads and without the engine; and, where it is
asked for, what is inside it."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from llamakv.cli import describe, inspected
from llamakv.cli.commands.options import ModelInspectGroup
from llamakv.cli.output import Json, Output, to_json
from llamakv.errors import NotFoundError, UsageError

if TYPE_CHECKING:
    from llamakv.cli.plots import SectionMap
    from llamakv.cli.refs import Target
    from llamakv.ops.inspect import SectionFile, SessionReport, Sharing
    from llamakv.ops.resume_cost import ResumeCost
    from llamakv.ops.session_layers import Inside

MOST_ROWS = 12
_IN_TERMINAL = "-"


@dataclass(frozen=True, slots=True, kw_only=True)
class SessionInspectGroup:
    """What ``inspect`` asks of a session: instead of the report, or beside it."""

    history: Annotated[
        bool, typer.Option("--history", metavar="", help="Print all messages instead, with their roles.")
    ] = False
    tokens: Annotated[bool, typer.Option("--tokens", metavar="", help="Print all token ids instead, one a line.")] = (
        False
    )
    text: Annotated[
        bool, typer.Option("--text", metavar="", help="Print all text instead: raw text, or the messages' words only.")
    ] = False
    sections: Annotated[
        bool,
        typer.Option("--sections", metavar="",
                     help=f"List all sections, not the first {MOST_ROWS} only, and who shares them."),
    ] = False  # fmt: skip
    cells: Annotated[
        bool, typer.Option("--cells", metavar="", help="Add which positions each section holds cells of; reads them.")
    ] = False
    cost: Annotated[
        bool, typer.Option("--cost", metavar="", help="Read, decompress and check what resuming would, and time it.")
    ] = False


@dataclass(frozen=True, slots=True, kw_only=True)
class _Wanted:
    """What was asked of a session."""

    history: bool
    tokens: bool
    text: bool
    sections: bool
    layers: bool
    cells: bool
    cost: bool
    plot: str | None
    force: bool

    @classmethod
    def of(cls, session: SessionInspectGroup, model: ModelInspectGroup) -> _Wanted:
        given = {field.name: getattr(session, field.name) for field in dataclasses.fields(session)}
        return cls(**given, layers=model.layers, plot=model.plot, force=model.force)

    def check(self, output: Output, ref: str) -> None:
        """Refuse what excludes each other, and a plot that cannot be had, before anything is read."""
        instead = [name for name in ("history", "tokens", "text") if getattr(self, name)]
        beside = [name for name in ("sections", "layers", "cells", "cost", "plot") if getattr(self, name)]
        if instead and len(instead + beside) > 1 and not output.json:
            first, second, *_ = instead + beside
            raise UsageError(f"--{first} and --{second} exclude each other", hint=f"llamakv inspect --{first} {ref}")
        if self.force and self.plot is None:
            raise UsageError("--force is for --plot", hint=f"llamakv inspect {ref} --plot session.svg --force")
        if self.plot == _IN_TERMINAL and output.json:
            raise UsageError(
                "--json and --plot - exclude each other: stdout takes one of them", hint="--plot session.svg"
            )
        if self.plot not in (None, _IN_TERMINAL):
            from llamakv.cli.plots import check_plot_file

            check_plot_file(Path(str(self.plot)), overwrite=self.force)


@dataclass(frozen=True, slots=True, kw_only=True)
class _Told:
    """All that was found out about a session."""

    found: Target
    report: SessionReport
    files: tuple[SectionFile, ...]
    sharing: Sharing | None
    cost: ResumeCost | None
    inside: Inside | None


def inspect_session(
    output: Output, root: Path, ref: str, session: SessionInspectGroup, model: ModelInspectGroup
) -> None:
    """Show what a session is and what it takes; with what was asked for, what is inside it.

    Raises:
        UsageError: options that exclude each other, or a plot that cannot be drawn.
        LlamakvError: as ``refs.existing_at`` and ``ops.inspect``.
    """
    from llamakv.cli import refs
    from llamakv.ops import inspect as ops

    wanted = _Wanted.of(session, model)
    wanted.check(output, ref)
    try:
        found, at = refs.existing_at(root, ref)
    except NotFoundError as error:
        if ref.lower().endswith(".gguf"):
            error.hint = f"there is no file '{ref}' either: a model is named by its path"
        raise
    report = ops.inspect_session(found.path, at=at)
    if at is not None:
        found = replace(found, ref=ref, name=refs.shown(found, at))
    if not output.json and (wanted.history or wanted.tokens or wanted.text):
        _write_instead(output, report, wanted)
        return
    told = _find_out(output, found, report, wanted)
    if wanted.plot not in (None, _IN_TERMINAL):
        _draw(told, Path(str(wanted.plot)), wanted)
    if output.json:
        output.document(_json(told, wanted))
        return
    _write_report(output, told, wanted)
    if wanted.plot == _IN_TERMINAL:
        _show_plot(output, told)
    elif wanted.plot is not None:
        output.note(f"drawn: {wanted.plot}")


def _find_out(output: Output, found: Target, report: SessionReport, wanted: _Wanted) -> _Told:
    """Look into the sections where that was asked for; the cost first, before they have been read."""
    from llamakv.ops.inspect import may_share, section_files, sharing_of

    info = report.info
    is_thorough = wanted.sections or wanted.plot is not None
    sharing = sharing_of(info, is_thorough=is_thorough) if may_share(info) else None
    cost = inside = None
    if wanted.cost or wanted.layers or wanted.cells:
        from llamakv.cli.reporting import running
        from llamakv.ops.resume_cost import measure_cost

        with running(output) as reporter:
            cost = measure_cost(info, reporter) if wanted.cost else None
            if wanted.layers or wanted.cells:
                from llamakv.ops.session_layers import look_inside

                inside = look_inside(info, reporter, with_stored=wanted.layers)
    files = section_files(info)
    return _Told(found=found, report=report, files=files, sharing=sharing, cost=cost, inside=inside)


def _json(told: _Told, wanted: _Wanted) -> Json:
    from llamakv.ops.resume_cost import resume_memory

    report, sharing = told.report, told.sharing
    info, record = report.info, report.info.record
    names: Mapping[str, Sequence[str]] = sharing.names if sharing is not None else {}
    data: dict[str, Json] = {
        "session": told.found.ref,
        "path": str(told.found.path),
        **describe.summary_json(info),
        "file_bytes": info.n_file_bytes,
        "dead_bytes": info.n_dead_bytes,
        "raw_over_stored": _ratio(info.n_raw_bytes, info.n_stored_bytes),
        "n_ctx": record.n_ctx,
        "missing": any(file.is_missing for file in told.files),
        "resume": inspected.memory_json(resume_memory(info)),
        "shared_with": None if sharing is None else inspected.sharing_json(sharing),
        "sections": [
            {
                **describe.section_json(section, file),
                **({"shared_with": names.get(section.digest, [])} if sharing else {}),
            }
            for section, file in zip(info.sections, told.files, strict=True)
        ],
        "versions": to_json(record.versions),
        "sampling": to_json(record.sampling),
        "lineage": to_json(record.lineage),
        "first_text": report.first_text,
        "last_text": report.last_text,
    }
    if wanted.history:
        data["messages"] = to_json(record.chat.messages if record.chat else ())
    if wanted.tokens:
        data["token_ids"] = list(record.tokens)
    if wanted.text:
        data["text"] = report.text
    if told.cost is not None:
        data["cost"] = inspected.cost_json(told.cost)
    if told.inside is not None:
        data |= inspected.inside_json(told.inside, layers=wanted.layers, cells=wanted.cells)
    if wanted.plot is not None:
        data["plot"] = wanted.plot
    return data


def _ratio(n_raw: int, n_stored: int) -> float | None:
    return n_raw / n_stored if n_stored else None


def _write_instead(output: Output, report: SessionReport, wanted: _Wanted) -> None:
    record = report.info.record
    if wanted.tokens:
        output.write("".join(f"{token}\n" for token in record.tokens))
    elif wanted.text or record.chat is None:
        output.write(f"{report.text}\n")
    else:
        output.write(describe.history_text(record.chat.messages))


# ---------------------------------------------------------------- the report


def _write_report(output: Output, told: _Told, wanted: _Wanted) -> None:
    from llamakv.cli import render

    output.write_styled(render.report(_facts(told)))
    if told.report.info.sections:
        _write_sections(output, told, all_sections=wanted.sections)
    if told.inside is not None:
        if wanted.layers:
            _write_layers(output, told.inside)
        if wanted.cells:
            _write_cells(output, told.inside, told.report.cells)
        if told.inside.unknown:
            output.write_styled("\n" + render.report(inspected.unknown_rows(told.inside)))
    if told.cost is not None:
        output.write_styled("\n" + render.heading("what resuming reads"))
        output.write_styled(render.report(inspected.cost_rows(told.cost)))


def _write_sections(output: Output, told: _Told, *, all_sections: bool) -> None:
    from llamakv.cli import render

    listed, sharing = told.report.info.sections, told.sharing
    rows = [
        describe.section_row(index, section, inspected.encoding_text(file))
        for index, (section, file) in enumerate(zip(listed, told.files, strict=True))
    ]
    headings: tuple[str, ...] = ("SECTION", "POSITIONS", "RAW", "STORED", "ENCODING", "DIGEST")
    if all_sections:
        headings, rows = inspected.with_sharing(headings, rows, listed, sharing)
    n_more = 0 if all_sections or len(rows) <= MOST_ROWS else len(rows) - MOST_ROWS
    if n_more:
        rows = [*rows[: MOST_ROWS - 1], rows[-1]]
    output.write_styled("\n" + render.table(headings, rows, right=(2, 3)))
    if n_more:
        output.write_styled(render.heading(f"{n_more} more sections: --sections lists all {len(listed)}"))


def _write_layers(output: Output, inside: Inside) -> None:
    from llamakv.cli import render

    if inside.layers:
        headings, rows = inspected.layer_table(inside)
        output.write_styled("\n" + render.table(headings, rows, right=(1, 2, 3, 4, 5)))
        output.write_styled("\n" + render.report(inspected.layer_notes(inside)))


def _write_cells(output: Output, inside: Inside, n_positions: int) -> None:
    from llamakv.cli import render

    if inside.parts:
        headings, rows = inspected.cell_table(inside, n_positions)
        output.write_styled("\n" + render.table(headings, rows, right=(1, 3, 4)))
        output.write_styled("\n" + render.report(inspected.held_rows(inside, n_positions)))


def _draw(told: _Told, path: Path, wanted: _Wanted) -> None:
    from llamakv.cli.plots import write_section_map

    write_section_map(_section_map(told), path, overwrite=wanted.force)


def _show_plot(output: Output, told: _Told) -> None:
    from llamakv.cli import render
    from llamakv.cli.plots import terminal_section_map

    output.write_styled("\n" + terminal_section_map(_section_map(told), render.width()))


def _section_map(told: _Told) -> SectionMap:
    name = told.found.name or told.found.path.name
    return inspected.section_map(f"{name}: sections along positions", told.report.info, told.sharing)


def _facts(told: _Told) -> list[tuple[str, str]]:
    from llamakv.cli import render
    from llamakv.ops.inspect import may_share
    from llamakv.ops.resume_cost import resume_memory

    found, report = told.found, told.report
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
        *inspected.place_rows(info.sections, told.files),
        *([("shared", inspected.sharing_text(told.sharing))] if may_share(info) else []),
        ("resuming", inspected.memory_text(resume_memory(info))),
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

"""Sessions in words and as JSON: the same facts for ``inspect``, ``ls`` and the results of saving."""

from __future__ import annotations

from collections.abc import Iterable
from typing import TYPE_CHECKING

from llamakv.cli.output import Json, to_json
from llamakv.records import MemorySettings, Message, ModelIdentity, Sampling

if TYPE_CHECKING:
    from llamakv.ops.chat import ConversationStats
    from llamakv.ops.fork import ForkSummary
    from llamakv.ops.inspect import SectionFile
    from llamakv.ops.requests import Answer, Opened, Saved
    from llamakv.store.session_file import SessionInfo, StoredSection


def model_name(identity: ModelIdentity) -> str:
    """The model for people: its name, or its architecture where it has none, and its quantisation."""
    return f"{identity.name or identity.architecture} {identity.quantisation}".strip()


def settings_text(settings: MemorySettings) -> str:
    """Memory settings on one line."""
    parts = [
        f"keys {settings.type_k}, values {settings.type_v}",
        f"flash attention {'on' if settings.flash_attn else 'off'}",
    ]
    if not settings.swa_full:
        parts.append("window only")
    if settings.rope_freq_base or settings.rope_freq_scale:
        parts.append(f"rope base {settings.rope_freq_base:g}, scale {settings.rope_freq_scale:g}")
    if not settings.attn_rot:
        parts.append("rotation off")
    return " · ".join(parts)


def summary_json(info: SessionInfo) -> dict[str, Json]:
    """What every JSON about a session contains."""
    from llamakv.ops.inspect import report_of

    record, report = info.record, report_of(info)
    return {
        "id": record.lineage.session_id,
        "kind": record.kind.value,
        "tokens": report.tokens,
        "cells": report.cells,
        "turns": report.turns,
        "raw_bytes": report.raw_bytes,
        "stored_bytes": report.stored_bytes,
        "n_saves": record.lineage.n_saves,
        "created_s": record.lineage.created_s,
        "updated_s": record.lineage.updated_s,
        "identity": to_json(record.identity),
        "settings": to_json(record.settings),
    }


def answer_json(answer: Answer) -> dict[str, Json]:
    """A reply as data."""
    return {
        "text": answer.text,
        "finish_reason": answer.finish_reason,
        "reused": answer.reused,
        "evaluated": answer.evaluated,
        "generated": answer.generated,
        "seed": answer.seed,
        "elapsed_s": answer.elapsed_s,
        "first_token_s": answer.first_token_s,
        "saved": saved_json(answer.saved),
    }


def saved_json(saved: Saved | None) -> Json:
    """A save as data."""
    if saved is None:
        return None
    return {
        "path": str(saved.info.path),
        "asked": None if saved.asked is None else str(saved.asked),
        "written_bytes": saved.n_written,
        "elapsed_s": saved.elapsed_s,
        "tokens": len(saved.info.record.tokens),
        "raw_bytes": saved.info.n_raw_bytes,
        "stored_bytes": saved.info.n_stored_bytes,
        "n_saves": saved.info.record.lineage.n_saves,
    }


def answer_line(answer: Answer) -> str:
    """What a reply took, on one line; the size is what saving it wrote. Kept short, to fit 80 columns."""
    from llamakv.cli.render import rate, seconds, size

    parts = [f"{answer.reused:,} reused, {answer.evaluated:,} evaluated, {answer.generated:,} generated"]
    ends = {"length": "cut at --max-tokens", "context": "the context is full", "interrupted": "interrupted"}
    if answer.finish_reason in ends:
        parts.append(ends[answer.finish_reason])
    if answer.generated:
        parts.append(rate(answer.generated - 1, answer.elapsed_s - answer.first_token_s))
        parts.append(f"first {seconds(answer.first_token_s)}")
    if answer.saved is not None:
        parts.append(f"+{size(answer.saved.n_written)}")
    return " · ".join(part for part in parts if part)


def fork_line(summary: ForkSummary) -> str:
    """What a batch took, on one line: ``reused`` and ``read again`` are the prefix's tokens, which all share."""
    from llamakv.cli.render import count, rate, seconds

    told = [count(summary.n_answers, "answer")]
    if summary.n_timeouts:
        told.append(f"{summary.n_timeouts:,} of them timed out")
    if summary.n_errors:
        told.append(count(summary.n_errors, "error"))
    if summary.n_skipped:
        told.append(f"{summary.n_skipped:,} skipped")
    tokens = [f"{summary.reused:,} reused"] if summary.reused or not summary.evaluated else []
    if summary.evaluated:
        tokens.append(f"{summary.evaluated:,} read again")
    tokens += [f"{summary.branch_evaluated:,} evaluated", f"{summary.generated:,} generated"]
    parts = [", ".join(told), ", ".join(tokens), seconds(summary.elapsed_s), rate(summary.generated, summary.elapsed_s)]
    return " · ".join(part for part in parts if part)


def fork_json(summary: ForkSummary) -> dict[str, Json]:
    """A batch as data."""
    return {
        "answers": summary.n_answers,
        "timeouts": summary.n_timeouts,
        "errors": summary.n_errors,
        "skipped": summary.n_skipped,
        "reused": summary.reused,
        "evaluated": summary.evaluated,
        "branch_reused": summary.branch_reused,
        "branch_evaluated": summary.branch_evaluated,
        "generated": summary.generated,
        "parallel": summary.n_parallel,
        "decoded_together": summary.decoded_together,
        "cells_peak": summary.n_cells_peak,
        "steps": summary.n_steps,
        "restore_s": summary.restore_s,
        "model_load_s": summary.model_load_s,
        "elapsed_s": summary.elapsed_s,
        "tokens_per_s": summary.generated / summary.elapsed_s if summary.elapsed_s > 0 else 0.0,
        "interrupted": summary.interrupted,
    }


def history_text(messages: Iterable[Message]) -> str:
    """A conversation as plain text, each message under its role."""
    parts = []
    for message in messages:
        ending = f" ({message.finish})" if message.finish in ("interrupted", "length") else ""
        opening = " (goes on)" if message.is_open else ""
        parts.append(f"{message.role}{ending}{opening}:\n{message.content.rstrip(chr(10))}\n")
    return "\n".join(parts)


def sampling_text(sampling: Sampling) -> str:
    """Sampling parameters on one line; what is off is left out."""
    parts = ["greedy" if sampling.temperature == 0 else f"temperature {sampling.temperature:g}"]
    if sampling.temperature > 0:
        parts.append(f"top-k {sampling.top_k}, top-p {sampling.top_p:g}, min-p {sampling.min_p:g}")
    penalties = (
        ("repeat penalty", sampling.repeat_penalty, 1.0),
        ("frequency penalty", sampling.frequency_penalty, 0.0),
        ("presence penalty", sampling.presence_penalty, 0.0),
    )
    parts.extend(f"{name} {value:g}" for name, value, off in penalties if value != off)
    if sampling.logit_bias:
        parts.append(f"{len(sampling.logit_bias)} logit biases")
    if sampling.grammar:
        parts.append("a grammar")
    if sampling.max_tokens is not None:
        parts.append(f"at most {sampling.max_tokens:,} tokens")
    parts.extend(f"stop {text!r}" for text in sampling.stop)
    parts.append(f"seed {sampling.seed}")
    return " · ".join(parts)


def section_json(section: StoredSection, file: SectionFile | None = None) -> dict[str, Json]:
    """A row of the section table as data; ``file`` is how the section is stored, None where that was not looked at."""
    if file is not None:
        encoding, stored = file.encoding, {"missing": file.is_missing, "trouble": file.trouble}
    else:
        encoding, stored = None if section.in_store else section.encoding, {}
    return {
        "kind": section.kind.value,
        "p0": section.p0,
        "p1": section.p1,
        "p_used": section.p_used,
        "raw_bytes": section.n_raw,
        "stored_bytes": section.n_stored,
        "offset": section.offset,
        "in_store": section.in_store,
        **stored,
        "encoding": None if encoding is None else str(encoding),
        "digest": section.digest,
    }


def section_row(index: int, section: StoredSection, encoding: str) -> tuple[str, ...]:
    """A row of the section table for people: number and kind, positions, raw and stored bytes, encoding, digest."""
    from llamakv.cli.render import size

    used = f" used to {section.p_used}" if section.p_used < section.p1 else ""
    positions = f"[{section.p0}, {section.p1}){used}" if section.p0 < section.p1 else f"at {section.p1}"
    return (
        f"{index} {section.kind}",
        positions,
        size(section.n_raw),
        size(section.n_stored),
        encoding,
        section.digest[:12],
    )


def opened_json(shown: str, opened: Opened) -> dict[str, Json]:
    """A resumed session as data."""
    return {
        "session": shown,
        "reused": opened.reused,
        "evaluated": opened.evaluated,
        "model_load_s": opened.model_load_s,
        "restore_s": opened.restore_s,
        "reasons": list(opened.reasons),
    }


def opened_line(shown: str, opened: Opened) -> str:
    """What bringing a session back took, on one line; never "resumed" where nothing was reused."""
    from llamakv.cli.render import count, seconds

    verb = "resumed" if opened.reused or not opened.evaluated else "read again"
    why = f" ({'; '.join(opened.reasons)})" if opened.reasons else ""
    reused = count(opened.reused, "token")
    return f"{verb} {shown}: {reused} reused, {opened.evaluated:,} evaluated, {seconds(opened.restore_s)}{why}"


def stats_json(stats: ConversationStats) -> Json:
    """A conversation's figures as data."""
    return to_json(stats)


def stats_rows(stats: ConversationStats) -> list[tuple[str, str]]:
    """A conversation's figures for people."""
    from llamakv.cli.render import count, size

    return [
        ("tokens", f"{stats.n_tokens:,} in {count(stats.n_turns, 'turn')}"),
        ("cells", f"{stats.n_cells:,} of {stats.n_ctx:,} now, up to {stats.n_ctx_max:,}"),
        ("state", f"{size(stats.n_raw_bytes)}, stored as {size(stats.n_stored_bytes)}"),
        ("work", f"{stats.reused:,} reused, {stats.evaluated:,} evaluated, {stats.generated:,} generated"),
        ("speed", f"{stats.tokens_per_s:,.1f} tokens/s"),
    ]

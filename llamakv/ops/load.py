"""Restoring a session and completing it once."""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import replace

from llamakv.engine.text import join
from llamakv.errors import AbortedError, UsageError
from llamakv.ops.chat import Conversation, conversation_of, open_chat
from llamakv.ops.keeping import Keeper
from llamakv.ops.matching import CHAT_SAMPLING, find_model, merge_memory, merge_sampling, random_seed
from llamakv.ops.opening import OpenModel, resume
from llamakv.ops.prefixes import begin_with_prefix
from llamakv.ops.reply import write_reply
from llamakv.ops.requests import Answer, ChatRequest, LoadRequest, Opened, Reporter
from llamakv.records import Sampling
from llamakv.store.session_file import check_writable, read_session


def load_once(request: LoadRequest, reporter: Reporter) -> Answer:
    """Bring a session back, or begin a new one, and let the model go on once: answer ``prompt`` in a conversation,
    continue raw text. The session's file is only read, unless it is also ``save``.

    Raises:
        LlamakvError: nothing was changed on disk.
    """
    started = time.perf_counter()
    if request.save is not None:
        check_writable(request.save, overwrite=request.overwrite or request.save == request.path)
    if request.prompt is not None and not request.prompt:
        raise UsageError("the prompt is empty")
    if request.path is None:
        return _begin_raw(request, started, reporter) if request.raw else _begin(request, reporter)
    info = read_session(request.path)
    sampling = merge_sampling(request.sampling, info.record.sampling)
    opened, info, back = resume(
        request.path, request.model, request.memory, request.options, reporter, info, at=request.at
    )
    with opened:
        _announce(back, reporter)
        keeper = Keeper(opened, info, compress=request.compress, budget=request.budget)
        if info.record.chat is not None:
            conversation = conversation_of(
                opened,
                keeper,
                back,
                info.record,
                sampling=sampling,
                path=request.save,
                at=request.at,
                overwrite=request.overwrite,
                name=request.name,
            )
            answer = _answer(conversation, request.prompt, reporter)
            n_saved = min(answer.reused, back.reused)  # what had to be read again now was no saved work
            return replace(answer, reused=n_saved, evaluated=answer.evaluated + answer.reused - n_saved)
        return _continue(request, opened, keeper, sampling, back.reused, started, reporter)


def _begin(request: LoadRequest, reporter: Reporter) -> Answer:
    """Answer the first message of a new conversation."""
    if request.prompt is None:
        raise UsageError("there is nothing to answer", hint="give a prompt: -p TEXT")
    new = ChatRequest(
        model=request.model,
        memory=request.memory,
        sampling=request.sampling,
        save=request.save,
        name=request.name,
        system=request.system,
        overwrite=request.overwrite,
        compress=request.compress,
        reuse_from=request.reuse_from,
        budget=request.budget,
    )
    with open_chat(new, reporter) as conversation:
        return conversation.send(request.prompt, reporter)


def _begin_raw(request: LoadRequest, started: float, reporter: Reporter) -> Answer:
    """Continue a new text."""
    if request.prompt is None:
        raise UsageError("there is nothing to go on from", hint="give the text's beginning: -p TEXT")
    found = find_model(request.model, None, reporter)
    sampling = merge_sampling(request.sampling, replace(CHAT_SAMPLING, seed=random_seed()))
    memory = merge_memory(request.memory, None, None, may_change=True)
    with OpenModel(found, request.model, memory, reporter=reporter) as opened:
        keeper = Keeper(opened, None, compress=request.compress, budget=request.budget)
        tokens = opened.model.tokenize(request.prompt, add_special=True, parse_special=True)
        if not tokens:
            raise UsageError("the prompt is empty: it gives no token")
        sequence = opened.open_sequence(min(len(tokens), opened.n_ctx_max()))
        reused = begin_with_prefix(opened, keeper, request.reuse_from, tokens, reporter)
        rest = tokens[len(sequence.tokens) :]
        return _continue(request, opened, keeper, sampling, reused, started, reporter, new=rest)


def _announce(back: Opened, reporter: Reporter) -> None:
    n = back.reused + back.evaluated
    reporter.notice(
        f"resumed {n:,} tokens: {back.reused:,} reused, {back.evaluated:,} evaluated, in {back.restore_s:.3f} s"
    )


def _answer(conversation: Conversation, prompt: str | None, reporter: Reporter) -> Answer:
    if prompt is None:
        return conversation.answer_open(reporter)
    return conversation.send(prompt, reporter)


def _continue(
    request: LoadRequest,
    opened: OpenModel,
    keeper: Keeper,
    sampling: Sampling,
    reused: int,
    started: float,
    reporter: Reporter,
    *,
    new: Sequence[int] | None = None,
) -> Answer:
    """Continue raw text that is in memory, behind the prompt or the ``new`` tokens."""
    sequence, model = opened.sequence, opened.model
    model.check_sampling(sampling)
    tokens = list(new or ())
    if new is None and request.prompt is not None:
        tokens = model.tokenize(request.prompt, add_special=False, parse_special=True)
        if not tokens:
            raise UsageError("the prompt is empty: it gives no token")
    if tokens:
        try:
            sequence.extend(
                tokens,
                replace_pending=new is None and model.is_end(sequence.tokens[-1]) and len(sequence.tokens) > 1,
                on_progress=lambda done, total: reporter.progress("prefill", done, total),
                should_abort=reporter.should_abort,
            )
        except AbortedError as error:
            raise AbortedError("interrupted while reading the prompt; nothing was changed") from error
    n_before = len(sequence.tokens)
    reply = write_reply(sequence, sampling, reporter, started=started)
    saved = None
    if request.save is not None:
        saved = keeper.save(
            request.save,
            chat=None,
            text=join(model.token_bytes(token) for token in sequence.tokens),
            sampling=sampling,
            reporter=reporter,
            overwrite=request.overwrite,
            name=request.name,
            aside_on_conflict=True,
        )
    return Answer(
        text=reply.text,
        finish_reason=reply.finish_reason,
        reused=reused,
        evaluated=n_before - reused,
        generated=reply.n_tokens,
        seed=sampling.seed,
        elapsed_s=reply.elapsed_s,
        first_token_s=reply.first_token_s,
        saved=saved,
    )

"""Restoring a session and completing it once."""

from __future__ import annotations

import time
from dataclasses import replace

from llamakv.engine.text import join
from llamakv.errors import AbortedError, UsageError
from llamakv.ops.chat import Conversation, conversation_of
from llamakv.ops.keeping import Keeper
from llamakv.ops.matching import merge_sampling
from llamakv.ops.opening import OpenModel, resume
from llamakv.ops.reply import write_reply
from llamakv.ops.requests import Answer, LoadRequest, Opened, Reporter
from llamakv.records import Sampling
from llamakv.store.session_file import SessionInfo, check_writable, read_session


def load_once(request: LoadRequest, reporter: Reporter) -> Answer:
    """Bring a session back and let the model go on once: answer ``prompt`` in a conversation, continue raw text.
    The session's file is only read, unless it is also ``save``.

    Raises:
        LlamakvError: nothing was changed on disk.
    """
    started = time.perf_counter()
    if request.save is not None and request.save != request.path:
        check_writable(request.save, overwrite=request.overwrite)
    elif request.save is not None:
        check_writable(request.save, overwrite=True)
    info = read_session(request.path)
    sampling = merge_sampling(request.sampling, info.record.sampling)
    if request.prompt is not None and not request.prompt:
        raise UsageError("the prompt is empty")
    opened, info, back = resume(request.path, request.model, request.memory, request.options, reporter, info)
    with opened:
        _announce(back, reporter)
        keeper = Keeper(opened, info, compress=request.compress)
        if info.record.chat is not None:
            conversation = conversation_of(
                opened,
                keeper,
                back,
                info.record,
                sampling=sampling,
                path=request.save,
                overwrite=request.overwrite,
                name=request.name,
            )
            answer = _answer(conversation, request.prompt, reporter)
            if back.evaluated:  # what had to be read again now was no saved work
                answer = replace(answer, reused=0, evaluated=answer.evaluated + answer.reused)
            return answer
        return _continue(request, opened, keeper, info, back, sampling, started, reporter)


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
    info: SessionInfo,
    back: Opened,
    sampling: Sampling,
    started: float,
    reporter: Reporter,
) -> Answer:
    sequence, model = opened.sequence, opened.model
    model.check_sampling(sampling)
    reused = back.reused
    if request.prompt is not None:
        tokens = model.tokenize(request.prompt, add_special=False, parse_special=True)
        if not tokens:
            raise UsageError("the prompt is empty: it gives no token")
        try:
            sequence.extend(
                tokens,
                replace_pending=model.is_end(sequence.tokens[-1]) and len(sequence.tokens) > 1,
                on_progress=lambda done, total: reporter.progress("prefill", done, total),
                should_abort=reporter.should_abort,
            )
        except AbortedError as error:
            raise AbortedError(f"interrupted while reading the prompt; {info.path} is unchanged") from error
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

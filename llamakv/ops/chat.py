"""Beginning a conversation, or going on with a stored one."""

from __future__ import annotations

import time
from dataclasses import replace
from pathlib import Path

from llamakv.ops.conversation import Conversation
from llamakv.ops.keeping import Keeper
from llamakv.ops.matching import CHAT_SAMPLING, find_model, merge_memory, merge_sampling, random_seed
from llamakv.ops.opening import OpenModel, resume
from llamakv.ops.places import cut_at
from llamakv.ops.reading import chat_of, template_of
from llamakv.ops.requests import ChatRequest, ConversationStats, Opened, Reporter
from llamakv.records import Message, Sampling, SessionRecord
from llamakv.store.session_file import check_writable, read_session

__all__ = ["Conversation", "ConversationStats", "conversation_of", "open_chat"]


def open_chat(request: ChatRequest, reporter: Reporter) -> Conversation:
    """Begin a conversation, or bring a stored one back.

    Raises:
        LlamakvError: before anything on disk was changed.
    """
    if request.save is not None and request.save != request.resume:
        check_writable(request.save, overwrite=request.overwrite)
    if request.resume is not None:
        return _resume_chat(request, request.resume, reporter)
    found = find_model(request.model, None, reporter)
    memory = merge_memory(request.memory, None, None, may_change=True)
    sampling = merge_sampling(request.sampling, replace(CHAT_SAMPLING, seed=random_seed()))
    opened = OpenModel(found, request.model, memory, reporter=reporter)
    try:
        opened.open_sequence()
        messages = (Message(role="system", content=request.system, p0=0, p1=0),) if request.system else ()
        template = template_of(opened, None, now_s=time.time())
        return Conversation(
            opened,
            Keeper(opened, None, compress=request.compress, budget=request.budget),
            Opened(record=None, reused=0, evaluated=0, model_load_s=opened.load_s, restore_s=0.0),
            template=template,
            messages=(),
            wanted_system=messages,
            sampling=sampling,
            path=request.save,
            overwrite=request.overwrite,
            name=request.name,
            reuse_from=request.reuse_from,
        )
    except BaseException:
        opened.close()
        raise


def _resume_chat(request: ChatRequest, path: Path, reporter: Reporter) -> Conversation:
    info = read_session(path)
    chat_of(info)
    if request.save is None:
        check_writable(path, overwrite=True)
    sampling = merge_sampling(request.sampling, info.record.sampling)
    opened, info, back = resume(path, request.model, request.memory, request.options, reporter, info, at=request.at)
    try:
        conversation = conversation_of(
            opened,
            Keeper(opened, info, compress=request.compress, budget=request.budget),
            back,
            info.record,
            sampling=sampling,
            path=path if request.save is None else request.save,
            at=request.at,
            overwrite=request.overwrite,
            name=request.name,
        )
        if request.system is not None:
            conversation.set_system(request.system, reporter)
        return conversation
    except BaseException:
        opened.close()
        raise


def conversation_of(
    opened: OpenModel,
    keeper: Keeper,
    back: Opened,
    record: SessionRecord,
    *,
    sampling: Sampling,
    path: Path | None,
    at: str | None,
    overwrite: bool = False,
    name: str | None = None,
) -> Conversation:
    """The conversation of a session that is back in memory, as it is or as it was ``at`` a place."""
    assert record.chat is not None
    template = template_of(opened, record.chat.template, now_s=record.lineage.created_s)
    messages = record.chat.messages
    if at is not None:
        messages = cut_at(record, at, opened.model, template).messages
    return Conversation(
        opened,
        keeper,
        back,
        template=template,
        messages=messages,
        wanted_system=None,
        sampling=sampling,
        path=path,
        overwrite=overwrite,
        name=name,
    )

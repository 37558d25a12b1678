"""Conversations that are kept: under names, in the store, between keys, and what the other commands make of them."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from pathlib import Path

import pytest

from llamakv.errors import ExistsError, LockedError, MismatchError, NoRoomError, NotFoundError, UsageError
from llamakv.ops.comparing import compare_sessions
from llamakv.ops.history import log_session
from llamakv.server.contract import Ask, ChatMessage
from llamakv.server.conversations import Conversation, Conversations, Place
from llamakv.server.digests import excerpt
from llamakv.server.service import LlamaService
from llamakv.server.sessions import shared_cells
from llamakv.store.session_file import read_session
from tests.ops.driver import Driver
from tests.server.service_driver import ENDLESS, GREEDY, LONG, Heard, answer_to, chat, open_for
from tests.server.test_service import run, spoil_tokeniser, until


@pytest.fixture
def store(tmp_path: Path) -> Path:
    return tmp_path / "store"


@pytest.mark.parametrize("name", ["M", "MS", "MR", "MH"])
def test_a_named_conversation_is_gone_on_with_by_chat(
    models: Callable[[str], Path], name: str, store: Path, tmp_path: Path
) -> None:
    texts: list[str] = []

    async def act(service: LlamaService) -> None:
        one = await answer_to(service, chat("hello there", session="notes"))
        two = await answer_to(service, chat("hello there", one.text, "and then?", session="notes"))
        three = await answer_to(service, chat("hello there", one.text, "and then?", two.text, "why?", session="notes"))
        texts.extend((one.text, two.text, three.text))

    with open_for(models(name), store) as service:
        run(service, act)
    assert [path.name for path in store.glob("*.bin")] == ["notes.bin"]
    heard = Heard()
    driver = Driver(models(name), tmp_path)
    with driver.resume(store / "notes.bin") as conversation:
        assert conversation.opened.evaluated == 0
        assert [m.content for m in conversation.messages if m.role == "assistant"] == texts
        conversation.send("one more thing", heard.reporter)
    record = read_session(store / "notes.bin").record
    assert record.chat is not None
    assert len([m for m in record.chat.messages if m.role == "assistant"]) == 4
    with driver.resume(store / "notes.bin", at="turn2") as conversation:
        again = conversation.send("why?", heard.reporter)
    assert again.text == texts[2]


def test_turns_are_added_to_the_file_and_keep_its_identity(model_path: Path, store: Path) -> None:
    async def act(service: LlamaService) -> None:
        one = await answer_to(service, chat("hello there", session="notes"))
        await service.save("notes", None, "")
        first = read_session(store / "notes.bin")
        await answer_to(service, chat("hello there", one.text, "and then?", session="notes"))
        line = await service.save("notes", None, "")
        second = read_session(store / "notes.bin")
        assert (line.name, line.n_turns, line.is_saved) == ("notes", 2, True)
        assert second.record.lineage.session_id == first.record.lineage.session_id
        assert second.record.lineage.n_saves == first.record.lineage.n_saves + 1
        kept = [section.digest for section in second.sections]
        assert [section.digest for section in first.sections] == kept[: len(first.sections)]

    with open_for(model_path, store) as service:
        run(service, act)


def test_a_restarted_server_goes_on_where_it_was(
    model_path: Path, store: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    texts: list[str] = []

    async def before(service: LlamaService) -> None:
        texts.append((await answer_to(service, chat("hello there"))).text)
        texts.append((await answer_to(service, chat("hello there", texts[0], "and then?", space="live"))).text)

    async def after(service: LlamaService) -> None:
        read = spoil_tokeniser(service, monkeypatch)
        two = await answer_to(service, chat("hello there", texts[0], "and then?"))
        assert len(read) == 1
        assert two.text == texts[1]
        assert (two.usage.source, two.usage.n_cached) == ("store", two.usage.n_prompt - two_new(read[0], service) - 1)
        assert service.counts.n_reused_store == two.usage.n_cached
        assert [line.n_turns for line in await service.sessions("")] == [2]

    def two_new(text: str, service: LlamaService) -> int:
        return len(service._opened.model.tokenize(text, add_special=False, parse_special=True))

    with open_for(model_path, store) as service:
        run(service, before)
    with open_for(model_path, store) as service:
        run(service, after)


def test_raw_text_is_gone_on_with_after_a_restart(model_path: Path, store: Path) -> None:
    texts: list[str] = []

    async def before(service: LlamaService) -> None:
        texts.append((await answer_to(service, Ask(prompt=LONG, sampling=GREEDY))).text)

    async def after(service: LlamaService) -> None:
        two = await answer_to(service, Ask(prompt=LONG + texts[0] + " more", sampling=GREEDY))
        assert two.usage.source == "store"
        assert two.usage.n_prompt - two.usage.n_cached < 8

    with open_for(model_path, store) as service:
        run(service, before)
    with open_for(model_path, store) as service:
        run(service, after)


def test_spaces_share_neither_cells_nor_sessions(model_path: Path, store: Path) -> None:
    async def act(service: LlamaService) -> None:
        one = await answer_to(service, chat("hello there", space="anne", session="notes"))
        other = await answer_to(service, chat("hello there", space="bert", session="notes"))
        assert (other.text, other.usage.n_cached, other.usage.source) == (one.text, 0, "none")
        await service.save("notes", None, "anne")
        third = await answer_to(service, chat("hello there", space="cleo"))
        assert third.usage.n_cached == 0
        assert [line.name for line in await service.sessions("anne")] == ["notes"]
        with pytest.raises(NotFoundError):
            await service.inspect("notes", "cleo")
        with pytest.raises(NotFoundError):
            await service.resume("notes", "")
        assert await service.sessions("") == []

    async def after(service: LlamaService) -> None:
        assert (await answer_to(service, chat("hello there", space="dora"))).usage.n_cached == 0
        again = await answer_to(service, chat("hello there", space="bert"))
        assert again.usage.source == "store"

    with open_for(model_path, store) as service:
        run(service, act)
    assert list(store.glob("*.bin")) == []
    with open_for(model_path, store) as service:
        run(service, after)


# ---------------------------------------------------------------- what is done with them


def test_a_fork_begins_as_the_conversation_did(model_path: Path, store: Path) -> None:
    async def act(service: LlamaService) -> None:
        one = await answer_to(service, chat("hello there", session="notes"))
        await answer_to(service, chat("hello there", one.text, "and then?", session="notes"))
        whole = await service.fork("notes", "copy", "", None)
        early = await service.fork("notes", "early", "", "turn1")
        assert (whole.n_turns, early.n_turns) == (2, 1)
        assert early.n_tokens == one.usage.n_prompt + one.usage.n_generated
        with pytest.raises(ExistsError):
            await service.fork("notes", "copy", "", None)
        with pytest.raises(UsageError):
            await service.fork("notes", "a/b", "", None)
        with pytest.raises(NotFoundError):
            await service.fork("nothing", "new", "", None)
        told = await service.inspect("early", "")
        assert told["parent_id"] == (await service.inspect("notes", ""))["id"]
        assert compare_sessions(store / "notes.bin", store / "early.bin") is not None

    with open_for(model_path, store) as service:
        run(service, act)


def test_another_conversation_is_not_saved_over_a_named_one(model_path: Path, store: Path) -> None:
    async def act(service: LlamaService) -> None:
        await answer_to(service, chat("hello there", session="notes"))
        with pytest.raises(ExistsError):
            await service.ask(chat("something quite different", session="notes"))
        again = await answer_to(service, chat("hello there", "another reply", "and then?", session="notes"))
        assert again.finish == "length"
        assert [line.n_turns for line in await service.sessions("")] == [2]

    with open_for(model_path, store) as service:
        run(service, act)


def test_a_conversation_under_way_is_neither_deleted_nor_written_twice(model_path: Path, store: Path) -> None:
    async def act(service: LlamaService) -> None:
        await answer_to(service, chat("hello there", session="notes"))
        answer = await service.ask(chat("hello there", session="notes", sampling=ENDLESS))
        assert [line.is_active for line in await service.sessions("")] == [True]
        with pytest.raises(LockedError):
            await service.delete("notes", "")
        with pytest.raises(LockedError):
            await service.ask(chat("hello there", session="notes"))
        answer.cancel()
        await until(lambda: service.counts.n_active + service.counts.n_waiting == 0)
        await service.delete("notes", "")
        with pytest.raises(NotFoundError):
            await service.delete("notes", "")

    with open_for(model_path, store) as service:
        run(service, act)


def test_two_that_go_on_from_one_are_both_kept(model_path: Path, store: Path) -> None:
    async def act(service: LlamaService) -> None:
        one = await answer_to(service, chat("hello there"))
        await asyncio.gather(
            answer_to(service, chat("hello there", one.text, "and then?")),
            answer_to(service, chat("hello there", one.text, "or what?")),
        )
        assert [line.n_turns for line in await service.sessions("")] == [2, 2]

    with open_for(model_path, store) as service:
        run(service, act)
    assert len(list(store.glob("*.bin"))) == 2


def test_pins_are_limited_and_stay(model_path: Path, store: Path) -> None:
    async def act(service: LlamaService) -> None:
        for n in range(2):
            await answer_to(service, chat(f"question {n}", session=f"s{n}", space="", system=f"{LONG} {n}"))
        line = await service.pin("s0", "", pinned=True)
        assert line.is_pinned
        assert service.counts.n_cells_pinned == line.n_tokens - 1
        with pytest.raises(NoRoomError):
            await service.pin("s1", "", pinned=True)
        assert not (await service.pin("s0", "", pinned=False)).is_pinned
        assert (await service.pin("s1", "", pinned=True)).is_pinned

    with open_for(model_path, store, n_cells=1024) as service:
        run(service, act)


def test_a_pin_that_is_refused_tells_a_space_nothing_of_what_others_pinned(model_path: Path, store: Path) -> None:
    async def act(service: LlamaService) -> None:
        for space in ("ada", "bob"):
            await answer_to(service, chat("hello there", session="notes", space=space))
        line = await service.pin("notes", "ada", pinned=True)
        with pytest.raises(NoRoomError) as refused:
            await service.pin("notes", "bob", pinned=True)
        n_cells = line.n_tokens - 1
        assert refused.value.message.startswith(f"{n_cells} cells more cannot be pinned beside those that are; 512 of")
        assert str(2 * n_cells) not in refused.value.message

    with open_for(model_path, store, n_cells=1024) as service:
        run(service, act)


def test_what_is_pinned_has_cells_though_they_were_just_given_to_others(
    model_path: Path, store: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    async def act(service: LlamaService) -> None:
        await answer_to(service, chat("hello there", session="one"))
        one = service._conversations.get("", "one")
        assert one is not None
        await until(lambda: one.is_saved and one.is_let_go)
        monkeypatch.setattr(service._saver, "sweep", lambda: None)  # which takes notice of that
        with service._scheduler.lock:
            while service._scheduler.admission.drop_one():
                pass
        line = await service.pin("one", "", pinned=True)
        assert (line.is_pinned, line.n_cells_live) == (True, one.n_tokens - 1)
        assert one.run is not None
        assert service._scheduler.has_cells(one.run)

    with open_for(model_path, store, save_delay_s=0.0) as service:
        run(service, act)


def test_a_pin_goes_with_the_conversation(model_path: Path, store: Path) -> None:
    async def act(service: LlamaService) -> None:
        one = await answer_to(service, chat("hello there", session="notes"))
        await service.pin("notes", "", pinned=True)
        await answer_to(service, chat("hello there", one.text, "and then?", session="notes"))
        (line,) = await service.sessions("")
        assert (line.is_pinned, line.n_turns) == (True, 2)

    with open_for(model_path, store) as service:
        run(service, act)


def test_warm_sessions_are_there_and_pinned_from_the_beginning(model_path: Path, store: Path) -> None:
    async def before(service: LlamaService) -> None:
        await answer_to(service, chat("hello there", session="notes"))

    async def after(service: LlamaService) -> None:
        (line,) = await service.sessions("")
        assert (line.is_pinned, line.n_cells_live) == (True, line.n_tokens - 1)
        assert (await answer_to(service, chat("hello there"))).usage.source == "memory"

    with open_for(model_path, store) as service:
        run(service, before)
    with open_for(model_path, store, warm=("notes",)) as service:
        run(service, after)
    with pytest.raises(NotFoundError), open_for(model_path, store, warm=("nothing",)):
        pass


def test_a_session_of_another_model_is_refused_and_left_alone(models: Callable[[str], Path], store: Path) -> None:
    async def before(service: LlamaService) -> None:
        await answer_to(service, chat("hello there", session="notes"))

    async def after(service: LlamaService) -> None:
        with pytest.raises(MismatchError):
            await service.resume("notes", "")
        assert await service.sessions("") == []
        assert (await answer_to(service, chat("hello there"))).usage.n_cached == 0
        with pytest.raises(ExistsError):
            await answer_to(service, chat("hello there", session="notes"))

    with open_for(models("M"), store) as service:
        run(service, before)
    data = (store / "notes.bin").read_bytes()
    with open_for(models("M2"), store) as service:
        run(service, after)
    assert (store / "notes.bin").read_bytes() == data


def test_a_session_of_another_engine_is_read_again_where_that_is_allowed(
    model_path: Path, store: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    async def before(service: LlamaService) -> None:
        await answer_to(service, chat("hello there", session="notes"))

    async def strict(service: LlamaService) -> None:
        with pytest.raises(MismatchError, match="saved by another build"):
            await service.resume("notes", "")

    async def recomputing(service: LlamaService) -> None:
        line = await service.resume("notes", "")
        assert service.counts.n_cells == line.n_tokens
        one = await answer_to(service, chat("hello there"))
        assert (one.usage.source, one.usage.n_cached) == ("memory", one.usage.n_prompt - 1)
        await answer_to(service, chat("hello there", one.text, "and then?"))
        line = await service.save("notes", None, "")
        assert (line.name, line.n_turns) == ("notes", 2)

    with open_for(model_path, store) as service:
        run(service, before)
    first = read_session(store / "notes.bin")
    with monkeypatch.context() as other:
        other.setattr("llamakv.server.loader.reasons_to_recompute", lambda *_: ("saved by another build",))
        with open_for(model_path, store) as service:
            run(service, strict)
        with open_for(model_path, store, recompute=True) as service:
            run(service, recomputing)
    now = read_session(store / "notes.bin")
    assert now.record.lineage.session_id == first.record.lineage.session_id
    assert now.n_cells_held == len(now.record.tokens) - 1


def test_what_chat_saved_is_served(model_path: Path, store: Path, tmp_path: Path) -> None:
    async def before(service: LlamaService) -> None:
        await answer_to(service, chat("hello there", session="notes"))

    with open_for(model_path, store) as service:
        run(service, before)
    with Driver(model_path, tmp_path).resume(store / "notes.bin") as conversation:
        conversation.send("and then?", Heard().reporter)
        said = [message.content for message in conversation.messages]

    async def after(service: LlamaService) -> None:
        three = await answer_to(service, chat(*said[1:], "why?"))
        assert three.usage.source == "store"
        assert [(line.name, line.n_turns) for line in await service.sessions("")] == [("notes", 3)]

    with open_for(model_path, store) as service:
        run(service, after)
    assert [entry.turn for entry in log_session(store / "notes.bin", store).entries if entry.turn][-1] == 3


# ---------------------------------------------------------------- the directory of them


def talk(*contents: str, space: str = "", name: str = "one") -> Conversation:
    from llamakv.records import Message

    messages = tuple(
        Message(role=("user", "assistant")[n % 2], content=content, p0=10 * n, p1=10 * n + 10)
        for n, content in enumerate(contents)
    )
    n = 10 * len(contents)
    return Conversation(
        space=space, place=Place(name=name), created_s=0.0, used_s=0.0, n_tokens=n, tokens=tuple(range(n)),
        template="t", messages=messages, first_text=excerpt(messages, None),
    )  # fmt: skip


def asked(*contents: str) -> list[ChatMessage]:
    return [ChatMessage(role=("user", "assistant")[n % 2], content=content) for n, content in enumerate(contents)]


def found(all_of_them: Conversations, space: str, *contents: str) -> list[tuple[str, int]]:
    return [(known.conversation.name, known.n_tokens) for known in all_of_them.find_chat(space, asked(*contents))]


def test_the_longest_beginning_is_found_first_and_white_space_does_not_count() -> None:
    conversations = Conversations()
    for one in (talk("a", "b"), talk("a", "b", "c", "d", name="two")):
        conversations.make_keys(one)
        conversations.add(one)
    assert found(conversations, "", "a", " b\n", "c", "d", "e")[0] == ("two", 40)
    assert found(conversations, "", "a", "b", "x")[0] == ("two", 20)
    fitting = [("two", 30), ("two", 20), ("one", 20), ("two", 10), ("one", 10)]
    assert found(conversations, "", "a", "b", "c") == fitting
    assert found(conversations, "", "x") == []
    assert found(conversations, "elsewhere", "a", "b", "c") == []


def test_what_is_removed_is_not_found_any_more() -> None:
    conversations = Conversations()
    one = talk("a", "b")
    conversations.make_keys(one)
    conversations.add(one)
    conversations.remove(one)
    assert found(conversations, "", "a", "b", "c") == []
    assert conversations.get("", "one") is None


def test_what_two_begin_with_is_found_when_one_of_them_is_gone() -> None:
    conversations = Conversations()
    one, two = talk("a", "b", "c", "d"), talk("a", "b", name="two")
    for each in (one, two):
        conversations.make_keys(each)
        conversations.add(each)
    assert [name for name, _ in found(conversations, "", "a", "b", "x")[:2]] == ["two", "one"]
    conversations.remove(two)
    assert found(conversations, "", "a", "b", "x")[0] == ("one", 20)
    conversations.remove(one)
    assert found(conversations, "", "a", "b", "x") == []


def test_roles_and_contents_do_not_run_together() -> None:
    conversations = Conversations()
    one = talk("ab", "c")
    conversations.make_keys(one)
    conversations.add(one)
    assert found(conversations, "", "a", "bc", "x") == []


def test_cells_in_common_are_counted_with_the_nearest() -> None:
    one, two, three = (talk("a", name=name) for name in ("one", "two", "three"))
    one.tokens, two.tokens, three.tokens = (1, 2, 3, 4), (1, 2, 9, 9), (7, 7, 7)
    assert shared_cells([one, two, three]) == {one: 2, two: 2, three: 0}

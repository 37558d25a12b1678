"""Who goes on with a named conversation from an earlier place leaves something out, and that stays beside it."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import pytest

from llamakv.errors import WriteError
from llamakv.ops.checking import verify_store
from llamakv.server.contract import Ask
from llamakv.server.service import LlamaService
from llamakv.store.session_file import read_session
from tests.server.load import run_program
from tests.server.service_driver import AT_ONCE_S, GREEDY, LONG, NEVER_S, Heard, answer_to, chat, open_for
from tests.server.test_service import run, until


async def talk(service: LlamaService, *questions: str) -> list[str]:
    """Ask these one after the other, as 'notes'; returns all that was said."""
    told: list[str] = []
    for question in questions:
        told.append(question)
        told.append((await answer_to(service, chat(*told, session="notes"))).text)
    return told


async def heard(service: LlamaService) -> dict[str, list[str]]:
    """What users said in each conversation."""
    found = {}
    for line in await service.sessions(""):
        messages = (await service.inspect(line.name, ""))["messages"]
        assert isinstance(messages, Sequence)
        found[line.name] = [message["content"] for message in messages if message["role"] == "user"]
    return found


def saved_in(store: Path) -> dict[str, list[str]]:
    """What users said in each session."""
    return {
        path.stem: [one.content for one in saved.messages if one.role == "user"]
        for path in store.glob("*.bin")
        if (saved := read_session(path).record.chat)
    }


@pytest.mark.parametrize("delay_s", [AT_ONCE_S, NEVER_S])
@pytest.mark.parametrize("has_store", [True, False])
def test_turns_that_are_left_out_stay_beside_the_conversation(
    model_path: Path, tmp_path: Path, delay_s: float, has_store: bool
) -> None:
    """Whether they were saved already or not."""
    store = tmp_path / "store" if has_store else None
    told: list[str] = []
    ways: dict[str, list[str]] = {}

    async def act(service: LlamaService) -> None:
        told.extend(await talk(service, "one", "two", "three"))
        if has_store and delay_s == AT_ONCE_S:
            await until(lambda: service.counts.n_saves > 0 and not any(map(service._saver._is_unsaved, live(service))))
        await answer_to(service, chat(*told[:2], "other", session="notes"))
        if has_store and delay_s == AT_ONCE_S:
            await until(lambda: not any(map(service._saver._is_unsaved, live(service))))
        ways.update(await heard(service))

    with open_for(model_path, store, save_delay_s=delay_s) as service:
        run(service, act)
    assert ways == {"notes": ["one", "other"], "notes-2": ["one", "two", "three"]}
    if store is None:
        return
    assert verify_store(store, Heard().reporter).n_wrong == 0
    assert saved_in(store) == ways

    async def go_on(service: LlamaService) -> None:
        more = await answer_to(service, chat(*told, "four", session="notes-2"))
        assert more.usage.n_cached > 0.8 * more.usage.n_prompt

    with open_for(model_path, store) as service:
        run(service, go_on)


def live(service: LlamaService) -> list:
    return service._conversations.live()


def test_an_answer_that_is_given_anew_takes_the_place_of_the_first(model_path: Path, tmp_path: Path) -> None:
    async def act(service: LlamaService) -> None:
        told = await talk(service, "one", "two")
        for _ in range(2):
            await answer_to(service, chat(*told[:3], session="notes"))
        await answer_to(service, chat(*told[:3], told[3], "three", session="notes", system=f"{LONG} Be kind."))
        assert await heard(service) == {"notes": ["one", "two", "three"]}

    with open_for(model_path, tmp_path / "store", save_delay_s=AT_ONCE_S) as service:
        run(service, act)


def test_a_pin_stays_with_the_name(model_path: Path) -> None:
    async def act(service: LlamaService) -> None:
        told = await talk(service, "one", "two")
        await service.pin("notes", "", pinned=True)
        await answer_to(service, chat(*told[:2], "other", session="notes"))
        assert {line.name: line.is_pinned for line in await service.sessions("")} == {"notes": True, "notes-2": False}
        assert [run.is_pinned for run in service._scheduler.kept] == [False, True]

    with open_for(model_path, None) as service:
        run(service, act)


def test_what_another_program_said_in_it_stays(model_path: Path, tmp_path: Path) -> None:
    store = tmp_path / "store"
    told: list[str] = []
    warned = Heard()

    async def begin(service: LlamaService) -> None:
        told.extend(await talk(service, "one"))

    async def go_on(service: LlamaService) -> None:
        for question in ("two", "three"):
            told.append(question)
            told.append((await answer_to(service, chat(*told, session="notes"))).text)

    with open_for(model_path, store) as service:
        run(service, begin)
    done = run_program("chat", "--resume", store / "notes.bin", "--message", "theirs", "--max-tokens", 4, "-t", 1)
    assert done.returncode == 0, done.stderr
    with open_for(model_path, store, warned) as service:
        run(service, go_on)
    assert saved_in(store) == {"notes": ["one", "two", "three"], "notes-2": ["one", "theirs"]}
    assert warned.warnings == ["session 'notes' went on without some of its messages, which 'notes-2' has"]


@pytest.mark.parametrize(
    ("second", "names"),
    [
        ("{first}, and then", ["notes"]),  # it goes on
        ("begin", ["notes"]),  # the same again
        ("{begin} in another way that was never told before", ["notes", "notes-2"]),
    ],
)
def test_raw_text_that_is_left_out_stays(model_path: Path, tmp_path: Path, second: str, names: list[str]) -> None:
    async def act(service: LlamaService) -> None:
        begin = f"{LONG} and so it begins"
        first = begin + (await answer_to(service, Ask(prompt=begin, session="notes", sampling=GREEDY))).text
        prompt = begin if second == "begin" else second.format(first=first, begin=LONG)
        await answer_to(service, Ask(prompt=prompt, session="notes", sampling=GREEDY))
        assert sorted(line.name for line in await service.sessions("")) == names

    with open_for(model_path, tmp_path / "store", save_delay_s=NEVER_S) as service:
        run(service, act)


@pytest.mark.parametrize("delay_s", [AT_ONCE_S, NEVER_S])
def test_raw_text_of_several_turns_stays_when_the_first_prompt_comes_again(
    model_path: Path, tmp_path: Path, delay_s: float
) -> None:
    async def act(service: LlamaService) -> None:
        text = begin = f"{LONG} and so it begins"
        for question in ("", " And then?", " And at last?"):
            text += question
            text += (await answer_to(service, Ask(prompt=text, session="notes", sampling=GREEDY))).text
        if delay_s == AT_ONCE_S:
            await until(lambda: not any(map(service._saver._is_unsaved, live(service))))
        await answer_to(service, Ask(prompt=begin, session="notes", sampling=GREEDY))
        if delay_s == AT_ONCE_S:
            await until(lambda: not any(map(service._saver._is_unsaved, live(service))))
        texts = {line.name: (await service.save(line.name, None, "")).n_tokens for line in await service.sessions("")}
        assert sorted(texts) == ["notes", "notes-2"]
        assert texts["notes-2"] > texts["notes"]

    with open_for(model_path, tmp_path / "store", save_delay_s=delay_s) as service:
        run(service, act)


def test_what_is_left_out_is_copied_once_whatever_becomes_of_the_save(
    model_path: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail(*args: object, **more: object) -> None:
        raise WriteError("the disk is full")

    async def act(service: LlamaService) -> None:
        told = await talk(service, "one", "two")
        await service.save("notes", None, "")
        await answer_to(service, chat(*told[:2], "other", session="notes"))
        with monkeypatch.context() as patch:
            patch.setattr("llamakv.server.saver.Keeper.save", fail)
            for _ in range(3):
                with pytest.raises(WriteError):
                    await service.save("notes", None, "")
        await service.save("notes", None, "")

    with open_for(model_path, tmp_path / "store") as service:
        run(service, act)
    assert saved_in(tmp_path / "store") == {"notes": ["one", "other"], "notes-2": ["one", "two"]}

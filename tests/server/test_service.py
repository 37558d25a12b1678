"""Answers of the real service: what they are, what they reuse, and how they end."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from dataclasses import replace
from pathlib import Path

import pytest

from llamakv.engine.text import join
from llamakv.errors import BusyError, EngineError, NoRoomError, UsageError
from llamakv.records import Sampling
from llamakv.server import jobs
from llamakv.server.contract import Ask
from llamakv.server.jobs import UnreadError
from llamakv.server.service import LlamaService
from llamakv.store.session_file import read_session
from tests.ops.driver import GREEDY as GREEDY_OPTIONS
from tests.ops.driver import Driver
from tests.server.service_driver import AT_ONCE_S, ENDLESS, GREEDY, LONG, Heard, answer_to, chat, open_for, said


def run(service: LlamaService, act: Callable[[LlamaService], Awaitable[None]]) -> None:
    async def both() -> None:
        try:
            await act(service)
        finally:
            await service.stop(0.0)

    asyncio.run(both())


def spoil_tokeniser(service: LlamaService, monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """Note each text that is tokenised from now on."""
    texts: list[str] = []
    model = service._opened.model
    real = model.tokenize

    def noted(text: str, **options: bool) -> list[int]:
        texts.append(text)
        return real(text, **options)

    monkeypatch.setattr(model, "tokenize", noted)
    return texts


@pytest.mark.parametrize("name", ["M", "MS", "MR", "MH"])
def test_answers_are_those_of_a_chat(models: Callable[[str], Path], name: str, tmp_path: Path) -> None:
    with Driver(models(name), tmp_path).chat(system=LONG, sampling=replace(GREEDY_OPTIONS, max_tokens=8)) as alone:
        first = alone.send("hello there", Heard().reporter)
        second = alone.send("and then?", Heard().reporter)

    async def act(service: LlamaService) -> None:
        one = await answer_to(service, chat("hello there"))
        assert (one.text, one.finish) == (first.text, first.finish_reason)
        assert one.usage.n_cached == 0
        assert one.usage.source == "none"
        two = await answer_to(service, chat("hello there", one.text, "and then?"))
        assert (two.text, two.usage.n_cached, two.usage.source) == (second.text, second.reused, "memory")
        assert two.usage.n_prompt == second.reused + second.evaluated

    with open_for(models(name), None) as service:
        run(service, act)


def test_what_was_said_before_is_never_tokenised_again(model_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    async def act(service: LlamaService) -> None:
        one = await answer_to(service, chat("hello there"))
        texts = spoil_tokeniser(service, monkeypatch)
        two = await answer_to(service, chat("hello there", one.text, "and then?"))
        assert len(texts) == 1
        assert LONG not in texts[0]
        assert "hello" not in texts[0]
        assert two.usage.n_cached == one.usage.n_prompt + one.usage.n_generated - 1

    with open_for(model_path, None) as service:
        run(service, act)


def test_the_same_question_again_reads_one_token(model_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    async def act(service: LlamaService) -> None:
        one = await answer_to(service, chat("hello there"))
        texts = spoil_tokeniser(service, monkeypatch)
        again = await answer_to(service, chat("hello there"))
        assert texts == []
        assert again.text == one.text
        assert again.usage.n_cached == again.usage.n_prompt - 1
        assert len(await service.sessions("")) == 1

    with open_for(model_path, None) as service:
        run(service, act)


def test_an_earlier_reply_is_kept_when_a_later_message_is_changed(model_path: Path) -> None:
    async def act(service: LlamaService) -> None:
        one = await answer_to(service, chat("hello there"))
        two = await answer_to(service, chat("hello there", one.text, "and then?"))
        three = await answer_to(service, chat("hello there", one.text, "something else"))
        assert three.usage.n_cached >= one.usage.n_prompt + one.usage.n_generated - 1
        assert sorted(line.n_turns for line in await service.sessions("")) == [2, 2]
        assert two.usage.n_prompt == three.usage.n_prompt or two.text

    with open_for(model_path, None) as service:
        run(service, act)


def test_eight_at_once_read_what_they_have_in_common_once(model_path: Path) -> None:
    async def act(service: LlamaService) -> None:
        answers = await asyncio.gather(*(answer_to(service, chat(f"question {n}")) for n in range(8)))
        n_prompt = sum(one.usage.n_prompt for one in answers)
        counts = service.counts
        assert counts.n_prompt_tokens == n_prompt
        assert counts.n_evaluated < 2 * answers[0].usage.n_prompt
        assert counts.n_reused_memory + counts.n_evaluated == n_prompt
        for n, one in enumerate(answers):
            alone = await answer_to(service, chat(f"question {n}"))
            assert one.text == alone.text

    with open_for(model_path, None) as service:
        run(service, act)


def test_several_choices_differ_by_their_seeds_and_read_the_prompt_once(model_path: Path) -> None:
    sampling = Sampling(temperature=1.5, top_k=0, top_p=1.0, min_p=0.0, max_tokens=6, seed=5)

    async def act(service: LlamaService) -> None:
        three = await answer_to(service, chat("hello there", n_choices=3, sampling=sampling))
        assert sorted(three.finishes) == [0, 1, 2]
        assert len(set(three.texts.values())) == 3
        assert service.counts.n_evaluated == three.usage.n_prompt + 2
        second = await answer_to(service, chat("hello there", sampling=replace(sampling, seed=6)))
        assert second.text == three.texts[1]

    with open_for(model_path, None) as service:
        run(service, act)


def test_text_and_tokens_are_gone_on_with(model_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    async def act(service: LlamaService) -> None:
        one = await answer_to(service, Ask(prompt=LONG, sampling=GREEDY))
        texts = spoil_tokeniser(service, monkeypatch)
        two = await answer_to(service, Ask(prompt=LONG + one.text + " and so", sampling=GREEDY))
        assert texts == [" and so"]
        assert two.usage.n_cached == one.usage.n_prompt + one.usage.n_generated - 1
        tokens = tuple(service._opened.model.tokenize(LONG, add_special=True, parse_special=True))
        three = await answer_to(service, Ask(prompt=tokens, sampling=GREEDY))
        assert three.text == one.text
        assert three.usage.n_cached == len(tokens) - 1

    with open_for(model_path, None) as service:
        run(service, act)


def test_two_that_were_told_the_same_can_both_go_on_from_it(model_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    async def act(service: LlamaService) -> None:
        one = await answer_to(service, Ask(prompt=LONG, sampling=GREEDY))
        same = await answer_to(service, Ask(prompt=LONG, sampling=GREEDY))
        assert same.text == one.text
        texts = spoil_tokeniser(service, monkeypatch)
        n_there = one.usage.n_prompt + one.usage.n_generated - 1
        two = await answer_to(service, Ask(prompt=f"{LONG}{one.text} and so", sampling=GREEDY))
        other = await answer_to(service, Ask(prompt=f"{LONG}{one.text} or else", sampling=GREEDY))
        third = await answer_to(service, Ask(prompt=f"{LONG}{one.text} and so{two.text} it is", sampling=GREEDY))
        again = await answer_to(service, Ask(prompt=f"{LONG}{one.text} or not", sampling=GREEDY))
        assert texts == [" and so", " or else", " it is", " or not"]
        assert two.usage.n_cached == n_there
        assert min(other.usage.n_cached, again.usage.n_cached) >= n_there  # and blanks they begin with alike
        assert third.usage.n_cached == two.usage.n_prompt + two.usage.n_generated - 1

    with open_for(model_path, None) as service:
        run(service, act)


def test_a_stop_string_is_not_said_and_not_taken_for_what_was_said(model_path: Path) -> None:
    async def act(service: LlamaService) -> None:
        whole = await answer_to(service, chat("hello there"))
        stop = whole.text.strip().split()[-1]
        cut = await answer_to(service, chat("hello there", sampling=replace(GREEDY, stop=(stop,))))
        assert cut.finish == "stop"
        assert stop not in cut.text
        two = await answer_to(service, chat("hello there", cut.text, "and then?"))
        fresh = await answer_to(service, chat("hello there", cut.text, "and then?", space="other"))
        assert two.text == fresh.text
        model = service._opened.model
        (read,) = [one.tokens for one in service._conversations.live("") if one.n_turns == 2]
        assert f"{cut.text}<|im_end|>" in join(model.token_bytes(token, special=True) for token in read)

    with open_for(model_path, None) as service:
        run(service, act)


def test_probabilities_come_with_their_tokens(model_path: Path) -> None:
    async def act(service: LlamaService) -> None:
        one = await answer_to(service, chat("hello there", n_top_logprobs=3))
        told = [logprob for piece in one.pieces for logprob in piece.logprobs]
        assert len(told) == one.usage.n_generated
        assert b"".join(logprob.text for logprob in told).decode() == one.text
        assert all(len(logprob.top) == 3 and logprob.top[0].token == logprob.token for logprob in told)

    with open_for(model_path, None) as service:
        run(service, act)


def test_pieces_nobody_reads_are_joined(model_path: Path) -> None:
    async def act(service: LlamaService) -> None:
        fast = await answer_to(service, chat("hello there", sampling=replace(GREEDY, max_tokens=40), n_top_logprobs=0))
        slow = await service.ask(chat("hello there", sampling=replace(GREEDY, max_tokens=40), n_top_logprobs=0))
        await until(lambda: any(piece.finish_reason for piece in slow._outbox._waiting.values()))
        late = await said(slow)
        assert len(late.pieces) == 1
        assert late.text == fast.text
        assert len(late.pieces[0].logprobs) == 40

    with open_for(model_path, None) as service:
        run(service, act)


def test_probabilities_that_were_told_are_not_held_any_longer(model_path: Path) -> None:
    async def act(service: LlamaService) -> None:
        answer = await service.ask(chat("hello there", sampling=GREEDY, n_top_logprobs=20))
        one = await said(answer)
        assert sum(len(piece.logprobs) for piece in one.pieces) == 8
        assert [len(job.run.logprobs) for job in answer._jobs if job.run is not None] == [0]

    with open_for(model_path, None) as service:
        run(service, act)


def test_an_answer_of_which_too_much_waits_is_ended_and_frees_its_cells(
    model_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(jobs, "WAITING_BYTES_MAX", 50_000)

    async def act(service: LlamaService) -> None:
        slow = await service.ask(chat("hello there", sampling=ENDLESS, n_choices=2, n_top_logprobs=20))
        await until(lambda: service.counts.n_active + service.counts.n_waiting == 0)
        assert service.counts.n_cells == 0
        assert 12 <= service.counts.n_generated < 200
        with pytest.raises(UnreadError, match="bytes of the answer were not read, 50000 may wait"):
            await said(slow)
        assert (await answer_to(service, chat("hello there"))).finish == "length"

    with open_for(model_path, None) as service:
        run(service, act)


def test_counts_of_a_space_say_nothing_of_the_others(model_path: Path) -> None:
    async def act(service: LlamaService) -> None:
        before = await service.counts_of("bob")
        one = await answer_to(service, chat("hello there", space="ada"))
        two = await answer_to(service, chat("another", space="ada"))
        endless = await service.ask(chat("one more", space="ada", sampling=ENDLESS))
        async for _ in endless.pieces():
            others = await service.counts_of("bob")
            assert replace(others, n_ctx=0) == replace(before, n_ctx=0)
            assert (await service.counts_of("ada")).n_active == 1
            break
        endless.cancel()
        await until(lambda: service.counts.n_active + service.counts.n_waiting == 0)
        own, of_all = await service.counts_of("ada"), service.counts
        three = await answer_to(service, chat("hello there", space="bob"))
        bob = await service.counts_of("bob")
        assert (own.n_live, own.n_cells) == (of_all.n_live, of_all.n_cells)
        assert own.n_cells < one.usage.n_prompt + two.usage.n_prompt  # shared ones count once
        assert (bob.n_prompt_tokens, bob.n_generated, bob.n_live) == (three.usage.n_prompt, 8, 1)
        assert bob.n_cells == three.usage.n_prompt + 7
        assert service.counts.n_generated == own.n_generated + 8
        assert await service.counts_of("") == service.counts

    with open_for(model_path, None) as service:
        run(service, act)


# ---------------------------------------------------------------- how answers end


def test_a_cancelled_answer_frees_its_cells_and_others_go_on(model_path: Path) -> None:
    endless = replace(GREEDY, max_tokens=3000)

    async def act(service: LlamaService) -> None:
        leaving, staying = await asyncio.gather(
            service.ask(chat("one", sampling=endless)), service.ask(chat("another"))
        )
        async for _ in leaving.pieces():
            break
        leaving.cancel()
        assert (await said(staying)).finish == "length"
        await until(lambda: service.counts.n_active + service.counts.n_waiting == 0)
        assert [line.first_text for line in await service.sessions("")] == ["another"]

    with open_for(model_path, None) as service:
        run(service, act)


def test_of_a_named_conversation_what_was_said_is_kept_when_its_user_leaves(model_path: Path, tmp_path: Path) -> None:
    endless = replace(GREEDY, max_tokens=3000)

    async def act(service: LlamaService) -> None:
        leaving = await service.ask(chat("one", session="talk", sampling=endless))
        text = ""
        async for piece in leaving.pieces():
            text += piece.text
            if len(text) > 40:
                break
        leaving.cancel()
        await until(lambda: service.counts.n_active + service.counts.n_waiting == 0)
        (line,) = await service.sessions("")
        assert (line.name, line.n_turns, line.is_active) == ("talk", 1, False)
        words = service._conversations.get("", "talk")
        assert words is not None
        assert words.messages[-1].content.startswith(text)
        assert words.messages[-1].finish == "interrupted"
        again = await answer_to(service, chat("one", words.messages[-1].content, "and then?", session="talk"))
        assert again.usage.n_cached == line.n_tokens - 1
        assert (await service.save("talk", None, "")).is_saved

    with open_for(model_path, tmp_path / "store") as service:
        run(service, act)
    chat_saved = read_session(tmp_path / "store" / "talk.bin").record.chat
    messages = chat_saved.messages if chat_saved is not None else ()
    assert [message.finish for message in messages if message.role == "assistant"] == ["interrupted", "length"]


def test_an_answer_that_waits_can_be_cancelled(model_path: Path) -> None:
    endless = replace(GREEDY, max_tokens=3000)

    async def act(service: LlamaService) -> None:
        first = await service.ask(chat("one", sampling=endless))
        waiting = await service.ask(chat("another"))
        waiting.cancel()
        assert (await said(waiting)).finish == "interrupted"
        first.cancel()
        await until(lambda: service.counts.n_active + service.counts.n_waiting == 0)
        assert service.counts.n_cells == 0

    with open_for(model_path, None, n_sequences=2) as service:
        run(service, act)


def test_the_time_in_the_queue_is_told_and_ends_with_it(model_path: Path) -> None:
    async def act(service: LlamaService) -> None:
        first = await service.ask(chat("one", sampling=ENDLESS))
        waiting = await service.ask(chat("another"))
        while waiting.usage.queued_s < 0.05:
            await asyncio.sleep(0.01)
        first.cancel()
        async for _ in waiting.pieces():
            break
        queued_s = waiting.usage.queued_s
        assert queued_s >= 0.05
        await asyncio.sleep(0.01)
        assert waiting.usage.queued_s == queued_s

    with open_for(model_path, None, n_sequences=2) as service:
        run(service, act)


def test_a_full_queue_says_when_to_come_again(model_path: Path) -> None:
    endless = replace(GREEDY, max_tokens=3000)

    async def act(service: LlamaService) -> None:
        answers = [await service.ask(chat(f"{n}", sampling=endless)) for n in range(2)]
        assert service.counts.n_waiting + service.counts.n_active == 2
        with pytest.raises(BusyError) as refused:
            await service.ask(chat("one too many"))
        assert 1 <= int(refused.value.fields["retry_after_s"] or 0) <= 60
        for one in answers:
            one.cancel()
        await until(lambda: service.counts.n_active + service.counts.n_waiting == 0)
        assert (await answer_to(service, chat("now there is room"))).finish == "length"

    with open_for(model_path, None, n_sequences=2, n_waiting_max=1) as service:
        run(service, act)


def test_time_in_the_queue_counts(model_path: Path) -> None:
    endless = replace(GREEDY, max_tokens=6000)

    async def act(service: LlamaService) -> None:
        first = await service.ask(chat("one", sampling=endless))
        waiting = await answer_to(service, chat("another", timeout_s=0.05))
        assert (waiting.text, waiting.finish, waiting.usage.n_generated) == ("", "timeout", 0)
        first.cancel()

    with open_for(model_path, None, n_sequences=2, n_cells=8192) as service:
        run(service, act)


def test_what_was_written_until_the_time_was_up_is_kept(model_path: Path) -> None:
    async def act(service: LlamaService) -> None:
        one = await answer_to(service, chat("one", sampling=replace(GREEDY, max_tokens=None), timeout_s=0.4))
        assert one.finish == "timeout"
        assert [line.n_tokens for line in await service.sessions("")] == [one.usage.n_prompt + one.usage.n_generated]

    with open_for(model_path, None, n_cells=8192) as service:
        run(service, act)


@pytest.mark.parametrize(
    ("ask", "error"),
    [
        (chat("x", session="../outside"), UsageError),
        (chat("x", sampling=replace(GREEDY, grammar="nonsense ::=")), UsageError),
        (Ask(prompt="", sampling=GREEDY), UsageError),
        (Ask(prompt=(10**6,), sampling=GREEDY), UsageError),
        (chat(LONG * 3), NoRoomError),
    ],
)
def test_what_cannot_be_done_is_refused_and_leaves_nothing(model_path: Path, ask: Ask, error: type[Exception]) -> None:
    async def act(service: LlamaService) -> None:
        with pytest.raises(error):
            await service.ask(ask)
        assert service.counts.n_waiting == 0
        assert (await answer_to(service, chat("hello there"))).finish == "length"

    with open_for(model_path, None, n_ctx=400) as service:
        run(service, act)


def test_a_failed_engine_fails_what_is_under_way_and_takes_no_more(
    model_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    heard = Heard()

    async def act(service: LlamaService) -> None:
        one = await service.ask(chat("hello there", sampling=replace(GREEDY, max_tokens=3000)))

        def broken(*_: object) -> None:
            raise RuntimeError("the wires are cut")

        monkeypatch.setattr(service._scheduler, "step", broken)
        with pytest.raises(EngineError, match="the wires are cut"):
            await said(one)
        assert not service.is_ready
        with pytest.raises(EngineError):
            await service.ask(chat("anybody there?"))
        assert service.counts.n_waiting == 0

    with open_for(model_path, None, heard) as service:
        run(service, act)
    assert len(heard.warnings) == 1


def test_all_cells_are_free_when_all_is_deleted(model_path: Path, tmp_path: Path) -> None:
    async def act(service: LlamaService) -> None:
        await asyncio.gather(*(answer_to(service, chat(f"question {n}")) for n in range(4)))
        assert service.counts.n_cells > 0
        for line in await service.sessions(""):
            await service.delete(line.name, "")
        counts = service.counts
        assert (counts.n_cells, counts.n_live, counts.n_active, counts.n_waiting) == (0, 0, 0, 0)
        assert await service.sessions("") == []

    with open_for(model_path, tmp_path / "store", save_delay_s=AT_ONCE_S) as service:
        run(service, act)
    assert list((tmp_path / "store").glob("*.bin")) == []


def test_a_stop_lets_answers_end_and_a_hurried_one_keeps_what_was_written(model_path: Path, tmp_path: Path) -> None:
    async def patient(service: LlamaService) -> None:
        answer = await service.ask(chat("hello there", session="patient"))
        stopping = asyncio.ensure_future(service.stop(60.0))
        assert (await said(answer)).finish == "length"
        await stopping

    async def hurried(service: LlamaService) -> None:
        answer = await service.ask(chat("hello there", session="cut", sampling=replace(GREEDY, max_tokens=6000)))
        pieces = answer.pieces()
        await anext(pieces)
        stopping = asyncio.ensure_future(service.stop(60.0))
        await asyncio.sleep(0)
        with pytest.raises(BusyError):
            await service.ask(chat("too late"))
        await service.stop(0.0)
        await stopping
        assert [piece async for piece in pieces][-1].finish_reason == "interrupted"

    for act in (patient, hurried):
        with open_for(model_path, tmp_path / "store", n_cells=8192) as service:
            asyncio.run(act(service))
    heard = Heard()
    driver = Driver(model_path, tmp_path)
    with driver.resume(tmp_path / "store" / "cut.bin") as conversation:
        assert conversation.messages[-1].finish == "interrupted"
        assert conversation.messages[-1].p1 > conversation.messages[-1].p0 + 1
    assert heard.warnings == []


async def until(is_so: Callable[[], bool]) -> None:
    async with asyncio.timeout(30):
        while not is_so():
            await asyncio.sleep(0.005)

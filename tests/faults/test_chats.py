"""Going on with a chat: nothing of it is lost, doubled, or read in another way (known-faults E and H)."""

from __future__ import annotations

import dataclasses
from pathlib import Path

import pytest

from llamakv.engine.text import join
from llamakv.errors import NoRoomError
from llamakv.ops.requests import SamplingOptions
from llamakv.records import SessionRecord
from llamakv.store.session_file import SessionReader, create_session, read_session
from tests.models.templates import THINK
from tests.models.vocabulary import BOS, FIRST_BYTE
from tests.ops.driver import GREEDY, Driver, Heard, sha, state_of

LONG = "The quick brown fox jumps over the lazy dog. " * 12
EMOJI = "🙂"


def tokens_of(text: str) -> list[int]:
    """The bytes of a text as byte tokens of the tiny models."""
    return [FIRST_BYTE + byte for byte in text.encode()]


def only(text: str, n: int = 1) -> SamplingOptions:
    """Let the model write this text and nothing else, ``n`` tokens of it at a time."""
    return SamplingOptions(temperature=0, seed=0, max_tokens=n, grammar=f'root ::= "{text}"')


def without_times(record: SessionRecord) -> SessionRecord:
    lineage = dataclasses.replace(record.lineage, created_s=0.0, updated_s=0.0, n_saves=0)
    return dataclasses.replace(record, lineage=lineage)


# ---------------------------------------------------------------- all of it comes back


def test_every_field_survives_load_turn_save_load(variant, tmp_path: Path) -> None:
    # B46, B47
    driver, path = Driver(variant("M", "own", template=THINK), tmp_path), tmp_path / "a.bin"
    options = SamplingOptions(
        temperature=0.3,
        top_k=7,
        top_p=0.9,
        min_p=0.01,
        repeat_penalty=1.2,
        frequency_penalty=0.1,
        presence_penalty=0.2,
        penalty_last_n=33,
        seed=5,
        max_tokens=6,
        logit_bias=((400, float("-inf")), (401, 0.5)),
        stop=("END", "STOP"),
        grammar="root ::= [a-z ]+",
    )
    with driver.chat(save=path, sampling=options, system="Be kind.", name="own") as live:
        live.send("One.", Heard().reporter)
        live.send("Two.", Heard().reporter)
    first = read_session(path).record
    other = Driver(variant("M", "own", template=THINK), tmp_path)
    with other.resume(path) as again:
        again.send("Three.", Heard().reporter)
    second = read_session(path).record
    assert second.chat is not None
    assert first.chat is not None
    assert second.sampling == first.sampling
    assert dataclasses.astuple(first.sampling)[:9] == (0.3, 7, 0.9, 0.01, 1.2, 0.1, 0.2, 33, 5)
    assert (second.chat.template, second.chat.template_digest) == (THINK, first.chat.template_digest)
    assert second.chat.messages[:5] == first.chat.messages
    assert [m.role for m in second.chat.messages] == ["system", *["user", "assistant"] * 3]
    assert second.chat.messages[0].content == "Be kind."
    assert (second.lineage.session_id, second.lineage.name) == (first.lineage.session_id, "own")
    assert dataclasses.replace(second, tokens=(), chat=None, lineage=first.lineage) == dataclasses.replace(
        first, tokens=(), chat=None
    )
    with driver.resume(path) as once_more:
        once_more.save(None, Heard().reporter)
        assert once_more.messages == second.chat.messages
    third = read_session(path).record
    assert third != second
    assert without_times(third) == without_times(second)
    assert (third.lineage.created_s, third.lineage.n_saves) == (second.lineage.created_s, second.lineage.n_saves + 1)
    assert third.lineage.updated_s > second.lineage.updated_s


@pytest.mark.parametrize("name", ["M", "MS", "MR", "MH"])
def test_tokens_the_tokeniser_would_not_choose_are_kept(models, tmp_path: Path, name: str) -> None:
    # B50
    driver, path, forced = Driver(models(name), tmp_path), tmp_path / "a.bin", tmp_path / "b.bin"
    with driver.chat(save=path) as live:
        live.send("One.", Heard().reporter)
        model, opened = live._model.model, live._model
        one, said = live.messages
        letters = [t for text in said.content for t in tokens_of(text)]
        tokens = [*live._model.sequence.tokens[: one.p1], *letters]
        assert model.tokenize(said.content, add_special=False, parse_special=False) != letters
        assert join(model.token_bytes(token) for token in letters) == said.content
        sequence = opened.open_sequence()
        sequence.extend(tokens)
        messages = (one, dataclasses.replace(said, p1=len(tokens)))
        record = read_session(path).record
        chat = dataclasses.replace(record.chat, messages=messages)
        create_session(forced, dataclasses.replace(record, tokens=tuple(tokens), chat=chat), sequence.export())
    with driver.resume(forced) as again:
        answer = again.send("Two.", Heard().reporter)
        assert answer.reused == len(tokens) - 1
        assert state_of(again)[0][: len(tokens)] == tokens
    assert list(read_session(forced).record.tokens)[: len(tokens)] == tokens


def test_raw_text_and_its_question_are_read_as_they_are(models, tmp_path: Path) -> None:
    # B53: no template around either; B52: one start token where the model wants one
    for name in ("M", "no_template", "bos_template"):
        driver, path = Driver(models(name), tmp_path), tmp_path / f"{name}.bin"
        driver.save(path, LONG, raw=True)
        kept = tmp_path / f"{name}-answered.bin"
        answer = driver.load(path, " Who jumps?", save=kept)
        with driver.chat() if name != "no_template" else Driver(models("M"), tmp_path).chat() as any_chat:
            model = any_chat._model.model
            wanted = model.tokenize(LONG, add_special=True, parse_special=True)
            wanted += model.tokenize(" Who jumps?", add_special=False, parse_special=True)
        tokens = list(read_session(kept).record.tokens)
        assert tokens[: len(wanted)] == wanted
        assert len(tokens) == len(wanted) + answer.generated
        assert [i for i, token in enumerate(tokens) if token == BOS] == ([0] if name == "bos_template" else [])


# ---------------------------------------------------------------- sampling


def test_the_seed_given_on_resuming_decides(dense: Driver, tmp_path: Path) -> None:
    # B54
    path = tmp_path / "a.bin"
    options = SamplingOptions(temperature=1.0, max_tokens=12, seed=1)
    with dense.chat(save=path, sampling=options) as live:
        live.send("Hello.", Heard().reporter)

    def go_on(**more: int) -> tuple[str, int]:
        answer = dense.load(path, "And?", sampling=SamplingOptions(**more))
        return answer.text, answer.seed

    assert go_on() == go_on() == go_on(seed=1)
    assert go_on(seed=2) == go_on(seed=2)
    texts = [go_on(seed=seed) for seed in (1, 2, -1, -1)]
    assert len({text for text, _ in texts}) == len({seed for _, seed in texts}) == 4


@pytest.mark.parametrize("penalty", [{"repeat_penalty": 1.3}, {"frequency_penalty": 0.8}, {"presence_penalty": 1.5}])
def test_penalties_remember_what_was_said_before_the_save(dense: Driver, tmp_path: Path, penalty) -> None:
    # B55
    path = tmp_path / "a.bin"
    options = SamplingOptions(temperature=0.0, max_tokens=24, seed=3, penalty_last_n=64, **penalty)
    with dense.chat(save=path, sampling=options) as live:
        live.send("Hello.", Heard().reporter)
        with dense.resume(path, save=tmp_path / "b.bin") as again:
            live.send("More.", Heard().reporter)
            again.send("More.", Heard().reporter)
            assert state_of(again) == state_of(live)
        with dense.resume(
            path, sampling=SamplingOptions(**dict.fromkeys(penalty, 1.0)), save=tmp_path / "c.bin"
        ) as plain:
            plain.send("More.", Heard().reporter)
            assert state_of(plain)[0] != state_of(live)[0]


# ---------------------------------------------------------------- room


def test_a_message_too_long_for_what_is_left_names_used_limit_and_needed(dense: Driver, tmp_path: Path) -> None:
    # B57
    path = tmp_path / "a.bin"
    with dense.chat(save=path) as live:
        live.send(LONG, Heard().reporter)
        n_tokens = len(state_of(live)[0])
    before = sha(path)
    with dense.resume(path, model=dense.request(n_ctx=n_tokens + 20)) as again:
        with pytest.raises(NoRoomError) as refused:
            again.send("the " * 100, Heard().reporter)
        fields = refused.value.fields
        assert (fields["used"], fields["limit"]) == (n_tokens - 1, n_tokens + 20)
        for number in (n_tokens - 1, n_tokens + 20, int(fields["needed"])):
            assert f"{number:,}" in refused.value.message
        assert sha(path) == before
    with dense.resume(path, model=dense.request(n_ctx=int(fields["needed"]))) as roomy:
        assert roomy.send("the " * 100, Heard().reporter).generated == 1


# ---------------------------------------------------------------- half characters


def test_characters_of_several_tokens_stream_whole(models, tmp_path: Path) -> None:
    # B86
    driver, text, heard = Driver(models("M"), tmp_path), f"a{EMOJI}数 é", Heard()
    with driver.chat(sampling=only(text, 100)) as live:
        answer = live.send("Say it.", heard.reporter)
        assert answer.text == "".join(heard.texts) == text
        assert answer.generated > len(text)


@pytest.mark.parametrize("n_tokens", [1, 2, 3, 5, 6])
@pytest.mark.parametrize("name", ["M", "MR"])
def test_raw_text_left_in_the_middle_of_a_character_is_whole_after_the_next_run(
    models, tmp_path: Path, name: str, n_tokens: int
) -> None:
    # B86
    driver, path, text = Driver(models(name), tmp_path), tmp_path / "a.bin", f"{EMOJI}数"
    driver.save(path, "Say it:", raw=True)
    byte_tokens = tokens_of(text)
    with SessionReader(path) as reader:
        record = reader.info.record
        base = list(reader.read(reader.info.sections))
    with driver.chat() as live:
        sequence = live._model.open_sequence()
        sequence.restore(record.tokens, base)
        sequence.extend(byte_tokens[:n_tokens])
        left = dataclasses.replace(
            record, tokens=tuple(sequence.tokens), text=f"Say it:{text.encode()[:n_tokens].decode('utf-8', 'replace')}"
        )
        create_session(path, left, sequence.export(), overwrite=True)
    for token in byte_tokens[n_tokens:]:
        sampling = SamplingOptions(temperature=0, max_tokens=1, logit_bias=((token, 1000.0),))
        driver.load(path, sampling=sampling, save=path)
    after = read_session(path).record
    assert list(after.tokens) == [*record.tokens, *byte_tokens]
    assert after.text == f"Say it:{text}"


def test_a_reply_left_in_the_middle_of_a_character_keeps_its_tokens(dense: Driver, tmp_path: Path) -> None:
    # B86, B49
    path, heard = tmp_path / "a.bin", Heard()
    with dense.chat(save=path, sampling=only(f"a{EMOJI}", 3)) as live:
        answer = live.send("Say it.", heard.reporter)
        assert answer.text == "".join(heard.texts) == "a\ufffd"
        tokens = state_of(live)[0]
    with dense.resume(path, sampling=dataclasses.replace(GREEDY, grammar='root ::= "yes"')) as again:
        assert again.messages[-1].content == "a\ufffd"
        assert again.send("Go on.", Heard().reporter).text == "yes"
        assert state_of(again)[0][: len(tokens)] == tokens
        assert tokens[-2:] == tokens_of(EMOJI)[:2]

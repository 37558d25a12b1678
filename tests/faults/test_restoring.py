"""What a file brings back, and into which setup it may come (known-faults A, B, C and G)."""

from __future__ import annotations

import dataclasses
import os
import shutil
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from llamakv.errors import MismatchError, UsageError
from llamakv.ops import keeping
from llamakv.ops.requests import SamplingOptions
from llamakv.store.session_file import read_session
from tests.faults.conftest import tokens_of
from tests.models.writer import WINDOW
from tests.ops.driver import GREEDY, Driver, Heard, sha, state_of
from tests.store.test_damage import join, reseal, split

KINDS = ["M", "MS", "MR", "MH", "MH2", "ML"]
LONG = "The quick brown fox jumps over the lazy dog. " * 12
EIGHT = SamplingOptions(temperature=0.0, max_tokens=8, seed=0)
MANY = SamplingOptions(temperature=0.0, max_tokens=32, seed=0)


@pytest.fixture(params=KINDS)
def driver(request: pytest.FixtureRequest, models, tmp_path: Path) -> Driver:
    return Driver(models(request.param), tmp_path)


def words(n_tokens: int) -> str:
    """Text of exactly so many tokens for the tiny models."""
    return "the" + " the" * (n_tokens - 2)


@pytest.mark.parametrize("n_tokens", [WINDOW + 1, 2 * WINDOW, 2 * WINDOW + 7, 3 * WINDOW])
def test_texts_around_the_window_go_on_as_if_never_left(models, tmp_path: Path, n_tokens: int) -> None:
    # B03, B04
    driver, path = Driver(models("MS"), tmp_path), tmp_path / "a.bin"
    driver.save(path, words(n_tokens), raw=True)
    tokens = read_session(path).record.tokens
    assert len(tokens) == n_tokens
    answer = driver.load(path, sampling=MANY, save=tmp_path / "b.bin")
    with driver.chat() as cold:
        sequence = cold._model.open_sequence()
        sequence.extend(tokens)
        expected = list(sequence.generate(dataclasses.replace(cold.sampling, temperature=0.0), n_max=32))
    assert (answer.reused, answer.evaluated, answer.generated) == (n_tokens - 1, 1, 32)
    assert list(read_session(tmp_path / "b.bin").record.tokens) == [*tokens, *expected]


def test_history_that_is_read_differently_now_is_announced_with_its_count(variant, models, tmp_path: Path) -> None:
    # B02, B51: thinking is dropped from earlier replies; recurrent memory cannot go back into the reply
    from tests.models.templates import THINK

    driver, path, heard = Driver(variant("MR", "think", template=THINK), tmp_path), tmp_path / "a.bin", Heard()
    grammar = SamplingOptions(temperature=0, max_tokens=40, grammar='root ::= "<think>abc</think>yes"', seed=1)
    with driver.chat(save=path, sampling=grammar) as live:
        live.send("One.", Heard().reporter)
        p0 = live.messages[-1].p0
    with driver.resume(path) as again:
        again.send("Two.", heard.reporter)
    assert len(heard.notices) == 2
    assert "tokens are read again" in heard.notices[0]
    assert f"{p0 - 1} tokens were read again" in heard.notices[1]


def test_a_side_task_never_touches_the_file_it_came_from(driver: Driver, tmp_path: Path) -> None:
    # B07, B67
    main, side = tmp_path / "main.bin", tmp_path / "side.bin"
    with driver.chat(save=main) as live:
        live.send(LONG, Heard().reporter)
    before = sha(main)
    main.chmod(0o444)
    driver.load(main, "A side question?")
    driver.load(main, "A side question?", save=side)
    with driver.resume(main, save=tmp_path / "other.bin") as branch:
        branch.send("Elsewhere.", Heard().reporter)
    assert sha(main) == before
    assert [m.content for m in read_session(side).record.chat.messages if m.role == "user"] == [
        LONG,
        "A side question?",
    ]


def test_the_third_of_three_saves_within_one_instant_is_the_one_that_counts(
    dense: Driver, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    # B09
    monkeypatch.setattr(keeping.time, "time", lambda: 1_700_000_000.0)
    path = tmp_path / "a.bin"
    with dense.chat(save=path) as live:
        for text in ("One.", "Two.", "Three."):
            live.send(text, Heard().reporter)
    record = read_session(path).record
    assert (record.lineage.n_saves, record.lineage.updated_s) == (3, 1_700_000_000.0)
    assert [m.content for m in record.chat.messages if m.role == "user"] == ["One.", "Two.", "Three."]


def test_what_followed_a_prefix_does_not_linger(driver: Driver, tmp_path: Path) -> None:
    # B11: the same for the prefix and for all but its last token
    with driver.chat(sampling=EIGHT) as chat:
        opened, model = chat._model, chat._model.model
        prompt = model.tokenize(LONG, add_special=True, parse_special=True)
        tail = model.tokenize(" Z Z Z Z", add_special=False, parse_special=True)
        for wanted in (prompt, prompt[:-1]):
            cold = opened.open_sequence()
            cold.extend(wanted)
            expected = list(cold.generate(chat.sampling, n_max=8))
            live = opened.open_sequence()
            live.extend([*prompt, *tail])
            live.rewind(len(wanted))
            assert list(live.generate(chat.sampling, n_max=8)) == expected


def test_large_and_small_sessions_in_turn_each_continue_as_their_own(driver: Driver, tmp_path: Path) -> None:
    # B13, B14, B16
    texts = {"large": LONG * 3, "small": "Hi."}
    expected = {}
    for name, text in texts.items():
        with driver.chat(save=tmp_path / f"{name}.bin", sampling=EIGHT) as live:
            live.send(text, Heard().reporter)
        with driver.resume(tmp_path / f"{name}.bin", save=tmp_path / f"{name}-cold.bin") as cold:
            cold.send("And?", Heard().reporter)
            expected[name] = state_of(cold)
        shutil.copy(tmp_path / f"{name}.bin", tmp_path / f"{name}-kept.bin")
    with driver.chat(sampling=EIGHT) as live:
        for name in ("large", "small", "large", "small", "small"):
            shutil.copy(tmp_path / f"{name}-kept.bin", tmp_path / f"{name}.bin")
            live.load(tmp_path / f"{name}.bin", Heard().reporter)
            live.send("And?", Heard().reporter)
            assert state_of(live) == expected[name]
            assert live.stats().n_cells == len(expected[name][0]) - 1


def test_a_session_of_one_token_replaces_all_there_was(driver: Driver, tmp_path: Path) -> None:
    # B14, B15
    path = tmp_path / "one.bin"
    driver.save(path, "x", raw=True)
    info = read_session(path)
    assert (len(info.record.tokens), info.sections) == (1, ())
    with driver.chat() as live:
        live.send(LONG, Heard().reporter)
        fresh = live._model.open_sequence()
        fresh.extend([400] * 300)
        fresh.restore(info.record.tokens, [])
        assert (fresh.n_cells, list(fresh.tokens)) == (0, list(info.record.tokens))
        ids = list(fresh.generate(live.sampling, n_max=8))
        cold = live._model.open_sequence()
        cold.extend(info.record.tokens)
        assert list(cold.generate(live.sampling, n_max=8)) == ids


def test_a_model_overwritten_in_place_with_its_times_kept_is_refused(models, dense: Driver, tmp_path: Path) -> None:
    # B19, B20: and its copy under another name is taken
    path, model, copy = tmp_path / "a.bin", tmp_path / "m.gguf", tmp_path / "another name.gguf"
    shutil.copy(dense.model, model)
    os.utime(model, ns=(10**18, 10**18))
    with dense.chat(save=path, model=dense.request(model)) as live:
        live.send("Hello.", Heard().reporter)
    shutil.copy(model, copy)
    content = models("M2").read_bytes()
    assert model.stat().st_size == len(content)
    model.write_bytes(content)
    os.utime(model, ns=(10**18, 10**18))
    for request in (dense.request(model), dataclasses.replace(dense.request(), path=None, folders=(tmp_path,))):
        if request.path is None:
            with dense.resume(path, model=request, save=tmp_path / "b.bin") as again:
                assert (again._model.found.path, again.opened.evaluated) == (copy, 0)
            continue
        with pytest.raises(MismatchError) as refused:
            dense.resume(path, model=request)
        assert str(refused.value.fields["expected"])[:16] in refused.value.message
        assert str(refused.value.fields["actual"])[:16] in refused.value.message


def test_the_engines_rotation_switch_belongs_to_the_session(
    dense: Driver, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    # B22
    path = tmp_path / "a.bin"
    with dense.chat(save=path) as live:
        live.send("Hello.", Heard().reporter)
    before = sha(path)
    monkeypatch.setenv("LLAMA_ATTN_ROT_DISABLE", "1")
    with pytest.raises(MismatchError, match="LLAMA_ATTN_ROT_DISABLE off, it is on now") as refused:
        dense.resume(path)
    assert (refused.value.exit_status, sha(path)) == (14, before)


def test_threads_and_a_larger_context_are_no_part_of_what_must_match(driver: Driver, tmp_path: Path) -> None:
    # B30
    path = tmp_path / "a.bin"
    with driver.chat(save=path) as live:
        live.send(LONG, Heard().reporter)
        tokens = state_of(live)[0]
    n_tokens = len(tokens)
    for more in ({"n_threads": 2}, {"n_ctx": 8000}, {"n_ctx": n_tokens + 20}):
        with driver.resume(path, model=driver.request(**more), save=tmp_path / "b.bin", overwrite=True) as again:
            assert (again.opened.reused, again.opened.evaluated) == (n_tokens - 1, 0)
            assert list(again._model.sequence.tokens) == tokens


def test_an_engine_that_dies_while_it_gives_its_state_leaves_the_session(models, tmp_path: Path) -> None:
    # B29
    driver, path = Driver(models("M"), tmp_path), tmp_path / "a.bin"
    with driver.chat(save=path) as live:
        live.send("One.", Heard().reporter)
    before = sha(path)
    script = (
        "import os, signal, sys\n"
        "from pathlib import Path\n"
        "from llamakv.engine.llamacpp.context import NativeContext\n"
        "from tests.ops.driver import Driver, Heard\n"
        "folder, model = Path(sys.argv[1]), Path(sys.argv[2])\n"
        "with Driver(model, folder).resume(folder / 'a.bin') as again:\n"
        "    NativeContext.get_state = lambda *_: os.kill(os.getpid(), signal.SIGSEGV)\n"
        "    again.send('Two.', Heard().reporter)\n"
    )
    died = subprocess.run(
        [sys.executable, "-c", script, str(tmp_path), str(driver.model)], capture_output=True, timeout=60
    )
    assert died.returncode == -signal.SIGSEGV
    assert sha(path) == before
    with driver.resume(path) as again:
        again.send("Two.", Heard().reporter)
    assert [m.content for m in read_session(path).record.chat.messages if m.role == "user"] == ["One.", "Two."]
    assert sorted(item.name for item in tmp_path.iterdir()) == ["a.bin", "cache"]


def test_nothing_cannot_be_saved_and_says_so(dense: Driver, tmp_path: Path) -> None:
    # B34
    path = tmp_path / "a.bin"
    with dense.chat(save=path) as live:
        with pytest.raises(UsageError, match="nothing to save yet"):
            live.save(None, Heard().reporter)
        live.send("One.", Heard().reporter)
        live.undo(Heard().reporter)
        with pytest.raises(UsageError, match="nothing to save yet"):
            live.save(tmp_path / "b.bin", Heard().reporter)
    assert not (tmp_path / "b.bin").exists()


@pytest.mark.parametrize("surplus", [-1, 1, 2])
def test_tokens_and_cells_that_disagree_are_found_before_anything_is_decoded(
    driver: Driver, tmp_path: Path, surplus: int
) -> None:
    # B10, B17
    path = tmp_path / "a.bin"
    driver.save(path, LONG, raw=True)
    n_tokens = len(read_session(path).record.tokens)
    reseal(path, with_tokens(surplus))
    heard = Heard()
    with pytest.raises(Exception, match=rf"\b{n_tokens + surplus}\b.*\b{n_tokens - 1}\b") as refused:
        driver.load(path, heard=heard)
    assert (getattr(refused.value, "exit_status", None), heard.phases) == (13, [])


def with_tokens(surplus: int):
    """Change an index so that it has more tokens, or fewer."""

    def change(raw: bytes) -> bytes:
        values, tokens, table, _ = split(raw)
        return join(values, tokens + tokens[:4] * surplus if surplus > 0 else tokens[: 4 * surplus], table)

    return change


@pytest.mark.parametrize("name", KINDS)
def test_what_is_stored_does_not_depend_on_the_size_of_the_context(models, tmp_path: Path, name: str) -> None:
    # B74
    driver = Driver(models(name), tmp_path)
    sizes = []
    for n_ctx in (512, 8192):
        path = tmp_path / f"{n_ctx}.bin"
        driver.save(path, words(300), raw=True, model=driver.request(n_ctx=n_ctx))
        info = read_session(path)
        sizes.append((len(info.record.tokens), info.n_raw_bytes))
    assert sizes[0] == sizes[1]
    with driver.chat(model=driver.request(n_ctx=8192)) as wide:
        sequence = wide._model.open_sequence(8000)
        sequence.extend(tokens_of(300))
        assert sequence.n_ctx >= 8000
        assert sum(len(section.data) for section in sequence.export()) == sizes[0][1]


def test_resuming_takes_nothing_out_of_the_file(dense: Driver, tmp_path: Path) -> None:
    # B78
    path = tmp_path / "a.bin"
    dense.save(path, LONG, raw=True, sampling=GREEDY)
    answers = [dense.load(path) for _ in range(3)]
    assert [answer.reused for answer in answers] == [len(read_session(path).record.tokens) - 1] * 3
    assert len({answer.text for answer in answers}) == 1

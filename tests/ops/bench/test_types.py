"""Cache types measured, in this process: what the figures are made of. No time is compared with a number."""

from __future__ import annotations

import os
from dataclasses import replace
from itertools import pairwise
from pathlib import Path

import pytest

from llamakv.engine.contract import MemoryRequest
from llamakv.engine.llamacpp import LlamaModel
from llamakv.errors import EngineError, NoRoomError, UsageError
from llamakv.ops.bench import types
from llamakv.ops.bench.break_even import break_even_cold, break_even_warm
from llamakv.ops.bench.facts import FactsJob, read_facts
from llamakv.ops.bench.lengths import (
    check_fits,
    lengths_up_to,
    n_cells_needed,
    n_steps,
    n_steps_along,
    tokens_to_read,
)
from llamakv.ops.bench.results import TypeResult
from llamakv.ops.bench.text import end_of_tale, story, tale
from llamakv.ops.bench.types import PairJob, measure_pair, write_reference
from llamakv.ops.matching import find_model
from llamakv.ops.requests import MemoryOptions, ModelRequest, Reporter
from llamakv.store.page_cache import drop_from_memory, n_resident_bytes
from tests.ops.bench.conftest import types_request
from tests.ops.driver import Driver


class Told:
    """A link that remembers."""

    def __init__(self) -> None:
        self.messages: list[tuple] = []

    def tell(self, message: tuple) -> None:
        self.messages.append(message)

    def of(self, kind: str) -> list:
        return [content[0] for name, *content in self.messages if name == kind]


def job_of(model: Path, folder: Path, pair: tuple[str, str] = ("f16", "f16"), **more) -> PairJob:
    asked = types_request(**more.pop("types", {}))
    memory = more.pop("memory", MemoryOptions())
    request = ModelRequest(path=model, cache_dir=folder / "cache", n_threads=1)
    found = find_model(request, None, Reporter())
    n_cells = n_cells_needed(asked)
    facts = read_facts(
        Told(), FactsJob(found=found, model=request, memory=memory, types=asked, text=None, n_cells=n_cells)
    )
    values = {
        "n_repeats": 1,
        "n_positions": 0,
        "reference": folder / "logits",
        "folder": folder,
        "wants_log": False,
        **more,
    }
    return PairJob(
        found=found,
        model=request,
        memory=memory,
        pair=pair,
        tokens=facts.tokens,
        lengths=lengths_up_to(asked.n_tokens),
        n_cells=n_cells,
        n_decoded=asked.n_decoded,
        n_branches=asked.n_branches,
        **values,
    )


# ---------------------------------------------------------------- what to read


@pytest.mark.parametrize(
    ("n_tokens", "lengths"),
    [
        (2, (2,)),
        (3, (2, 3)),
        (64, (2, 4, 8, 16, 32, 64)),
        (100, (2, 4, 8, 16, 32, 64, 100)),
        (1000, (2, 4, 8, 16, 32, 64, 128, 512, 1000)),
        (8192, (2, 4, 8, 16, 32, 64, 128, 512, 2048, 8192)),
    ],
)
def test_lengths_rise_to_the_longest(n_tokens: int, lengths: tuple[int, ...]) -> None:
    assert lengths_up_to(n_tokens) == lengths


def test_all_lengths_together_are_little_more_than_twice_the_longest() -> None:
    for n_tokens in range(2, 3000):
        lengths = lengths_up_to(n_tokens)
        assert all(a < b for a, b in pairwise(lengths))
        assert sum(lengths) <= 2.5 * n_tokens + 2


def test_the_text_is_as_long_as_asked_and_begins_as_the_model_wants(models) -> None:
    with LlamaModel(models("bos_template")) as model:
        (bos, *_) = model.tokenize("a", add_special=True, parse_special=False)
        for text in (None, "one two three"):
            tokens = tokens_to_read(model, text, 500, 70)
            assert len(tokens) == 570
            assert tokens[0] == bos
            assert bos not in tokens[1:]
            assert tokens_to_read(model, text, 500, 70) == tokens
        words = model.tokenize("one two three\n\none two three", add_special=False, parse_special=False)
        assert list(tokens[1 : len(words)]) == words[:-1]  # the user's own text, again and again
        with pytest.raises(UsageError, match="empty"):
            tokens_to_read(model, "", 10, 0)


def test_what_comes_behind_our_own_text_was_not_in_it() -> None:
    first, last = set(tale(200).split("\n\n")), end_of_tale().split("\n\n")
    openings = {paragraph[:12] for paragraph in first}
    assert len(last) == 4
    assert not any(paragraph[:12] in openings for paragraph in last)


def test_our_own_texts_are_the_same_for_the_same_seed() -> None:
    assert story(7, seed=3) == story(7, seed=3) != story(7, seed=4)
    assert tale(30) == tale(30) != tale(30, seed=1)
    assert tale(31).startswith(tale(30))
    assert "{" not in tale(60) + end_of_tale()


def test_what_does_not_fit_the_context_is_refused_with_both_numbers() -> None:
    asked = types_request(n_tokens=100, n_decoded=8, n_positions=20)
    assert n_cells_needed(asked) == 121
    assert n_cells_needed(replace(asked, compares_output=False)) == 110
    check_fits(121, 121, asked)
    with pytest.raises(NoRoomError, match=r"100 tokens .* need 121 cells, .* may have 120") as caught:
        check_fits(121, 120, asked)
    assert (caught.value.exit_status, caught.value.hint) == (15, "--tokens 99")


# ---------------------------------------------------------------- one pair


@pytest.mark.parametrize("name", ["M", "MS", "MR", "MH"])
def test_every_kind_of_memory_is_measured(models, tmp_path: Path, name: str) -> None:
    link, job = Told(), job_of(models(name), tmp_path)
    row = measure_pair(link, job)
    assert (row.type_k, row.type_v, row.refused, row.flash_attn, row.n_ctx) == ("f16", "f16", None, True, 512)
    assert [length.n_tokens for length in row.lengths] == [2, 4, 8, 16, 32, 48]
    assert row.n_branches == (4 if name in ("M", "MS") else 1)
    assert link.of("notice") == []  # what was resumed went on as what was read
    for length in row.lengths:
        spreads = [length.prefill_s, length.save_s, length.resume_warm_s, length.resume_cold_s]
        assert all(spread is None or (spread.n_runs == 1 and spread.least > 0) for spread in spreads)
    assert row.prompt_tokens_per_s.median == pytest.approx(48 / row.lengths[-1].prefill_s.median)
    assert row.decode_tokens_per_s.n_runs == row.fork_s.n_runs == 1
    assert row.break_even_warm == break_even_warm(row.lengths)
    assert row.break_even_cold == break_even_cold(row.lengths)
    assert row.output is None
    assert not any(tmp_path.glob("logits"))


@pytest.mark.parametrize("name", ["M", *(pytest.param(n, marks=pytest.mark.slow) for n in ("MS", "MR", "MH"))])
def test_bytes_are_those_of_a_real_save(models, tmp_path: Path, name: str) -> None:
    driver = Driver(models(name), tmp_path)
    job = job_of(models(name), tmp_path)
    row = measure_pair(Told(), job).lengths[-1]
    with LlamaModel(models(name)) as model:
        text = b"".join(model.token_bytes(token) for token in job.tokens[:48]).decode()
    saved = driver.save(tmp_path / "real.bin", text, raw=True).saved.info
    assert saved.record.tokens == job.tokens[:48]
    assert row.raw_bytes == saved.n_raw_bytes
    assert abs(row.file_bytes - saved.n_file_bytes) < 64  # the index has other times and ids


def test_state_and_context_are_what_the_engine_says(models, tmp_path: Path) -> None:
    f16, q8 = (measure_pair(Told(), job_of(models.M, tmp_path, (t, t))) for t in ("f16", "q8_0"))
    assert (
        q8.state_bytes_per_token / f16.state_bytes_per_token == 34 / 64
    )  # a block of 32: 2 bytes of scale, 32 of values
    with LlamaModel(models.M) as model:
        memory = model.open_scheduler(MemoryRequest(), n_parallel=0, n_ctx_min=512, n_ctx_max=512, n_threads=1).memory
    assert f16.context_bytes == memory.n_bytes
    assert f16.state_bytes_per_token * 512 == memory.kv_bytes
    grown = f16.lengths[-1].raw_bytes - f16.lengths[-2].raw_bytes
    assert f16.state_bytes_per_token <= grown / 16 < f16.state_bytes_per_token + 32  # with each cell's position


def test_windows_that_keep_only_themselves_do_not_grow(models, tmp_path: Path) -> None:
    whole, window = (
        measure_pair(Told(), job_of(models.MS, tmp_path, memory=MemoryOptions(swa=swa))) for swa in ("full", "window")
    )
    assert 0 < window.state_bytes_per_token < whole.state_bytes_per_token


def test_recurrent_memory_takes_nothing_for_a_token(models, tmp_path: Path) -> None:
    assert measure_pair(Told(), job_of(models.MR, tmp_path)).state_bytes_per_token == 0


def test_repeats_are_counted_and_a_row_is_told_after_each_measurement(models, tmp_path: Path) -> None:
    link, job = Told(), job_of(models.M, tmp_path, n_repeats=3)
    row = measure_pair(link, job)
    told: list[TypeResult] = link.of("row")
    assert [len(partial.lengths) for partial in told] == [1, 2, 3, 4, 5, 6] + [6] * 15
    assert [partial.lengths[0].save_s.n_runs for partial in told] == [1] * 13 + [2] + [3] * 7  # back and forth
    assert {partial.fork_s for partial in told} == {None}
    first = told[0]
    assert (first.lengths[0].n_tokens, first.prompt_tokens_per_s, first.decode_tokens_per_s) == (2, None, None)
    assert (first.peak_rss_bytes, first.break_even_warm) == (None, break_even_warm(first.lengths))
    assert link.messages[0] == ("opened",)
    assert told[-1].lengths == row.lengths
    assert {length.prefill_s.n_runs for length in row.lengths} == {3}
    assert row.decode_tokens_per_s.n_runs == row.fork_s.n_runs == 3


@pytest.mark.parametrize("n_tokens", [2, 48, 300])
def test_steps_are_as_many_as_announced(models, tmp_path: Path, n_tokens: int) -> None:
    types_asked = {"n_tokens": n_tokens, "n_positions": 40}
    job = job_of(models.M, tmp_path, types=types_asked, n_repeats=2, n_positions=40)
    link = Told()
    write_reference(link, job)
    assert sum(link.of("steps")) == n_steps_along(job.lengths, n_positions=40)
    link = Told()
    measure_pair(link, job)
    assert sum(link.of("steps")) == n_steps(job.lengths, n_repeats=2, n_positions=40)


def test_what_the_engine_refuses_is_its_reason(models, tmp_path: Path) -> None:
    with pytest.raises(UsageError, match="cache type q8_0 for V needs flash attention"):
        measure_pair(Told(), job_of(models.M, tmp_path, ("f16", "q8_0"), memory=MemoryOptions(flash_attn="off")))


def test_a_resumed_text_that_goes_on_otherwise_is_told(models, tmp_path: Path, monkeypatch) -> None:
    real, calls = types._Meter._resume, []

    def resume(self):
        calls.append(1)
        seconds, token = real(self)
        return seconds, token + (len(calls) == 3)  # 1 and 2 are the warm-up's

    monkeypatch.setattr(types._Meter, "_resume", resume)
    link = Told()
    measure_pair(link, job_of(models.M, tmp_path))
    (notice,) = link.of("notice")
    assert notice.startswith("2 tokens, resumed, were gone on with by another token")


# ---------------------------------------------------------------- the output


@pytest.mark.parametrize(
    ("name", "memory"),
    [("M", {}), ("M", {"flash_attn": "off"}), ("MS", {"swa": "window"}), ("MR", {}), ("MH", {})],
    ids=str,
)
def test_f16_against_itself_changes_nothing_at_all(models, tmp_path: Path, name: str, memory: dict) -> None:
    job = job_of(models(name), tmp_path, memory=MemoryOptions(**memory), n_positions=20)
    write_reference(Told(), job)
    output = measure_pair(Told(), job).output
    assert (output.n_positions, output.mean_kl, output.most_kl, output.top_agreement) == (20, 0.0, 0.0, 1.0)


def test_smaller_types_change_more(models, tmp_path: Path) -> None:
    reference = job_of(models.M, tmp_path, n_positions=20)
    write_reference(Told(), reference)
    changes = [measure_pair(Told(), replace(reference, pair=(t, t))).output for t in ("q8_0", "q4_0")]
    assert 0 < changes[0].mean_kl < changes[0].most_kl < 1
    assert changes[0].mean_kl < changes[1].mean_kl


# ---------------------------------------------------------------- cold


def test_a_file_leaves_memory_when_asked_to(tmp_path: Path) -> None:
    path = tmp_path / "file"
    with path.open("wb") as file:
        file.write(b"x" * 1_000_001)
        file.flush()
        os.fsync(file.fileno())
    if n_resident_bytes(path) is None or not drop_from_memory(path):
        pytest.skip("this system does not tell")
    if n_resident_bytes(path) == 1_000_001:
        pytest.skip("this file system is in memory itself")
    assert n_resident_bytes(path) == 0
    path.read_bytes()
    assert n_resident_bytes(path) == 1_000_001
    empty = tmp_path / "empty"
    empty.touch()
    assert n_resident_bytes(empty) == 0


@pytest.mark.parametrize("asked", [True, False])
def test_where_files_stay_in_memory_nothing_was_cold(models, tmp_path: Path, monkeypatch, asked: bool) -> None:
    monkeypatch.setattr(types, "drop_from_memory", lambda path: asked)
    if not asked:
        monkeypatch.setattr(types, "n_resident_bytes", lambda path: None)
    row = measure_pair(Told(), job_of(models.M, tmp_path))
    assert {length.resume_cold_s for length in row.lengths} == {None}
    assert {length.cold_resident_bytes for length in row.lengths} == {None}
    assert row.break_even_cold is None
    assert row.break_even_warm is not None


def test_what_stayed_of_a_cold_file_is_told(models, tmp_path: Path, monkeypatch) -> None:
    resident = iter([0, 0, 5, 3, *[0] * 100])  # the warm-up first
    monkeypatch.setattr(types, "n_resident_bytes", lambda path: next(resident))
    row = measure_pair(Told(), job_of(models.M, tmp_path, n_repeats=1))
    assert [length.cold_resident_bytes for length in row.lengths] == [0, 5, 3, 0, 0, 0]
    monkeypatch.setattr(types, "n_resident_bytes", lambda path: None)
    row = measure_pair(Told(), job_of(models.M, tmp_path))
    assert {length.cold_resident_bytes for length in row.lengths} == {None}
    assert all(length.resume_cold_s is not None for length in row.lengths)


def test_a_context_too_small_for_branches_is_no_refusal(models, tmp_path: Path, monkeypatch) -> None:
    def no_room(self) -> None:
        raise NoRoomError("no memory")

    monkeypatch.setattr(types._Meter, "fork", no_room)
    link = Told()
    row = measure_pair(link, job_of(models.M, tmp_path))
    assert (row.refused, row.fork_s, row.n_branches) == (None, None, None)
    assert link.of("notice") == ["4 sequences were not forked to: no memory"]


def test_engine_errors_are_not_swallowed(models, tmp_path: Path, monkeypatch) -> None:
    def broken(self) -> None:
        raise EngineError("broken")

    monkeypatch.setattr(types._Meter, "fork", broken)
    with pytest.raises(EngineError, match="broken"):
        measure_pair(Told(), job_of(models.M, tmp_path))

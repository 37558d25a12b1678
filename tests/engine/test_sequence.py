"""Saved, restored, rewound and grown sequences against the one that never stopped: token ids and logits, bit for bit.

Baseline ("cold"): the same tokens in the same batches in a context that never restored anything.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest

from llamakv.engine.contract import MemoryRequest
from llamakv.engine.llamacpp import LlamaModel
from llamakv.engine.llamacpp.sequence import LlamaSequence
from llamakv.errors import AbortedError, MismatchError, NoRoomError
from llamakv.records import MemoryKind, Sampling, SectionKind, StateSection

KINDS = ["M", "MS", "MR", "MH", "ML", "MG", "MH2"]
FEWER = ["M", "MS", "MH", *(pytest.param(name, marks=pytest.mark.slow) for name in ("MR", "ML", "MG", "MH2"))]
GREEDY = Sampling()
RANDOM = Sampling(temperature=0.8, repeat_penalty=1.2, seed=7)


@pytest.fixture(scope="module", params=KINDS)
def model(request: pytest.FixtureRequest, models) -> Iterator[LlamaModel]:
    with LlamaModel(models(request.param)) as model:
        yield model


@pytest.fixture(scope="module")
def dense(models) -> Iterator[LlamaModel]:
    with LlamaModel(models("M")) as model:
        yield model


def tokens_of(model: LlamaModel, n: int, seed: int = 0) -> list[int]:
    numbers = np.random.default_rng(seed).integers(300, model.info.n_vocab, n)
    return [int(number) for number in numbers]


def open_sequence(model: LlamaModel, n_ctx: int = 1024, n_ctx_max: int = 8192, **memory) -> LlamaSequence:
    return model.open_sequence(MemoryRequest(**memory), n_ctx_min=n_ctx, n_ctx_max=n_ctx_max, n_threads=1)


def write(sequence: LlamaSequence, n: int, sampling: Sampling = GREEDY) -> tuple[list[int], list[bytes]]:
    """The next ``n`` tokens and the bits of the logits each was chosen from; ends of replies are gone through."""
    ids: list[int] = []
    logits: list[bytes] = []
    while len(ids) < n:
        for token in sequence.generate(sampling, n_max=n - len(ids)):
            ids.append(token)
            logits.append(bytes(sequence.logits()))
    return ids, logits


def saved(sequence: LlamaSequence, from_position: int = 0) -> list[StateSection]:
    """The state as a file would keep it."""
    sections = []
    for section in sequence.export(from_position):
        data = memoryview(bytes(section.data))
        sections.append(StateSection(kind=section.kind, p0=section.p0, p1=section.p1, p_used=section.p_used, data=data))
    return sections


@pytest.mark.parametrize("n", [1, 2, 33, 300, 700])
@pytest.mark.parametrize("flash_attn", [True, False])
def test_a_restored_sequence_goes_on_bit_for_bit(model: LlamaModel, n: int, flash_attn: bool) -> None:
    live = open_sequence(model, flash_attn=flash_attn)
    live.extend(tokens_of(model, n))
    sections = saved(live)
    expected = write(live, 24, RANDOM)
    resumed = open_sequence(model, flash_attn=flash_attn)
    resumed.restore(tokens_of(model, n), sections)
    assert (resumed.n_cells, len(resumed.tokens)) == (n - 1, n)
    assert write(resumed, 24, RANDOM) == expected


@pytest.mark.parametrize("types", [("q8_0", "q8_0"), ("q4_0", "q4_0"), ("q8_0", "q4_0"), ("f32", "f16")])
def test_every_cache_type_the_engine_takes_is_restored_exactly(model: LlamaModel, types: tuple[str, str]) -> None:
    if model.info.architecture == "deepseek2" and types[0] != types[1]:
        pytest.skip("latent attention has no values of another type")
    memory = {"type_k": types[0], "type_v": types[1], "flash_attn": True}
    live = open_sequence(model, **memory)
    live.extend(tokens_of(model, 400))
    sections = saved(live)
    expected = write(live, 24)
    resumed = open_sequence(model, **memory)
    resumed.restore(tokens_of(model, 400), sections)
    assert write(resumed, 24) == expected


def test_ten_turns_saved_one_by_one_equal_one_process(model: LlamaModel) -> None:
    live, stored, tokens = open_sequence(model), [], []
    for turn in range(10):
        live.extend(tokens_of(model, 5 + 23 * turn % 90 + (300 if turn == 0 else 0), seed=turn))
        expected = write(live, 9, RANDOM)
        resumed = open_sequence(model, n_ctx=1024 << (turn % 2))
        if tokens:
            resumed.restore(tokens, stored)
        resumed.extend(tokens_of(model, 5 + 23 * turn % 90 + (300 if turn == 0 else 0), seed=turn))
        assert write(resumed, 9, RANDOM) == expected
        stored = [s for s in stored if s.kind is SectionKind.CELLS] + saved(resumed, resumed.n_settled)
        tokens = list(resumed.tokens)
        resumed.close()


def test_a_save_takes_new_cells_only_and_leaves_the_sequence_as_it_was(dense: LlamaModel) -> None:
    live = open_sequence(dense)
    live.extend(tokens_of(dense, 500))
    first = saved(live)
    live.settle()
    live.extend(tokens_of(dense, 60, seed=1))
    second = saved(live, live.n_settled)
    assert [(s.p0, s.p1) for s in first] == [(0, 256), (256, 499)]
    assert [(s.p0, s.p1) for s in second] == [(499, 559)]
    assert bytes(saved(live)[0].data) == bytes(first[0].data)


@pytest.mark.parametrize("back_to", [1, 40, 256, 257, 390, 399])
def test_rewinding_equals_never_having_read_on(model: LlamaModel, back_to: int) -> None:
    live = open_sequence(model)
    live.extend(tokens_of(model, 400))
    result = live.rewind(back_to)
    assert len(live.tokens) == back_to
    assert live.n_cells == back_to - 1
    recurrent = model.info.kind in (MemoryKind.RECURRENT, MemoryKind.HYBRID)
    assert (result.n_kept, result.n_evaluated) == ((0, back_to - 1) if recurrent else (back_to - 1, 0))
    cold = open_sequence(model)
    cold.extend(tokens_of(model, 400)[:back_to])
    ids, logits = write(live, 12)
    cold_ids, cold_logits = write(cold, 12)
    assert ids == cold_ids
    same_split = recurrent or back_to in (257,)
    assert logits == cold_logits or not same_split
    difference = np.abs(np.frombuffer(logits[0], np.float32) - np.frombuffer(cold_logits[0], np.float32))
    assert difference.max() < 0.1  # another split into batches: engine-facts e2, d1


def test_rewinding_to_a_mark_evaluates_nothing_and_is_exact(model: LlamaModel) -> None:
    live = open_sequence(model)
    live.extend(tokens_of(model, 300))
    write(live, 10)
    live.mark()
    n, state = len(live.tokens), None
    expected = write(open_copy(model, live), 12)
    live.extend(tokens_of(model, 70, seed=3))
    write(live, 5)
    result = live.rewind(n)
    assert (result.n_kept, result.n_evaluated, state) == (n - 1, 0, None)
    assert write(live, 12) == expected


def test_a_stored_tail_is_a_mark_too(model: LlamaModel) -> None:
    live = open_sequence(model)
    live.extend(tokens_of(model, 300))
    early = saved(live)
    live.extend(tokens_of(model, 100, seed=1))
    resumed = open_copy(model, live)
    for section in early:
        resumed.remember(section)
    assert resumed.rewind(300).n_evaluated == 0
    cold = open_sequence(model)
    cold.restore(live.tokens[:300], early)
    assert write(resumed, 12) == write(cold, 12)


def open_copy(model: LlamaModel, live: LlamaSequence) -> LlamaSequence:
    copy = open_sequence(model)
    copy.restore(list(live.tokens), saved(live))
    return copy


def test_a_context_that_grows_keeps_the_rope_factors_it_began_with(models) -> None:
    with LlamaModel(models("long_rope")) as model:
        tokens = tokens_of(model, 1100)
        small, large = open_sequence(model, n_ctx=1), open_sequence(model, n_ctx=4096)
        for live in (small, large):
            live.extend(tokens[:700])
            live.extend(tokens[700:])
        assert write(small, 8) == write(large, 8)
        bare = LlamaModel(models("M"))
        with bare:
            other = open_sequence(bare, n_ctx=4096)
            other.extend(tokens[:700])
            other.extend(tokens[700:])
            assert write(other, 8) != write(large, 8)  # the factors do change what is written


@pytest.mark.parametrize("model", FEWER, indirect=True)
def test_growing_gives_the_same_bits_as_a_large_context_from_the_start(model: LlamaModel) -> None:
    small, large = open_sequence(model, n_ctx=1), open_sequence(model, n_ctx=4096)
    assert small.n_ctx < large.n_ctx
    for turn in range(8):
        for sequence in (small, large):
            sequence.extend(tokens_of(model, 150 + turn, seed=turn))
        assert write(small, 20) == write(large, 20)
    assert small.n_ctx == 2048


@pytest.mark.parametrize("model", FEWER, indirect=True)
def test_growing_while_writing_gives_the_same_bits(model: LlamaModel) -> None:
    small, large = open_sequence(model, n_ctx=1), open_sequence(model, n_ctx=4096)
    small.extend(tokens_of(model, 500))
    large.extend(tokens_of(model, 500))
    before = small.n_ctx
    assert write(small, 600) == write(large, 600)
    assert small.n_ctx > before


def test_an_aborted_prefill_keeps_what_was_read_and_goes_on_exactly(model: LlamaModel) -> None:
    calls = itertools.count()
    live = open_sequence(model)
    live.extend(tokens_of(model, 100))
    with pytest.raises(AbortedError) as stopped:
        live.extend(tokens_of(model, 900, seed=1), should_abort=lambda: next(calls) > 60)
    everything = tokens_of(model, 100) + tokens_of(model, 900, seed=1)
    n_read = len(live.tokens)
    assert n_read == live.n_cells + 1 == 100 + stopped.value.fields["n_done"] < 1000
    assert list(live.tokens) == everything[:n_read]
    live.extend(everything[n_read:])
    cold = open_sequence(model)
    cold.extend(tokens_of(model, 100))
    cold.extend(tokens_of(model, 900, seed=1))
    ids, logits = write(live, 12)
    assert (ids, logits) == write(cold, 12)


def test_aborting_at_once_changes_nothing(model: LlamaModel) -> None:
    live = open_sequence(model)
    live.extend(tokens_of(model, 300))
    expected = write(open_copy(model, live), 8)
    with pytest.raises(AbortedError):
        live.extend(tokens_of(model, 50, seed=2), should_abort=lambda: True)
    assert list(live.tokens) == tokens_of(model, 300)
    assert write(live, 8) == expected


def test_small_and_large_states_in_turn_each_equal_their_cold_run(model: LlamaModel) -> None:
    prompts = {"large": tokens_of(model, 500), "small": tokens_of(model, 20, seed=1), "one": [400]}
    stored, expected = {}, {}
    for name, prompt in prompts.items():
        cold = open_sequence(model)
        cold.extend(prompt)
        stored[name] = saved(cold)
        expected[name] = write(cold, 8)
        cold.close()
    live = open_sequence(model)
    for name in ("large", "small", "large", "one", "small", "one", "large", "large", "large"):
        live.restore(prompts[name], stored[name])
        assert live.n_cells == len(prompts[name]) - 1
        assert write(live, 8) == expected[name]


def test_a_refused_section_leaves_an_empty_sequence_that_works(model: LlamaModel) -> None:
    live = open_sequence(model)
    live.extend(tokens_of(model, 300))
    sections = saved(live)
    other = open_sequence(model)
    for damaged in (sections[:-1], [_cut(sections[0]), *sections[1:]], []):
        with pytest.raises(MismatchError):
            other.restore(tokens_of(model, 300), damaged)
        assert (other.n_cells, len(other.tokens)) == (0, 0)
    other.extend(tokens_of(model, 300))
    assert write(other, 8) == write(live, 8)


def _cut(section: StateSection) -> StateSection:
    return StateSection(kind=section.kind, p0=section.p0, p1=section.p1, p_used=section.p_used, data=section.data[:-5])


def test_more_tokens_than_the_limit_are_refused_before_anything_happens(dense: LlamaModel) -> None:
    live = open_sequence(dense, n_ctx=256, n_ctx_max=512)
    live.extend(tokens_of(dense, 500))
    expected = write(open_copy(dense, live), 5)
    with pytest.raises(NoRoomError) as refused:
        live.extend(tokens_of(dense, 100))
    assert (refused.value.fields["needed"], refused.value.fields["limit"]) == (600, 512)
    assert write(live, 5) == expected
    ids = list(live.generate(GREEDY))
    assert live.finish_reason in ("context", "stop")
    assert len(live.tokens) <= 512
    assert ids


def test_a_session_longer_than_the_limit_is_refused_with_both_numbers(dense: LlamaModel) -> None:
    live = open_sequence(dense)
    live.extend(tokens_of(dense, 900))
    with pytest.raises(NoRoomError) as refused:
        open_sequence(dense, n_ctx=256, n_ctx_max=512).restore(list(live.tokens), saved(live))
    assert (refused.value.fields["needed"], refused.value.fields["limit"]) == (900, 512)


def test_the_same_seed_gives_the_same_words_wherever_the_run_is_cut(dense: LlamaModel) -> None:
    whole = open_sequence(dense)
    whole.extend(tokens_of(dense, 50))
    expected, _ = write(whole, 40, RANDOM)
    pieces = open_sequence(dense)
    pieces.extend(tokens_of(dense, 50))
    ids: list[int] = []
    for n in (1, 7, 13, 19):
        resumed = open_copy(dense, pieces)
        ids += write(resumed, n, RANDOM)[0]
        pieces = resumed
    assert ids == expected
    other = open_sequence(dense)
    other.extend(tokens_of(dense, 50))
    assert write(other, 40, Sampling(temperature=0.8, repeat_penalty=1.2, seed=8))[0] != expected


def test_the_session_of_a_window_sized_cache_has_one_section_and_the_same_words(models) -> None:
    with LlamaModel(models("MS")) as model:
        live = open_sequence(model, swa_full=False)
        live.extend(tokens_of(model, 300))
        sections = saved(live)
        assert [(s.kind, s.p0, s.p1) for s in sections] == [(SectionKind.WHOLE, 0, 299)]
        ids, _ = write(live, 24)
        resumed = open_sequence(model, swa_full=False)
        resumed.restore(tokens_of(model, 300), sections)
        assert write(resumed, 24)[0] == ids
        result = resumed.rewind(200)
        assert result.n_kept == 0
        cold = open_sequence(model, swa_full=False)
        cold.extend(tokens_of(model, 200))
        assert write(resumed, 12)[0] == write(cold, 12)[0]


def test_a_hybrid_whose_state_cannot_be_cut_is_kept_in_one_piece(models, monkeypatch: pytest.MonkeyPatch) -> None:
    with LlamaModel(models("MH")) as model:
        live = open_sequence(model)
        live.extend(tokens_of(model, 300))
        monkeypatch.setattr(type(live._shared.cutter), "can_be_cut", lambda *_: False)
        sections = saved(live)
        assert [(s.kind, s.p0, s.p1) for s in sections] == [(SectionKind.WHOLE, 0, 299)]
        expected = write(live, 24)
        assert write(open_restored(model, tokens_of(model, 300), sections), 24) == expected


def open_restored(model: LlamaModel, tokens: list[int], sections: list[StateSection]) -> LlamaSequence:
    resumed = open_sequence(model)
    resumed.restore(tokens, sections)
    return resumed


def test_bad_arguments_are_python_errors_not_aborts(dense: LlamaModel, tmp_path: Path) -> None:
    live = open_sequence(dense)
    for call in (
        lambda: live.extend([]),
        lambda: live.extend([-1]),
        lambda: live.extend([dense.info.n_vocab]),
        lambda: live.restore([], []),
        lambda: live.rewind(1),
        lambda: live.rewind(-1),
        lambda: list(live.generate(GREEDY)),
        lambda: live._shared.native.copy(0, 2),
        lambda: live._shared.native.remove(-2),
        lambda: live._shared.native.get_state(300),
        lambda: dense.token_bytes(-1),
        lambda: dense.token_bytes(10**6),
    ):
        with pytest.raises(ValueError, match=r"."):
            call()

"""Stored sequences that are brought back beside others."""

from __future__ import annotations

import threading
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import replace

import pytest

from llamakv.engine.llamacpp import LlamaModel
from llamakv.engine.llamacpp.scheduler import LlamaScheduler
from llamakv.engine.llamacpp.shared import SharedContext
from llamakv.errors import MismatchError, NoRoomError
from llamakv.records import SectionKind, StateSection
from tests.engine.scheduler.cases import check_close, cold, drive, is_same, prefilled, watching, written
from tests.engine.scheduler.many import ask, check_account, check_answers, open_many, run_one
from tests.engine.test_sequence import open_sequence, saved, tokens_of

WINDOW_ONLY = {"swa_full": False}
CASES = [
    *((name, {}) for name in ("M", "MS", "MR", "MH")),
    ("MS", WINDOW_ONLY),
    *(pytest.param((name, {}), marks=pytest.mark.slow) for name in ("MG", "MH2", "ML")),
]


@pytest.fixture(scope="module", params=CASES, ids=lambda case: "-".join((case[0], *case[1])))
def case(request: pytest.FixtureRequest, models) -> Iterator[tuple[LlamaModel, dict[str, object]]]:
    with LlamaModel(models(request.param[0])) as model:
        yield model, request.param[1]


def beyond(sections: Sequence[StateSection], n: int) -> list[StateSection]:
    """As the store gives them: whole sections, the first of which may begin earlier."""
    return [section for section in sections if section.kind is not SectionKind.CELLS or section.p1 > n]


def in_turns(model: LlamaModel, *lengths: int, **memory) -> tuple[list[int], list[StateSection]]:
    """A session that was saved after each of its turns, so that its sections are of all lengths."""
    sequence, sections = open_sequence(model, **memory), []
    for i, n in enumerate(lengths):
        sequence.extend(tokens_of(model, n, seed=500 + i))
        kept = [section for section in sections if section.kind is SectionKind.CELLS]
        sections = kept + saved(sequence, sequence.n_settled if kept or i == 0 else 0)
        sequence.settle()
    tokens = list(sequence.tokens)
    sequence.close()
    return tokens, sections


@pytest.mark.parametrize("n_live", [0, 100, 299])
def test_an_adopted_sequence_goes_on_as_if_it_had_never_stopped(case, n_live: int) -> None:
    model, memory = case
    tokens = tokens_of(model, 300)
    sections = prefilled(model, tokens, **memory)
    is_exact = n_live == 0 and not (memory or model.info.architecture.startswith("gemma"))
    sampling = {"temperature": 0.8, "seed": 7} if is_exact else {}
    with watching() as seen:  # the one that never stopped
        live = open_many(model, **memory)
        live.root.extend(tokens)
        expected = written(run_one(live, tokens, 12, **sampling), seen)
    scheduler = open_many(model, **memory)
    if n_live:
        run_one(scheduler, [*tokens[:n_live], 400], 1)
    n_asked = []

    def give(n: int) -> Iterable[StateSection]:
        n_asked.append(n)
        return beyond(sections, n)

    kept = scheduler.adopt(tokens, give)
    shares = scheduler._shared.shares_anywhere
    assert (n_asked, kept.n_reused) == ([n_live if shares else 0], n_live if shares else 0)
    assert (list(kept.tokens), kept.cells.n_cells, kept.finish_reason, kept.is_over) == (tokens, 299, "restored", True)
    assert list(scheduler.kept)[-1] is kept
    check_account(scheduler)
    with watching() as seen:
        run = run_one(scheduler, tokens, 12, **sampling)
    assert (run.n_reused, run.n_evaluated) == (299, 1)
    if is_exact:
        assert is_same(written(run, seen), expected)
    check_close(written(run, seen), expected)
    check_account(scheduler)


def test_sections_that_begin_before_what_is_live_are_clipped(case) -> None:
    model, memory = case
    tokens, sections = in_turns(model, 90, 41, 300, 7, **memory)
    scheduler = open_many(model, **memory)
    run_one(scheduler, [*tokens[:200], 400], 1)
    kept = scheduler.adopt(tokens, lambda n: beyond(sections, n))
    check_account(scheduler)
    assert kept.n_reused == (200 if scheduler._shared.shares_anywhere else 0)
    with watching() as seen:
        run = run_one(scheduler, [*tokens, *tokens_of(model, 20, seed=9)], 12)
    assert run.n_reused == len(tokens) - 1
    check_answers(model, [run], seen, **memory)


def test_others_decode_while_a_session_is_brought_back_and_the_context_grows(case) -> None:
    """They take a step between any two of its sections."""
    model, memory = case
    tokens = tokens_of(model, 600)
    sections = prefilled(model, tokens, **memory)
    scheduler = open_many(model, **memory)
    with watching() as seen:
        others = [scheduler.submit(ask(tokens_of(model, 100, seed=i), 2000)) for i in range(3)]
        while not all(run.n_generated for run in others):
            scheduler.step()
        n_generated, stepped = [], threading.Event()

        def slowly(_: int) -> Iterator[StateSection]:
            for section in sections:
                while scheduler._shared.shares_anywhere and n_generated and written_by_all() < n_generated[-1] + 9:
                    stepped.wait(0.001)
                n_generated.append(written_by_all())
                yield section

        def written_by_all() -> int:
            with scheduler.lock:
                return sum(run.n_generated for run in others)

        reader = threading.Thread(target=scheduler.adopt, args=(tokens, slowly), daemon=True)
        reader.start()
        while reader.is_alive():
            scheduler.step()
            if scheduler._shared.shares_anywhere:
                check_account(scheduler)
        reader.join()
        for run in others:
            scheduler.cancel(run)
        assert len(n_generated) == len(sections)
        run = run_one(scheduler, tokens, 8)
    assert run.n_reused == 599
    assert scheduler.root.n_ctx > 512
    check_answers(model, [*others, run], seen, **memory)
    check_account(scheduler)


def test_a_clipped_section_has_room_for_what_is_not_kept_of_it(models) -> None:
    """100 cells more than what the session needs in the end are in use for a moment."""
    with LlamaModel(models("M")) as model:
        tokens = tokens_of(model, 300)
        sections = prefilled(model, tokens)
        scheduler = open_many(model, n_cells_max=512)
        runs = [
            run_one(scheduler, text, 1) for text in (tokens[:100], *(tokens_of(model, 100, seed=i) for i in (1, 2)))
        ]
        scheduler.let_go(runs[1])
        kept = scheduler.adopt(tokens, lambda n: beyond(sections, n))
        assert (kept.n_reused, [scheduler.has_cells(run) for run in runs]) == (100, [True, False, True])
        assert scheduler.counts.n_reserved == scheduler.counts.n_cells == 299 + 100
        check_account(scheduler)


def test_a_session_has_room_also_where_others_have_taken_it_meanwhile(models) -> None:
    """The context grows a second time: when the session came, it was large enough."""
    with LlamaModel(models("M")) as model:
        tokens = tokens_of(model, 500)
        sections = prefilled(model, tokens)
        scheduler, others = open_many(model), []

        def give(_: int) -> Iterator[StateSection]:
            yield sections[0]
            others.append(run_one(scheduler, tokens_of(model, 250, seed=1), 4))
            assert scheduler.root.n_ctx == 512
            yield sections[1]

        with watching() as seen:
            kept = scheduler.adopt(tokens, give)
            others.append(run_one(scheduler, tokens, 4))
        assert (kept.cells.n_cells, scheduler.root.n_ctx) == (499, 1024)
        check_account(scheduler)
        check_answers(model, others, seen)


@pytest.mark.parametrize(("n_ctx", "n_grown"), [(1, 1), (1024, 1), (2048, 0)])
def test_a_session_makes_the_context_grow_once_at_most(
    models, monkeypatch: pytest.MonkeyPatch, n_ctx: int, n_grown: int
) -> None:
    """Its last section is longer than what is wanted of it, and all of it is in memory for a moment."""
    move, sizes = SharedContext._move, []

    def counted(shared: SharedContext, size: int) -> None:
        sizes.append(size)
        move(shared, size)

    with LlamaModel(models("M")) as model:
        tokens = tokens_of(model, 1100)
        sections = [replace(one, p_used=min(one.p_used, 1001)) for one in prefilled(model, tokens) if one.p0 < 1001]
        scheduler = open_many(model, n_ctx=n_ctx)
        run_one(scheduler, tokens_of(model, 5, seed=1), 2)
        monkeypatch.setattr(SharedContext, "_move", counted)
        scheduler.adopt(tokens[:1002], lambda n: sections)
        run_one(scheduler, [*tokens[:1002], *tokens_of(model, 20, seed=2)], 100)
    assert sizes == [2048] * n_grown


def test_a_stepping_thread_lets_one_in_that_brings_a_session_back(models) -> None:
    with LlamaModel(models("M")) as model:
        tokens, sections = in_turns(model, *([10] * 40))
        scheduler = open_many(model)
        other = scheduler.submit(ask(tokens_of(model, 20), 4000))
        scheduler.step()
        reader = threading.Thread(target=scheduler.adopt, args=(tokens, lambda n: sections), daemon=True)
        n_before = scheduler._n_steps
        reader.start()
        while reader.is_alive():
            scheduler.step()
        assert scheduler._n_steps - n_before < 40 * 20  # a few at each section
        assert not other.is_over
        scheduler.cancel(other)


@pytest.mark.parametrize("n_live", [0, 120])
def test_refused_sections_leave_everything_as_it_was(case, n_live: int) -> None:
    model, memory = case
    tokens, sections = in_turns(model, 90, 41, 300, **memory)
    scheduler = open_many(model, **memory)
    with watching() as seen:
        if n_live:
            run_one(scheduler, [*tokens[:n_live], 400], 1)
        other = scheduler.submit(ask(tokens_of(model, 60, seed=1), 40))
        for _ in range(3):
            scheduler.step()
        before, kept = scheduler.counts, list(scheduler.kept)
        last = len(sections) - 1
        cut = replace(sections[last], data=sections[last].data[:-5])
        for damaged in (sections[:-1], [*sections[:last], cut], [], _raising(sections)):
            with pytest.raises((MismatchError, OSError)):
                scheduler.adopt(tokens, lambda n, damaged=damaged: damaged)
            assert (scheduler.counts, list(scheduler.kept)) == (before, kept)
            check_account(scheduler)
        adopted = scheduler.adopt(tokens, lambda n: beyond(sections, n))
        run = run_one(scheduler, tokens, 4)
        drive(scheduler, [other])
    assert (run.n_reused, scheduler.has_cells(adopted)) == (len(tokens) - 1, True)
    check_answers(model, [run, other], seen, **memory)


def _raising(sections: Sequence[StateSection]) -> Iterator[StateSection]:
    yield sections[0]
    raise OSError("the file cannot be read")


def test_a_missing_section_in_the_middle_is_noticed(models) -> None:
    with LlamaModel(models("M")) as model:
        tokens, sections = in_turns(model, 90, 41, 300)
        scheduler = open_many(model)
        with pytest.raises(MismatchError, match="goes on at position 130, the one before it ended at 89"):
            scheduler.adopt(tokens, lambda n: [sections[0], *sections[2:]])
        with pytest.raises(MismatchError):
            open_sequence(model).restore(tokens, [sections[0], sections[0], *sections[1:]])
        assert scheduler.counts.n_cells == 0


def test_without_room_nothing_is_changed_and_what_may_go_goes_only_where_that_helps(case) -> None:
    model, memory = case
    tokens = tokens_of(model, 400)
    sections = prefilled(model, tokens, **memory)
    scheduler = open_many(model, n_cells_max=700, **memory)
    kept = [run_one(scheduler, tokens_of(model, 200, seed=i), 1) for i in range(1, 4)]
    scheduler.let_go(kept[0])
    before = scheduler.counts
    with pytest.raises(NoRoomError) as refused:
        scheduler.adopt(tokens, lambda n: sections)
    assert (refused.value.fields["limit"], refused.value.exit_status) == (700, 15)
    assert (scheduler.counts, scheduler.shortage) == (before, None)
    assert [scheduler.has_cells(run) for run in kept] == [True] * 3
    scheduler.let_go(kept[1])
    scheduler.adopt(tokens, lambda n: sections)
    assert [scheduler.has_cells(run) for run in kept] == [False, False, True]
    check_account(scheduler)
    with pytest.raises(NoRoomError):
        open_many(model, n_ctx=256, n_ctx_max=300, **memory).adopt(tokens, lambda n: sections)


def test_what_is_being_brought_back_is_promised_its_cells(models) -> None:
    with LlamaModel(models("M")) as model:
        tokens = tokens_of(model, 400)
        sections = prefilled(model, tokens)
        scheduler = open_many(model, n_cells_max=600)
        waiting, reserved = [], []

        def give(_: int) -> Iterator[StateSection]:
            for section in sections:
                waiting.append(scheduler.submit(ask(tokens_of(model, 250, seed=len(waiting)), 1, keeps=False)))
                scheduler.step()
                reserved.append((scheduler.counts.n_active, scheduler.counts.n_reserved, scheduler.shortage is None))
                yield section

        adopted = scheduler.adopt(tokens, give)
        assert reserved == [(0, 399, False)] * 2
        scheduler.step()
        assert scheduler.shortage is not None
        scheduler.let_go(adopted)
        drive(scheduler, waiting)
        assert not scheduler.has_cells(adopted)
        check_account(scheduler)


def test_an_adopted_session_is_of_one_space(models) -> None:
    with LlamaModel(models("M")) as model:
        tokens = tokens_of(model, 100)
        sections = prefilled(model, tokens)
        scheduler = open_many(model)
        scheduler.adopt(tokens, lambda n: beyond(sections, n), space="one")
        other = scheduler.adopt(tokens, lambda n: beyond(sections, n), space="two")
        again = scheduler.adopt(tokens, lambda n: beyond(sections, n), space="two")
        assert (other.n_reused, again.n_reused, scheduler.counts.n_cells) == (0, 99, 198)
        assert [run_one(scheduler, tokens, 1, space=s).n_reused for s in ("one", "two", "")] == [99, 99, 0]


def test_closing_while_a_session_is_brought_back_is_an_error_not_an_abort(models) -> None:
    with LlamaModel(models("M")) as model:
        tokens = tokens_of(model, 600)
        sections = prefilled(model, tokens)
        scheduler = open_many(model)

        def give(_: int) -> Iterator[StateSection]:
            yield sections[0]
            scheduler.close()
            yield from sections[1:]

        with pytest.raises(ValueError, match="closed"):
            scheduler.adopt(tokens, give)
        with pytest.raises(ValueError, match="closed"):
            scheduler.adopt(tokens, lambda n: sections)
        assert list(scheduler.kept) == []


# ---------------------------------------------------------------- windowed layers that have lost cells


@pytest.fixture(scope="module")
def windowed(models) -> Iterator[LlamaModel]:
    with LlamaModel(models("MS")) as model:
        yield model


def with_gap(model: LlamaModel, n_before: int = 50) -> tuple[LlamaScheduler, list[int], list[StateSection]]:
    """A session of 300 tokens, saved at 100 and at the end; when it was saved again, its windowed layers had lost the
    cells before position ``198 - n_before`` to other sequences."""
    text = tokens_of(model, 300)
    scheduler = open_many(model, 2, n_cells_max=512)
    before = scheduler.submit(ask(tokens_of(model, n_before, seed=1), 100, keeps=False))
    scheduler.step()
    scheduler.root.extend(text[:100])
    sections = saved(scheduler.root)
    scheduler.root.extend(text[100:])
    scheduler.cancel(before)
    run_one(scheduler, tokens_of(model, 200, seed=3), 1, keeps=False)
    low, _ = scheduler._shared.native.position_range(scheduler.root.cells.seq_id)
    assert low == 198 - n_before > 99
    return scheduler, text, [*sections, *saved(scheduler.root, 99)]


@pytest.mark.usefixtures("unguarded")
def test_where_windowed_layers_have_a_gap_nothing_begins(windowed: LlamaModel) -> None:
    _, text, sections = with_gap(windowed)
    scheduler = open_many(windowed)
    scheduler.adopt(text, lambda n: beyond(sections, n))
    assert scheduler._shared.native.position_range(scheduler.kept[0].cells.seq_id) == (0, 298)
    with watching() as seen:
        runs = [run_one(scheduler, [*text[:n], 400], 8, keeps=False) for n in (110, 140, 299)]
        for n in (300, 250, 140, 120):  # and going back in a sequence by itself
            alone = open_sequence(windowed)
            alone.restore(text, sections)
            alone.rewind(n)
            assert list(alone.generate(runs[0].request.sampling, n_max=4)) == cold(windowed, text[:n], n=4).ids
    assert [run.n_reused for run in runs] == [0, 0, 299]
    check_answers(windowed, runs, seen)


@pytest.mark.usefixtures("unguarded")
def test_a_session_that_lacks_the_window_of_its_last_token_is_refused(windowed: LlamaModel) -> None:
    """A place in the middle that the store can cut out, but not the engine."""
    _, text, sections = with_gap(windowed)
    scheduler = open_many(windowed)
    for n in (120, 140, 160):
        cut = [replace(s, p_used=min(s.p_used, n - 1)) for s in sections if s.p0 < n - 1]
        with pytest.raises(MismatchError):
            scheduler.adopt(text[:n], lambda _, cut=cut: cut)
        with pytest.raises(MismatchError):
            open_sequence(windowed).restore(text[:n], cut)
    assert scheduler.counts.n_cells == 0


@pytest.mark.parametrize("n_before", [50, 90])
@pytest.mark.usefixtures("unguarded")
def test_a_gap_is_told_again_after_growing_and_saving(windowed: LlamaModel, n_before: int) -> None:
    """Also one that is shorter than a section."""
    _, text, sections = with_gap(windowed, n_before)
    scheduler = open_many(windowed)
    kept = scheduler.adopt(text, lambda n: beyond(sections, n))
    run_one(scheduler, tokens_of(windowed, 700, seed=9), 1, keeps=False)
    assert scheduler.root.n_ctx > 512
    gap = kept.cells.whole_from
    assert gap == 198 - n_before
    again = open_many(windowed)
    again.adopt(text, lambda n: list(scheduler.export(kept, n)))
    with watching() as seen:
        runs = [
            run_one(one, [*text[:n], 400], 8, keeps=False) for one in (scheduler, again) for n in (gap + 31, gap + 32)
        ]
    assert [run.n_reused for run in runs] == [0, gap + 32] * 2
    assert again.kept[0].cells.whole_from == gap
    check_answers(windowed, runs, seen)

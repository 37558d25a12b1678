"""What a run shares with the root, and that each has its own sampling, limits and text."""

from __future__ import annotations

import itertools
from types import SimpleNamespace

import pytest

from llamakv.engine.contract import RunRequest
from llamakv.engine.llamacpp import LlamaModel
from llamakv.engine.llamacpp import run as run_module
from llamakv.engine.llamacpp.scheduler import LlamaScheduler
from llamakv.engine.text import join
from llamakv.errors import UsageError
from llamakv.records import MemoryKind, Sampling
from tests.engine.scheduler.cases import (
    alone,
    check_close,
    cold,
    drive,
    is_same,
    open_scheduler,
    prefilled,
    request,
    run_all,
    watching,
    written,
)
from tests.engine.test_sequence import saved, tokens_of


def can_share_part(model: LlamaModel) -> bool:
    return model.info.kind in (MemoryKind.DENSE, MemoryKind.WINDOWED)


# ---------------------------------------------------------------- a part of the root's tokens


@pytest.mark.parametrize("n_common", [0, 1, 150, 256, 298, 299])
def test_a_run_shares_what_it_has_in_common_with_the_root_if_the_memory_can(model: LlamaModel, n_common: int) -> None:
    root, rest = tokens_of(model, 300), tokens_of(model, 50, seed=1)
    rest[0] = next(token for token in (400, 401) if token != root[n_common])
    scheduler = open_scheduler(model, 1)
    scheduler.root.extend(root)
    (run,), (actual,) = run_all(scheduler, [request([*root[:n_common], *rest], 8)])
    n_reused = n_common if can_share_part(model) or n_common == 299 else 0
    assert (run.n_reused, run.n_evaluated) == (n_reused, n_common + 50 - n_reused)
    check_close(actual, cold(model, [*root[:n_common], *rest]))
    if model.info.kind is MemoryKind.RECURRENT and n_reused == 0:
        assert is_same(actual, cold(model, [*root[:n_common], *rest]))
    assert list(scheduler.root.tokens) == root
    assert scheduler.counts.n_cells == 299


@pytest.mark.parametrize("n", [1, 2, 100, 299, 300])
def test_a_run_that_is_the_beginning_of_the_root_reads_its_last_token(model: LlamaModel, n: int) -> None:
    root = tokens_of(model, 300)
    scheduler = open_scheduler(model, 1)
    scheduler.root.extend(root)
    (run,), (actual,) = run_all(scheduler, [request(root[:n], 8)])
    n_reused = n - 1 if can_share_part(model) or n == 300 else 0
    assert (run.n_reused, run.n_evaluated) == (n_reused, n - n_reused)
    check_close(actual, cold(model, root[:n]))


def test_a_marked_place_is_where_recurrent_memory_begins(model: LlamaModel) -> None:
    root, rest = tokens_of(model, 300), tokens_of(model, 40, seed=1)
    scheduler = open_scheduler(model, 1)
    for a, b in ((0, 101), (101, 201), (201, 300)):
        scheduler.root.extend(root[a:b])
        if b < 300:
            scheduler.root.mark()
    for n_common, place in ((250, 200), (200, 200), (199, 100), (100, 100), (99, 0)):
        (run,), (actual,) = run_all(scheduler, [request([*root[:n_common], *rest], 8)])
        n_reused = n_common if can_share_part(model) else place
        assert (run.n_reused, run.n_evaluated) == (n_reused, n_common + 40 - n_reused)
        tokens = [*root[:n_common], *rest]
        check_close(actual, cold(model, tokens))
        if model.info.kind is MemoryKind.RECURRENT:
            ends = [0, *(end for end in (101, 201) if end <= place + 1), len(tokens)]
            assert is_same(actual, cold(model, *(tokens[a:b] for a, b in itertools.pairwise(ends))))
    _, (whole,) = run_all(scheduler, [request(root, 8)])
    assert is_same(whole, cold(model, root[:101], root[101:201], root[201:]))


def test_runs_that_begin_at_a_mark_leave_the_others_and_the_root_as_they_are(model: LlamaModel) -> None:
    root, rests = tokens_of(model, 300), [tokens_of(model, 10, seed=i) for i in range(4)]
    scheduler = open_scheduler(model, 4)
    scheduler.root.extend(root[:151])
    scheduler.root.mark()
    scheduler.root.extend(root[151:])
    tokens = [[*root[:n], *rest] for n, rest in zip((300, 200, 300, 160), rests, strict=True)]
    _, actual = run_all(scheduler, [request(one, 12) for one in tokens])
    for one, result in zip(tokens, actual, strict=True):
        check_close(result, cold(model, one, n=12))
    ids = list(scheduler.root.generate(Sampling(), n_max=8))
    assert ids == cold(model, root[:151], root[151:]).ids


@pytest.mark.parametrize("n_root", [0, 1])
def test_a_root_without_cells_shares_nothing(model: LlamaModel, n_root: int) -> None:
    scheduler = open_scheduler(model, 2)
    tokens = tokens_of(model, 20)
    if n_root:
        scheduler.root.extend(tokens[:1])
    assert scheduler.root.n_cells == 0
    (one, other), actual = run_all(scheduler, [request(tokens, 8), request(tokens[:1], 8)])
    assert [(run.n_reused, run.n_evaluated) for run in (one, other)] == [(0, 20), (0, 1)]
    check_close(actual[0], cold(model, tokens))
    check_close(actual[1], cold(model, tokens[:1]))
    assert scheduler.counts.n_cells == 0


def test_a_root_that_was_restored_is_shared_exactly(model: LlamaModel) -> None:
    root, rest = tokens_of(model, 300), tokens_of(model, 9, seed=1)
    scheduler = open_scheduler(model, 1)
    scheduler.root.restore(root, prefilled(model, root))
    (run,), (actual,) = run_all(scheduler, [request([*root, *rest], 12)])
    assert (run.n_reused, run.n_evaluated) == (299, 10)
    assert is_same(actual, cold(model, root, rest, n=12))


@pytest.mark.parametrize("change", ["rewound", "replaced", "longer"])
def test_a_waiting_run_is_right_whatever_the_root_becomes_meanwhile(model: LlamaModel, change: str) -> None:
    root, rest, others = tokens_of(model, 300), tokens_of(model, 9, seed=1), tokens_of(model, 300, seed=2)
    sections = prefilled(model, others)
    scheduler = open_scheduler(model, 1)
    scheduler.root.extend(root)
    with watching() as seen:
        run = scheduler.submit(request([*root, *rest], 12))
        if change == "rewound":
            scheduler.root.rewind(100)
        elif change == "replaced":
            scheduler.root.restore(others, sections)
        else:
            scheduler.root.extend(rest[:5])
        drive(scheduler, [run])
    check_close(written(run, seen), cold(model, root, rest, n=12))
    assert run.n_reused + run.n_evaluated == 309


# ---------------------------------------------------------------- its own choices

YES_OR_NO = 'root ::= "yes" | "no"'
OPTIONS = {
    "greedy": Sampling(max_tokens=12),
    "one": Sampling(max_tokens=1),
    "none": Sampling(max_tokens=0),
    "to the end": Sampling(),
    "seed 1": Sampling(max_tokens=12, temperature=0.9, seed=1),
    "seed 2": Sampling(max_tokens=12, temperature=0.9, seed=2),
    "seed 1 again": Sampling(max_tokens=12, temperature=0.9, seed=1),
    "hot": Sampling(max_tokens=12, temperature=5.0, top_k=0, top_p=1.0, min_p=0.0, seed=3),
    "penalties": Sampling(max_tokens=40, repeat_penalty=1.5, frequency_penalty=1.0, presence_penalty=1.0),
    "few": Sampling(max_tokens=12, temperature=1.5, top_k=3, top_p=0.9, min_p=0.01, seed=4),
    "grammar": Sampling(max_tokens=12, grammar=YES_OR_NO),
    "biased": Sampling(max_tokens=5, logit_bias=((400, 1000.0),)),
}


@pytest.mark.parametrize(("name", "n_parallel"), [("M", 1), ("MS", 1), ("MR", 12), ("MH2", 1)])
def test_each_run_has_its_own_options_and_equals_the_run_alone_bit_for_bit(models, name: str, n_parallel: int) -> None:
    """A recurrent model decodes one at a time, so that its runs may be under way at once and are exact all the same."""
    with LlamaModel(models(name)) as model:
        prefix = tokens_of(model, 40)
        branches = [(tokens_of(model, 3 + i % 2, seed=i % 2), options) for i, options in enumerate(OPTIONS.values())]
        sequence = open_scheduler(model, 0, n_ctx_max=100).root
        sequence.extend(prefix)
        expected = alone(model, prefix, saved(sequence), branches, n_ctx_max=100)
        scheduler = open_scheduler(model, n_parallel, n_ctx_max=100)
        scheduler.root.extend(prefix)
        runs, actual = run_all(scheduler, [RunRequest(tokens=(*prefix, *s), sampling=o) for s, o in branches])
        assert [i for i, pair in enumerate(zip(actual, expected, strict=True)) if not is_same(*pair)] == []
        check_options(dict(zip(OPTIONS, runs, strict=True)))


def check_options(runs: dict) -> None:
    reasons = {name: run.finish_reason for name, run in runs.items()}
    assert reasons == dict.fromkeys(runs, "length") | {"to the end": "context", "grammar": "stop"}
    assert {name: run.n_generated for name, run in runs.items()} | {"grammar": 0} == {
        name: options.max_tokens for name, options in OPTIONS.items()
    } | {"to the end": 100 - runs["to the end"].n_prompt, "grammar": 0}
    assert runs["grammar"].text in ("yes", "no")
    assert runs["biased"].tokens[-5:] == [400] * 5
    assert (runs["none"].text, runs["none"].n_evaluated) == ("", 0)
    assert runs["seed 1"].tokens[-12:] == runs["seed 1 again"].tokens[-12:]


def test_together_the_options_hold_too_and_twice_the_same_gives_the_same(dense: LlamaModel) -> None:
    """B72: what a call is made of changes the rounding, so the same calls give the same words."""
    prefix = tokens_of(dense, 40)
    results = []
    for _ in range(2):
        scheduler = open_scheduler(dense, 12, n_ctx_max=100)
        scheduler.root.extend(prefix)
        requests = [
            RunRequest(tokens=(*prefix, *tokens_of(dense, 3, seed=i % 2)), sampling=options)
            for i, options in enumerate(OPTIONS.values())
        ]
        runs, actual = run_all(scheduler, requests)
        check_options(dict(zip(OPTIONS, runs, strict=True)))
        results.append(actual)
    assert all(is_same(*pair) for pair in zip(*results, strict=True))


@pytest.mark.parametrize(
    "wrong",
    [
        Sampling(max_tokens=8, grammar="root ::= ("),
        Sampling(max_tokens=8, grammar="branch ::= [a]"),
        Sampling(max_tokens=8, logit_bias=((10**6, 1.0),)),
    ],
)
def test_what_cannot_be_sampled_so_is_the_error_of_that_run_only(dense: LlamaModel, wrong: Sampling) -> None:
    prefix = tokens_of(dense, 40)
    scheduler = open_scheduler(dense, 3)
    scheduler.root.extend(prefix)
    runs = [scheduler.submit(RunRequest(tokens=tuple(prefix), sampling=s)) for s in (Sampling(max_tokens=8), wrong)]
    over = []
    while len(over) < 2:
        over += scheduler.step()
    assert over == [runs[1], runs[0]]
    assert (type(runs[1].error), runs[1].finish_reason, runs[1].n_generated) == (UsageError, "", 0)
    assert (runs[0].error, runs[0].tokens[40:]) == (None, cold(dense, prefix).ids)
    assert (scheduler.counts.n_active, scheduler.counts.n_cells) == (0, 39)


# ---------------------------------------------------------------- text


def test_stop_strings_end_only_the_run_that_has_them(models) -> None:
    with LlamaModel(models("MR")) as model:  # exact, whatever is under way at the same time
        prefix = tokens_of(model, 60)
        scheduler = open_scheduler(model, 4)
        scheduler.root.extend(prefix)
        text = join(model.token_bytes(token) for token in cold(model, prefix, n=40).ids)
        stops = [(), (text[10:13],), ("never said", text[20:24]), (text[30:34], text[:2])]
        runs, _ = run_all(scheduler, [request(prefix, 40, stop=stop) for stop in stops])
        assert [run.finish_reason for run in runs] == ["length", "stop", "stop", "stop"]
        ends = [len(text), text.index(text[10:13]), text.index(text[20:24]), 0]
        assert [run.text for run in runs] == [text[:end] for end in ends]


def test_the_pieces_of_text_make_up_the_whole_text(models) -> None:
    with LlamaModel(models("ME")) as model:
        scheduler = open_scheduler(model, 4)
        hot = {"temperature": 3.0, "top_k": 0, "top_p": 1.0, "min_p": 0.0}
        runs = [
            scheduler.submit(request(tokens_of(model, 30, seed=i), 60, seed=i, stop=("e",) if i % 2 else (), **hot))
            for i in range(8)
        ]
        pieces: list[list[str]] = [[] for _ in runs]
        while not all(run.is_over for run in runs):
            scheduler.step()
            for run, taken in zip(runs, pieces, strict=True):
                assert run.text.startswith("".join(taken))
                taken.append(run.take_text())
        for run, taken in zip(runs, pieces, strict=True):
            assert "".join([*taken, run.take_text()]) == run.text
            whole = join(model.token_bytes(token) for token in run.tokens[run.n_prompt :])
            assert run.text == (whole.partition("e")[0] if run.request.sampling.stop else whole)
        assert {"stop", "length"} >= {run.finish_reason for run in runs}
        assert sum(len(taken) - taken.count("") for taken in pieces) > 60


# ---------------------------------------------------------------- time


class Clock:
    """Stands in for the ``time`` module of the runs."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.now = 100.0
        monkeypatch.setattr(run_module, "time", SimpleNamespace(perf_counter=lambda: self.now))

    def step(self, scheduler: LlamaScheduler, n: int = 1) -> None:
        """Steps that take a second each."""
        for _ in range(n):
            self.now += 1
            scheduler.step()


def test_a_run_ends_when_its_time_is_up_and_the_others_go_on(
    dense: LlamaModel, monkeypatch: pytest.MonkeyPatch
) -> None:
    clock, prefix = Clock(monkeypatch), tokens_of(dense, 40)
    scheduler = open_scheduler(dense, 4)
    scheduler.root.extend(prefix)
    at_once, soon, never = (scheduler.submit(request(prefix, 8, timeout_s=seconds)) for seconds in (0, 4.0, None))
    clock.step(scheduler, 8)
    expected = cold(dense, prefix).ids
    assert [(run.finish_reason, run.n_generated) for run in (at_once, soon)] == [("timeout", 0), ("timeout", 4)]
    assert soon.tokens[40:] == expected[:4]
    assert soon.text == join(dense.token_bytes(token) for token in expected[:4])
    assert (never.finish_reason, never.tokens[40:]) == ("length", expected)
    assert (soon.started_s, soon.first_token_s, soon.ended_s) == (101.0, 101.0, 105.0)
    assert scheduler.counts.n_cells == 39


def test_a_run_whose_time_is_up_while_it_reads_ends_too(model: LlamaModel, monkeypatch: pytest.MonkeyPatch) -> None:
    clock = Clock(monkeypatch)
    scheduler = open_scheduler(model, 4)
    long = scheduler.submit(request(tokens_of(model, 1000), 8, timeout_s=1.5))
    clock.step(scheduler)
    with watching() as seen:
        short = scheduler.submit(request(tokens_of(model, 20, seed=1), 8))
        clock.step(scheduler, 3)
        drive(scheduler, [short])
    assert (long.finish_reason, long.n_generated, long.text, long.first_token_s) == ("timeout", 0, "", 0.0)
    assert 0 < long.n_evaluated < 1000
    check_close(written(short, seen), cold(model, tokens_of(model, 20, seed=1)))
    assert scheduler.counts.n_cells == 0


def test_waiting_does_not_count(dense: LlamaModel, monkeypatch: pytest.MonkeyPatch) -> None:
    clock = Clock(monkeypatch)
    scheduler = open_scheduler(dense, 1)
    first = scheduler.submit(request(tokens_of(dense, 20), 50))
    second = scheduler.submit(request(tokens_of(dense, 20), 8, timeout_s=10.0))
    clock.step(scheduler, 51)
    assert (first.finish_reason, second.started_s, second.is_over) == ("length", 0.0, False)
    clock.step(scheduler, 9)
    assert (second.finish_reason, second.started_s) == ("length", 152.0)


def test_a_grammar_whose_end_is_forbidden_ends_the_run_and_not_the_process(dense: LlamaModel) -> None:
    scheduler = open_scheduler(dense, 2)
    scheduler.root.extend(tokens_of(dense, 20))
    ends = tuple((token, float("-inf")) for token in range(300))
    for temperature in (0.0, 0.8):
        sampling = Sampling(temperature=temperature, grammar='root ::= "a"', logit_bias=ends, max_tokens=9)
        runs = [scheduler.submit(request([*tokens_of(dense, 20), 400], 4)) for _ in range(1)]
        runs.append(scheduler.submit(RunRequest(tokens=tuple(tokens_of(dense, 20)), sampling=sampling)))
        drive(scheduler, runs)
        assert [(run.finish_reason, run.error) for run in runs] == [("length", None), ("stop", None)]
        assert runs[1].text in ("", "a")


@pytest.mark.parametrize("grammar", ["root ::= " + "(" * 30_000 + '"a"' + ")" * 30_000, 'root ::= "a"\0 "b"'])
def test_a_grammar_that_would_end_the_process_or_be_cut_is_refused(dense: LlamaModel, grammar: str) -> None:
    with pytest.raises(UsageError):
        dense.check_sampling(Sampling(grammar=grammar))

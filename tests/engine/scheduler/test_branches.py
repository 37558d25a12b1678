"""Branches that a scheduler runs against the same branches run alone: token ids, and the logits of every choice.

One at a time they are equal bit for bit. Decoded together they are equal within ``NOISE``: the matrix kernels add in
another order when a call has more rows.
"""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np
import pytest

from llamakv.engine.contract import MemoryRequest, RunRequest
from llamakv.engine.llamacpp import LlamaModel
from llamakv.engine.llamacpp.context import N_UBATCH, NativeContext, Rows
from llamakv.records import MemoryKind, Sampling
from tests.engine.scheduler.cases import (
    CASES,
    NOISE,
    Case,
    Logits,
    Written,
    alone,
    check_all_close,
    check_close,
    is_same,
    make_case,
    mixed,
    open_scheduler,
    prefilled,
    request,
    run_all,
)
from tests.engine.test_sequence import tokens_of
from tests.models.vocabulary import N_TOKENS


def _named(case: tuple[str, dict[str, object]]) -> str:
    return "-".join([case[0], *(f"{name}_{value}" for name, value in case[1].items() if name != "type_v")])


@pytest.fixture(scope="module", params=CASES, ids=_named)
def case(request: pytest.FixtureRequest, models) -> Iterator[Case]:
    name, memory = request.param
    with LlamaModel(models(name)) as model:
        yield make_case(model, mixed(64), **memory)


# ---------------------------------------------------------------- equal to the branch alone


def test_one_at_a_time_each_of_64_branches_equals_its_single_run_bit_for_bit(case: Case) -> None:
    scheduler, actual = case.run(1)
    assert [i for i, pair in enumerate(zip(actual, case.expected, strict=True)) if not is_same(*pair)] == []
    assert scheduler.counts.n_cells == len(case.prefix) - 1


def test_64_branches_under_way_at_once_equal_their_single_runs_within_the_noise(case: Case) -> None:
    together = case.model.info.kind in (MemoryKind.DENSE, MemoryKind.WINDOWED)
    for n_parallel in (4, 64) if together else (8,):
        check_case(case, n_parallel)


@pytest.mark.slow
@pytest.mark.parametrize("n_parallel", [2, 4, 16, 64, 254])
def test_any_number_at_once_equals_the_single_runs_within_the_noise(case: Case, n_parallel: int) -> None:
    check_case(case, n_parallel)


def check_case(case: Case, n_parallel: int) -> None:
    scheduler, actual = case.run(n_parallel)
    check_all_close(actual, case.expected, noise=case.noise, n_ties_max=3)  # 95 % are equal in every id
    assert scheduler.counts.n_cells == len(case.prefix) - 1


@pytest.mark.parametrize("n_branches", [1, 5])
def test_few_branches_equal_their_single_runs_bit_for_bit(model: LlamaModel, n_branches: int) -> None:
    case = make_case(model, [(257, 20), (0, 20), (1, 3), (255, 1), (256, 9)][:n_branches])
    _, actual = case.run(1)
    assert all(is_same(*pair) for pair in zip(actual, case.expected, strict=True))


@pytest.mark.parametrize("name", ["M", "MR", "MS", "MH", "MH2"])
@pytest.mark.slow
def test_300_branches_come_in_turn_and_equal_their_single_runs(models, name: str) -> None:
    with LlamaModel(models(name)) as model:
        case = make_case(model, [(i % 4, 1 + i % 3) for i in range(300)], n_prefix=40)
        scheduler, one_by_one = case.run(1)
        assert all(is_same(*pair) for pair in zip(one_by_one, case.expected, strict=True))
        scheduler, together = case.run(64)
        check_all_close(together, case.expected, n_ties_max=15)
        assert scheduler.counts.n_decoded == 39 + sum(i % 4 + 1 + i % 3 for i in range(300))


def test_the_ends_of_replies_are_those_of_the_single_runs(models) -> None:
    with LlamaModel(models("ME")) as model:
        case = make_case(model, [(3 + i, 60) for i in range(12)])
        reasons = [one.finish_reason for one in case.expected]
        assert {"stop", "length"} == set(reasons)
        assert all(is_same(*pair) for pair in zip(case.run(1)[1], case.expected, strict=True))
        check_all_close(case.run(12)[1], case.expected)


def test_a_run_equals_plain_decode_calls_of_the_engine(model: LlamaModel) -> None:
    """No code of the scheduler's is in the baseline: one context, one sequence, one token after the other."""
    prefix, suffix = tokens_of(model, 300, seed=97), tokens_of(model, 300, seed=5)
    expected = plain(model, prefix, suffix, 20)
    scheduler = open_scheduler(model, 1)
    scheduler.root.extend(prefix)
    _, (actual,) = run_all(scheduler, [request([*prefix, *suffix], 20)])
    assert is_same(actual, expected)


def plain(model: LlamaModel, prefix: list[int], suffix: list[int], n: int) -> Written:
    context = NativeContext(model._pointer, MemoryRequest(), n_ctx=2048, n_seq_max=1, n_threads=1)
    tokens = [*prefix, *suffix]
    for start, end in ((0, len(prefix) - 1), (len(prefix) - 1, len(tokens) - 1)):
        for a in range(start, end, N_UBATCH):
            part = tokens[a : min(a + N_UBATCH, end)]
            assert context.decode([Rows(seq_id=0, tokens=part, p0=a, want_logits=False)])
    logits: Logits = []
    for _ in range(n):
        position = len(tokens) - 1
        assert context.decode([Rows(seq_id=0, tokens=tokens[-1:], p0=position, want_logits=True)])
        logits.append(np.array(context.logits(N_TOKENS)))
        tokens.append(int(logits[-1].argmax()))
    context.close()
    return Written(ids=tokens[-n:], logits=logits, finish_reason="length")


# ---------------------------------------------------------------- nothing of the others


@pytest.mark.parametrize("n_parallel", [1, 4])
def test_a_branch_never_sees_the_tokens_of_another(model: LlamaModel, n_parallel: int) -> None:
    """Other branches read and end before it, beside it and after it, in cells that were used, and the context grows."""
    prefix, secrets = tokens_of(model, 300, seed=97), [tokens_of(model, 30, seed=i) for i in range(4)]
    branches = [(secret, Sampling(max_tokens=24 if i == 1 else 2)) for i, secret in enumerate(secrets)]
    branches.append((tokens_of(model, 900, seed=9), Sampling(max_tokens=2)))
    sections = prefilled(model, prefix)
    expected = alone(model, prefix, sections, branches)
    told, _ = alone(model, [*prefix, *secrets[0]], prefilled(model, [*prefix, *secrets[0]]), branches[1:3])
    assert np.abs(told.logits[0] - expected[1].logits[0]).max() > 10 * NOISE * expected[1].logits[0].std()

    scheduler = open_scheduler(model, n_parallel)
    scheduler.root.extend(prefix)
    _, (first,) = run_all(scheduler, [RunRequest(tokens=(*prefix, *secrets[0]), sampling=branches[0][1])])
    before = scheduler.root.n_ctx
    _, actual = run_all(scheduler, [RunRequest(tokens=(*prefix, *s), sampling=o) for s, o in branches])
    assert scheduler.root.n_ctx > before
    for one, other in zip([first, *actual], [expected[0], *expected], strict=True):
        assert is_same(one, other) if n_parallel == 1 else check_close(one, other)
    _, (again,) = run_all(scheduler, [RunRequest(tokens=(*prefix, *secrets[1]), sampling=branches[1][1])])
    assert is_same(again, expected[1]) if n_parallel == 1 else check_close(again, expected[1])

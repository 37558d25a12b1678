"""How likely the tokens of a run were."""

from __future__ import annotations

import numpy as np
import pytest

from llamakv.engine.contract import TokenLogprob
from llamakv.engine.llamacpp import LlamaModel
from llamakv.engine.llamacpp.run import LlamaRun
from tests.engine.scheduler.cases import Seen, drive, watching
from tests.engine.scheduler.many import ask, open_many, run_one
from tests.engine.test_sequence import tokens_of

GRAMMAR = 'root ::= ("a" | "b" | "c"){1,9}'


def log_softmax(logits: np.ndarray) -> np.ndarray:
    values = logits.astype(np.float64)
    return values - values.max() - np.log(np.exp(values - values.max()).sum())


def check_logprobs(run: LlamaRun, seen: Seen, n_top: int) -> None:
    """Check each against the logits it was chosen from."""
    assert [one.token for one in run.logprobs] == run.tokens[run.n_prompt :]
    for one, logits in zip(run.logprobs, seen[run], strict=False):
        expected = log_softmax(logits)
        assert one.logprob == pytest.approx(expected[one.token], abs=1e-9)
        order = np.argsort(-logits, kind="stable")[:n_top]
        assert [token for token, _ in one.top] == list(order)
        assert [logprob for _, logprob in one.top] == pytest.approx(expected[order], abs=1e-9)


@pytest.mark.parametrize(
    "sampling",
    [
        {},
        {"temperature": 1.5, "top_k": 40, "seed": 3},
        {"grammar": GRAMMAR},
        {"grammar": GRAMMAR, "temperature": 1.0, "seed": 3},
        {"logit_bias": ((400, 30.0),), "repeat_penalty": 1.5},
    ],
    ids=["greedy", "random", "grammar", "random-grammar", "bias"],
)
def test_logprobs_are_those_of_the_logits_before_any_sampling_parameter(dense: LlamaModel, sampling) -> None:
    scheduler = open_many(dense)
    with watching() as seen:
        run = run_one(scheduler, tokens_of(dense, 40), 8, n_top=5, **sampling)
    assert run.n_generated >= 1
    check_logprobs(run, seen, 5)
    if not sampling:
        assert all(one.top[0] == (one.token, one.logprob) for one in run.logprobs)
    if sampling.get("temperature", 0) > 1:
        assert any(one.token != one.top[0][0] for one in run.logprobs)


def test_the_probabilities_of_all_tokens_sum_to_one(dense: LlamaModel) -> None:
    n_vocab = dense.info.n_vocab
    run = run_one(open_many(dense), tokens_of(dense, 40), 3, n_top=n_vocab + 7)
    for one in run.logprobs:
        assert len(one.top) == n_vocab
        assert sum(np.exp(logprob) for _, logprob in one.top) == pytest.approx(1, abs=1e-9)
        assert [logprob for _, logprob in one.top] == sorted((logprob for _, logprob in one.top), reverse=True)
        assert dict(one.top)[one.token] == one.logprob


def test_none_are_told_unless_asked_for_and_zero_tells_the_chosen_token_only(dense: LlamaModel) -> None:
    scheduler = open_many(dense)
    none, zero = (run_one(scheduler, tokens_of(dense, 40), 3, n_top=n) for n in (None, 0))
    assert none.logprobs == []
    assert [type(one) for one in zero.logprobs] == [TokenLogprob] * 3
    assert [one.top for one in zero.logprobs] == [()] * 3
    with pytest.raises(ValueError, match="-1 likely tokens"):
        scheduler.submit(ask(tokens_of(dense, 4), n_top=-1))


def test_those_that_were_taken_are_kept_no_longer(dense: LlamaModel) -> None:
    scheduler = open_many(dense)
    run = run_one(scheduler, tokens_of(dense, 40), 3, n_top=1)
    assert [one.token for one in run.take_logprobs()] == run.tokens[run.n_prompt :]
    assert (list(run.take_logprobs()), list(run.logprobs)) == ([], [])


def test_the_token_that_ends_a_reply_has_one_too(models) -> None:
    with LlamaModel(models("ME")) as model, watching() as seen:
        scheduler = open_many(model)
        runs = [run_one(scheduler, tokens_of(model, 30, seed=i), 60, n_top=2) for i in range(6)]
        ended = [run for run in runs if run.finish_reason == "stop"]
        assert ended
        for run in ended:
            assert model.is_end(run.logprobs[-1].token)
            check_logprobs(run, seen, 2)


def test_a_run_that_was_sent_back_to_wait_goes_on_with_them(dense: LlamaModel) -> None:
    scheduler = open_many(dense)
    with watching() as seen:
        run = scheduler.submit(ask(tokens_of(dense, 40), 8, n_top=3))
        while run.n_generated < 4:
            scheduler.step()
        scheduler._send_back(run)
        drive(scheduler, [run])
    assert len(run.logprobs) == run.n_generated == 8
    check_logprobs(run, seen, 3)

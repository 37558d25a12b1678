"""Random walks: a conversation that is saved, resumed and loaded all the time against one that never is.

Both are told the same. After every operation they have the same tokens, messages and logits, and so has a third
conversation that is resumed from the file (known-faults B10, B12, B15, B16, B46, B47, B49, B55, B58, B59).
"""

from __future__ import annotations

import itertools
import random
from dataclasses import replace
from pathlib import Path

import pytest

from llamakv.errors import AbortedError, UsageError
from llamakv.ops.chat import Conversation
from llamakv.ops.requests import Reporter, SamplingOptions
from llamakv.store.session_file import read_session
from tests.ops.driver import Driver, Heard

KINDS = ["M", "ME", "MS", "MR", "MH", "MH2"]
SHORT = ["Hello.", "What is it?", "One more thing: the river.", "é 数据 🙂", "x"]
LONG = "The quick brown fox jumps over the lazy dog. " * 14
N_OPERATIONS = 12


class Walk:
    """One walk: ``saved`` is kept on disk and brought back from there, ``plain`` only lives."""

    def __init__(self, driver: Driver, folder: Path, seed: int) -> None:
        self.driver = driver
        self.chance = random.Random(seed)
        self.path, self.other = folder / "walk.bin", folder / "other.bin"
        options = SamplingOptions(
            temperature=self.chance.choice([0.0, 0.9]), repeat_penalty=1.3, max_tokens=6, seed=seed
        )
        system = self.chance.choice([None, "Be brief."])
        with driver.chat(save=self.other, sampling=options) as other:
            other.send("Something else.", Heard().reporter)
        self.plain = driver.chat(sampling=options, system=system)
        self.saved = driver.chat(save=self.path, sampling=options, system=system)
        self.log: list[str] = []

    def close(self) -> None:
        self.plain.close()
        self.saved.close()

    def step(self) -> None:
        operations = ["send"] * 4 + ["undo"] * 2 + ["retry"] * 2
        operations += ["long", "system", "stopped reply", "stopped reading", "save", "resume", "resume", "load"]
        operation = self.chance.choice(operations)
        self.log.append(operation)
        if operation == "save":
            if self.path_is_current():
                self.saved.save(None, Heard().reporter)
        elif operation == "resume":
            self.resume()
        elif operation == "load":
            if self.path_is_current():
                self.saved.load(self.other, Heard().reporter)
                self.saved.load(self.path, Heard().reporter)
        else:
            choice = self.chance.random()
            results = [self.tell(conversation, operation, choice) for conversation in (self.plain, self.saved)]
            assert results[0] == results[1], self.log
        self.compare(self.saved)

    def tell(self, conversation: Conversation, operation: str, choice: float) -> object:
        text = SHORT[int(choice * len(SHORT))]
        try:
            match operation:
                case "send":
                    answer = conversation.send(text, Heard().reporter)
                case "long":
                    answer = conversation.send(f"{LONG}{text}", Heard().reporter)
                case "retry":
                    answer = conversation.retry(Heard().reporter)
                case "undo":
                    return conversation.undo(Heard().reporter)
                case "system":
                    conversation.set_system(f"Talk of {text}", Heard().reporter)
                    answer = conversation.send(text, Heard().reporter)
                case "stopped reply":
                    answer = conversation.send(text, stopping(int(choice * 5)))
                case "stopped reading":
                    answer = conversation.send(LONG * 2, Heard(abort_at=256).reporter)
        except (UsageError, AbortedError) as error:
            return type(error), error.message
        return answer.text, answer.finish_reason, answer.generated, answer.seed

    def path_is_current(self) -> bool:
        """Whether the file has all that was said: taking everything back leaves the file with the last exchange."""
        return self.path.exists() and bool(self.saved._model.sequence.tokens)

    def resume(self) -> None:
        if self.path_is_current():
            self.saved.close()
            self.saved = self.driver.resume(self.path)

    def compare(self, conversation: Conversation) -> None:
        plain, saved = self.plain, conversation
        assert list(saved._model.sequence.tokens) == list(plain._model.sequence.tokens), self.log
        assert saved.messages == plain.messages, self.log
        assert saved.sampling == plain.sampling, self.log
        assert saved._model.sequence.n_cells == max(len(saved._model.sequence.tokens) - 1, 0), self.log
        ends = [message.p1 for message in plain.messages]
        assert ends == sorted(ends), self.log
        assert [message.p0 for message in plain.messages] == [0, *ends[:-1]][: len(ends)], self.log
        if self.path_is_current():
            record = read_session(self.path).record
            assert list(record.tokens) == list(plain._model.sequence.tokens), self.log
            assert record.chat.messages == plain.messages, self.log

    def finish(self) -> None:
        """The next reply of all three: what lives, what was saved now and then, and the file."""
        if self.path_is_current():
            with self.driver.resume(self.path, save=self.path.with_name("last.bin")) as fresh:
                self.compare(fresh)
                answers = [c.send("And now?", Heard().reporter).text for c in (self.plain, self.saved, fresh)]
                assert len(set(answers)) == 1, self.log
                assert same_logits(self.plain, fresh), self.log
                assert same_logits(self.plain, self.saved), self.log
                self.compare(fresh)
        self.compare(self.saved)


def same_logits(one: Conversation, other: Conversation) -> bool:
    return bytes(one._model.sequence.logits()) == bytes(other._model.sequence.logits())


def stopping(n_tokens: int) -> Reporter:
    """Stop a reply after ``n_tokens``, the reading of the message never."""
    heard, asked = Heard(), itertools.count()
    said: list[str] = []
    return replace(heard.reporter, text=said.append, should_abort=lambda: len(said) >= n_tokens and next(asked) >= 0)


@pytest.mark.parametrize("seed", [pytest.param(0, marks=pytest.mark.slow), 35, 37])
@pytest.mark.parametrize("name", KINDS)
def test_saving_and_resuming_never_changes_what_is_said(models, tmp_path: Path, name: str, seed: int) -> None:
    walk = Walk(Driver(models(name), tmp_path), tmp_path, seed)
    try:
        for _ in range(N_OPERATIONS):
            walk.step()
        walk.finish()
    finally:
        walk.close()


@pytest.mark.slow
@pytest.mark.parametrize("seed", range(100, 130))
@pytest.mark.parametrize("name", KINDS)
def test_many_walks(models, tmp_path: Path, name: str, seed: int) -> None:
    test_saving_and_resuming_never_changes_what_is_said(models, tmp_path, name, seed)

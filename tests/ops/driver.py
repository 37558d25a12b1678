"""What tests of the ops need: requests for a model file, and a run that remembers what was said about it."""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path

from llamakv.ops.chat import Conversation, open_chat
from llamakv.ops.fork import BranchResult, ForkProgress, ForkRequest, ForkSummary, fork_session
from llamakv.ops.load import load_once
from llamakv.ops.prompts import Prompt
from llamakv.ops.requests import (
    Answer,
    ChatRequest,
    LoadRequest,
    MemoryOptions,
    ModelRequest,
    Reporter,
    ResumeOptions,
    SamplingOptions,
    SaveRequest,
)
from llamakv.ops.save import SaveResult, save_prefix

GREEDY = SamplingOptions(temperature=0.0, max_tokens=12, seed=0)
RANDOM = SamplingOptions(temperature=0.8, repeat_penalty=1.2, max_tokens=12, seed=7)


@dataclass
class Heard:
    """A reporter's memory."""

    notices: list[str] = field(default_factory=list)
    texts: list[str] = field(default_factory=list)
    phases: list[tuple[str, int, int]] = field(default_factory=list)
    abort_at: int | None = None
    """Stop once this many tokens have been evaluated."""

    @property
    def reporter(self) -> Reporter:
        return Reporter(
            notice=self.notices.append,
            warning=self.notices.append,
            progress=lambda phase, done, total: self.phases.append((phase, done, total)),
            text=self.texts.append,
            should_abort=self._asked,
        )

    def _asked(self) -> bool:
        n_done = max((done for phase, done, _ in self.phases if phase == "prefill"), default=0)
        return self.abort_at is not None and n_done >= self.abort_at


@dataclass(frozen=True)
class Forked:
    """A batch that has ended: results in the order they were told, and all that was told on the way."""

    results: Sequence[BranchResult]
    summary: ForkSummary
    progress: Sequence[ForkProgress]

    @property
    def texts(self) -> list[str]:
        """The answers; a branch that failed fails the test."""
        assert [result.error for result in self.results] == [None] * len(self.results)
        return [result.text for result in self.results]

    @property
    def ids(self) -> list[int | str]:
        return [result.branch.id for result in self.results]

    def __getitem__(self, index: int) -> BranchResult:
        """The result of the branch with this index, whenever it was told."""
        return next(result for result in self.results if result.branch.index == index)


class Driver:
    """Runs ops on one model, with a cache folder of its own."""

    def __init__(self, model: Path, folder: Path, *, memory: MemoryOptions | None = None) -> None:
        self.model = model
        self.folder = folder
        self.memory = memory or MemoryOptions()

    def request(self, path: Path | None = None, **more) -> ModelRequest:
        more.setdefault("n_threads", 1)
        return ModelRequest(path=path or self.model, cache_dir=self.folder / "cache", **more)

    def chat(self, heard: Heard | None = None, *, model: ModelRequest | None = None, **more) -> Conversation:
        more.setdefault("sampling", GREEDY)
        more.setdefault("memory", self.memory)
        request = ChatRequest(model=model or self.request(), **more)
        return open_chat(request, (heard or Heard()).reporter)

    def resume(
        self, path: Path, heard: Heard | None = None, *, model: ModelRequest | None = None, **more
    ) -> Conversation:
        request = ChatRequest(model=model or self.request(), resume=path, **more)
        return open_chat(request, (heard or Heard()).reporter)

    def save(self, path: Path, text: str | None, heard: Heard | None = None, **more) -> SaveResult:
        more.setdefault("sampling", GREEDY)
        more.setdefault("memory", self.memory)
        request = SaveRequest(model=more.pop("model", None) or self.request(), path=path, text=text, **more)
        return save_prefix(request, (heard or Heard()).reporter)

    def load(self, path: Path, prompt: str | None = None, heard: Heard | None = None, **more) -> Answer:
        request = LoadRequest(model=more.pop("model", None) or self.request(), path=path, prompt=prompt, **more)
        return load_once(request, (heard or Heard()).reporter)

    def fork(
        self,
        path: Path,
        *prompts: str | Prompt | None,
        heard: Heard | None = None,
        until: Callable[[Sequence[BranchResult]], bool] | None = None,
        on_result: Callable[[BranchResult], None] | None = None,
        **more,
    ) -> Forked:
        """Answer prompts, one at a time unless ``n_parallel`` says otherwise. ``until`` is asked with the results so
        far whether to stop."""
        more.setdefault("n_parallel", 1)
        asked = [
            prompt if isinstance(prompt, Prompt) else Prompt(id=number, text=prompt, where=f"prompt {number}")
            for number, prompt in enumerate(prompts)
        ]
        request = ForkRequest(model=more.pop("model", None) or self.request(), path=path, prompts=asked, **more)
        results: list[BranchResult] = []
        progress: list[ForkProgress] = []

        def take(result: BranchResult) -> None:
            results.append(result)
            if on_result is not None:
                on_result(result)

        reporter = (heard or Heard()).reporter
        if until is not None:
            reporter = replace(reporter, should_abort=lambda: until(results))
        summary = fork_session(request, reporter, on_result=take, on_progress=progress.append)
        return Forked(results, summary, progress)


def sha(path: Path) -> str:
    return hashlib.sha256(path.read_bytes()).hexdigest()


def state_of(conversation: Conversation) -> tuple[list[int], bytes]:
    """Every token, and the bits of the logits of the last decode."""
    sequence = conversation._model.sequence
    return list(sequence.tokens), bytes(sequence.logits())


__all__ = ["GREEDY", "RANDOM", "Driver", "Forked", "Heard", "ResumeOptions", "sha", "state_of"]

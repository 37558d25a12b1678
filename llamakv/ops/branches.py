"""What a branch has to read: the session's first tokens, then its own prompt, as a turn of a chat or as raw text."""

from __future__ import annotations

import array
import hashlib
import json
import time
from collections.abc import Sequence
from dataclasses import asdict, dataclass, replace

from llamakv.engine.contract import RunRequest
from llamakv.engine.prompt import ChatTemplate, plan_turn
from llamakv.errors import UsageError
from llamakv.ops.matching import merge_sampling, random_seed
from llamakv.ops.opening import OpenModel
from llamakv.ops.places import Base
from llamakv.ops.prompts import Prompt, PromptId
from llamakv.ops.reading import placed, tokenise, with_system
from llamakv.records import Message, Sampling


@dataclass(frozen=True, slots=True, kw_only=True)
class Branch:
    """One branch of a batch: ``index`` counts them in the order of the input, ``sample`` those of one prompt."""

    id: PromptId
    index: int
    sample: int | None
    prompt: Prompt


@dataclass(frozen=True, slots=True, kw_only=True)
class PlannedBranch:
    """A branch made out: what is to be run, and the messages it will have been read as (its reply comes after them).

    ``key`` is the same for the same work: model, memory settings, tokens and sampling.
    """

    branch: Branch
    request: RunRequest
    messages: tuple[Message, ...]
    key: str


def branches_of(prompts: Sequence[Prompt], n_samples: int) -> list[Branch]:
    """``n_samples`` branches of each prompt; of several, each has an id of its own."""
    found: list[Branch] = []
    for number, prompt in enumerate(prompts):
        for sample in range(n_samples):
            index = len(found)
            identity: PromptId = prompt.id
            if n_samples > 1:
                identity = index if prompt.id == number else f"{prompt.id}-{sample}"
            found.append(Branch(id=identity, index=index, sample=sample if n_samples > 1 else None, prompt=prompt))
    return found


class BranchPlanner:
    """Makes branches of one base out. ``template`` is None where it is raw text; ``is_random`` says that the seed of
    ``sampling`` was drawn for this batch."""

    def __init__(
        self,
        opened: OpenModel,
        base: Base,
        template: ChatTemplate | None,
        *,
        sampling: Sampling,
        timeout_s: float | None,
        keeps_cells: bool,
        is_random: bool,
    ) -> None:
        self._model = opened
        self._base = base
        self._template = template
        self._sampling = sampling
        self._timeout_s = timeout_s
        self._keeps_cells = keeps_cells
        self._is_random = is_random
        self._ends = bool(base.tokens) and opened.model.is_end(base.tokens[-1])

    def plan(self, branch: Branch) -> PlannedBranch:
        """Make a branch out.

        Raises:
            UsageError: a prompt that is empty or that the chat template refuses, parameters the engine does not take.
        """
        prompt = branch.prompt
        sampling = self._sampling_of(branch)
        messages: tuple[Message, ...] = ()
        if self._template is None:
            tokens = self._raw(prompt)
        else:
            tokens, messages = self._chat(self._template, prompt)
        request = RunRequest(
            tokens=tokens,
            sampling=sampling,
            timeout_s=self._timeout_s if prompt.timeout_s is None else prompt.timeout_s,
            keeps_cells=self._keeps_cells,
        )
        key = self._key(tokens, sampling, seed_given=prompt.sampling.seed)
        return PlannedBranch(branch=branch, request=request, messages=messages, key=key)

    def _sampling_of(self, branch: Branch) -> Sampling:
        options = branch.prompt.sampling
        if options.seed == -1:
            options = replace(options, seed=random_seed())
        sampling = merge_sampling(options, self._sampling)
        if branch.sample:
            sampling = replace(sampling, seed=(sampling.seed + branch.sample) % 2**32)
        if sampling.grammar != self._sampling.grammar or sampling.logit_bias != self._sampling.logit_bias:
            self._model.model.check_sampling(sampling)
        return sampling

    def _key(self, tokens: Sequence[int], sampling: Sampling, *, seed_given: int | None) -> str:
        model = self._model
        if seed_given == -1 or (seed_given is None and self._is_random):
            sampling = replace(sampling, seed=0)  # any seed would do
        if sampling.temperature <= 0:
            sampling = replace(sampling, seed=0, top_k=0, top_p=1.0, min_p=0.0)  # these make no difference
        facts = [asdict(model.identity), asdict(model.model.settings), asdict(sampling)]
        digest = hashlib.sha256(json.dumps(facts, sort_keys=True).encode())
        digest.update(array.array("i", tokens).tobytes())
        return digest.hexdigest()[:16]

    # ------------------------------------------------------------ raw text

    def _raw(self, prompt: Prompt) -> tuple[int, ...]:
        for what, given in (("messages", prompt.messages), ("system", prompt.system is not None)):
            if given:
                raise UsageError(f"{what!r} means nothing here: the session is raw text, which has no messages")
        if prompt.text is None:
            return self._base.tokens
        if not prompt.text:
            raise UsageError("the prompt is empty")
        model = self._model.model
        new = model.tokenize(prompt.text, add_special=False, parse_special=True)
        gives_way = self._ends and len(self._base.tokens) > 1
        return (*self._base.tokens[: len(self._base.tokens) - gives_way], *new)

    # ------------------------------------------------------------ a conversation

    def _chat(self, template: ChatTemplate, prompt: Prompt) -> tuple[tuple[int, ...], tuple[Message, ...]]:
        wanted, base = self._wanted(prompt), self._base
        plan = plan_turn(
            template,
            base.messages,
            wanted,
            n_tokens=len(base.tokens),
            ends_with_end_token=self._ends,
        )
        pieces = tokenise(self._model, plan.pieces, at_start=plan.n_keep == 0)
        new = [token for _, piece in pieces for token in piece]
        tokens = (*base.tokens[: plan.n_keep - plan.replace_pending], *new)
        return tokens, placed(self._model, wanted, plan, pieces, end=len(tokens), time_s=time.time())

    def _wanted(self, prompt: Prompt) -> tuple[Message, ...]:
        asked, system, messages = prompt.messages, prompt.system, self._base.messages
        if asked and asked[0][0] == "system":
            if system is not None:
                raise UsageError("there are two system prompts: in 'messages' and as 'system'")
            system, asked = asked[0][1], asked[1:]
        if system is not None:
            first = (Message(role="system", content=system, p0=0, p1=0),) if system.strip() else ()
            messages = with_system(messages, first)
        if asked:
            return (*messages, *(Message(role=role, content=content, p0=0, p1=0) for role, content in asked))
        if prompt.text is not None and prompt.text.strip():
            return (*messages, Message(role="user", content=prompt.text, p0=0, p1=0))
        if prompt.text is None and messages and messages[-1].role == "user":
            return (*messages[:-1], replace(messages[-1], is_open=False))
        if prompt.text is None:
            raise UsageError("there is nothing to answer: the conversation ends with a reply, and there is no prompt")
        raise UsageError("the message is empty")

"""The work that all strategies do: who asks what behind which prefix, in token ids, so that all counts are exact."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from llamakv.errors import UsageError
from llamakv.ops.bench.requests import STRATEGIES, StrategiesRequest

Tokens = tuple[int, ...]

FROM_STORE = ("cross-process", "hybrid")
"""Strategies that resume what was saved before."""


@dataclass(frozen=True, slots=True, kw_only=True)
class User:
    """One who asks ``question`` behind ``prefix``, once; both have at least one token."""

    prefix: Tokens
    question: Tokens

    @property
    def prompt(self) -> Tokens:
        """All that has to be read for the answer."""
        return self.prefix + self.question


@dataclass(frozen=True, slots=True, kw_only=True)
class Work:
    """All that is asked. The users' prefixes are the same one, or begin with different tokens, apart from the token
    that the model wants at the start of every text."""

    users: tuple[User, ...]
    n_answer: int
    shares_prefix: bool

    @property
    def n_prefix(self) -> int:
        """Tokens of each prefix."""
        return len(self.users[0].prefix)

    @property
    def n_question(self) -> int:
        """Tokens of each question."""
        return len(self.users[0].question)

    @property
    def n_prompt_tokens(self) -> int:
        """Tokens of all prompts."""
        return len(self.users) * (self.n_prefix + self.n_question)

    def session_tokens(self, user: User) -> Tokens:
        """What is saved of a prefix. A session's last token is pending, it has no cell: so the prefix is saved with the
        first token of a question behind it, which gives way to the question of whoever resumes it."""
        return (*user.prefix, self.users[0].question[0])


def check_request(request: StrategiesRequest) -> None:
    """Refuse what is no work.

    Raises:
        UsageError: a number below 1, or a name that is no strategy's.
    """
    counts = {
        "users": request.n_users,
        "tokens of the prefix": request.n_prefix,
        "tokens of a question": request.n_question,
        "tokens of an answer": request.n_answer,
    }
    for what, n in counts.items():
        if n < 1:
            raise UsageError(f"the number of {what} must be at least 1, not {n}")
    for name in request.names:
        if name not in STRATEGIES:
            raise UsageError(f"there is no strategy {name!r}", hint=f"one of: {', '.join(STRATEGIES)}")


def make_work(text: Sequence[int], firsts: Sequence[int], start: Sequence[int], request: StrategiesRequest) -> Work:
    """Cut prefixes and questions out of the tokens of a ``text``, which is gone through again where it is too short.
    ``start`` is what the model puts before every text: nothing, or one token.

    Each user's question, and the prefix where it is the user's own, begins with another one of ``firsts``.

    Raises:
        UsageError: there are fewer of these than users, or prefixes too short to differ.
    """
    n_users, n_text = request.n_users, request.n_prefix - len(start)
    if len(firsts) < n_users:
        raise UsageError(f"{n_users:,} users need as many different tokens, the model has {len(firsts):,}")
    if n_text < 1 and not request.shares_prefix:
        raise UsageError(f"prefixes of {request.n_prefix} tokens cannot differ: the model puts one before every text")
    shared = (*start, *cut(text, 0, n_text))
    users = []
    for number, first in enumerate(firsts[:n_users]):
        own = shared if request.shares_prefix else (*start, first, *cut(text, number, n_text - 1))
        users.append(User(prefix=own, question=(first, *cut(text, number, request.n_question - 1))))
    return Work(users=tuple(users), n_answer=request.n_answer, shares_prefix=request.shares_prefix)


def cut(text: Sequence[int], place: int, n_tokens: int) -> Tokens:
    """``n_tokens`` tokens of a text from ``place`` on; after its end comes its beginning."""
    return tuple(text[(place + i) % len(text)] for i in range(max(n_tokens, 0)))


def n_evaluated(name: str, work: Work) -> int:
    """Tokens that the strategy called ``name`` has to evaluate for the work, those of answers included: all of these
    but the last of each."""
    n_users = len(work.users)
    n_written = n_users * (work.n_answer - 1)
    if name in FROM_STORE:
        return n_users * work.n_question + n_written
    if name == "in-process" and work.shares_prefix:
        return work.n_prefix + n_users * work.n_question + n_written
    return work.n_prompt_tokens + n_written


def n_different(answers: Sequence[Tokens], others: Sequence[Tokens]) -> int:
    """How many users got another answer."""
    return sum(one != other for one, other in zip(answers, others, strict=True))

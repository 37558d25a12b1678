"""Choosing the next token with llama.cpp's own sampler chain."""

from __future__ import annotations

import ctypes
import hashlib
import math
import struct
import time
from collections.abc import Sequence

import numpy as np

from llamakv.engine.contract import TokenLogprob
from llamakv.engine.grammar import check_grammar
from llamakv.engine.llamacpp.native import Pointer, api
from llamakv.errors import EngineError, UsageError
from llamakv.records import Sampling

_MAX_GRAMMAR_S = 0.5
"""Processor time for one token's grammar: what the engine follows may double with each token, and others wait."""

_MAX_PENALTY_TOKENS = 1 << 20
"""The engine makes room for all of a penalty's tokens at once (4 bytes each); no context is longer than this."""


def seed_at(seed: int, position: int) -> int:
    """The 32-bit seed of the random choice at a position: a digest of the session's seed and the position, so that
    the choice does not depend on where the run that makes it began."""
    digest = hashlib.blake2b(struct.pack("<QQ", seed, position), digest_size=4).digest()
    return int.from_bytes(digest, "little")


class TokenChooser:
    """A sampler chain: logit bias, penalties, grammar, top-k, top-p, min-p, temperature, choice.

    ``history`` are the tokens before the first choice, oldest first; the penalties' window is rebuilt from them. Of
    them the last ``n_reply`` belong to the reply under way, which a grammar has already followed. Close it.

    Raises:
        UsageError: the grammar cannot be read, or a biased token does not exist.
    """

    def __init__(
        self, vocab: Pointer, n_vocab: int, sampling: Sampling, history: Sequence[int], *, n_reply: int = 0
    ) -> None:
        self._seed = sampling.seed
        self._n_vocab = n_vocab
        self._has_grammar = sampling.grammar is not None
        if self._has_grammar:
            self._candidates = np.zeros(n_vocab, [("id", np.int32), ("logit", np.float32), ("p", np.float32)])
        self._chain: Pointer = api.llama_sampler_chain_init(api.llama_sampler_chain_default_params())
        try:
            self._build(vocab, n_vocab, sampling, history, n_reply)
        except BaseException:
            self.close()
            raise

    def _build(self, vocab: Pointer, n_vocab: int, sampling: Sampling, history: Sequence[int], n_reply: int) -> None:
        if sampling.logit_bias:
            self._add(_bias(n_vocab, sampling.logit_bias))
        if _has_penalties(sampling):
            penalties = api.llama_sampler_init_penalties(
                n_vocab,
                min(sampling.penalty_last_n, _MAX_PENALTY_TOKENS),
                sampling.repeat_penalty,
                sampling.frequency_penalty,
                sampling.presence_penalty,
            )
            for token in history[-sampling.penalty_last_n :]:
                api.llama_sampler_accept(penalties, token)
            self._add(penalties)
        if sampling.grammar is not None:
            check_grammar(sampling.grammar)
            grammar = api.llama_sampler_init_grammar(vocab, sampling.grammar.encode(), b"root")
            if not grammar:
                raise UsageError("the grammar cannot be read: it must be GBNF with a rule named root")
            for token in history[len(history) - n_reply :]:
                api.llama_sampler_accept(grammar, token)
            self._add(grammar)
        self._n_fixed = 0
        if sampling.temperature <= 0:
            self._add(api.llama_sampler_init_greedy())
            self._is_random = False
            return
        if sampling.top_k > 0:
            self._add(api.llama_sampler_init_top_k(sampling.top_k))
        if sampling.top_p < 1:
            self._add(api.llama_sampler_init_top_p(sampling.top_p, 1))
        if sampling.min_p > 0:
            self._add(api.llama_sampler_init_min_p(sampling.min_p, 1))
        self._add(api.llama_sampler_init_temp(sampling.temperature))
        self._n_fixed = api.llama_sampler_chain_n(self._chain)
        self._is_random = True

    def _add(self, sampler: Pointer) -> None:
        api.llama_sampler_chain_add(self._chain, sampler)

    def choose(self, context: Pointer, position: int, index: int) -> int | None:
        """The token for ``position``, from the logits at ``index`` of the last decode call; counts it as said. None if
        the grammar and the logit bias together allow none.

        Raises:
            EngineError: the grammar takes too long.
        """
        if self._is_random:
            if api.llama_sampler_chain_n(self._chain) > self._n_fixed:
                api.llama_sampler_free(api.llama_sampler_chain_remove(self._chain, self._n_fixed))
            self._add(api.llama_sampler_init_dist(seed_at(self._seed, position)))
        if self._has_grammar:
            return self._choose_carefully(context, index)
        return int(api.llama_sampler_sample(self._chain, context, index))

    def _choose_carefully(self, context: Pointer, index: int) -> int | None:
        """As ``llama_sampler_sample``, but what the grammar does not allow is never counted as said: that ends the
        process (a C++ exception)."""
        started_s = time.thread_time()
        candidates, logits = self._candidates, api.llama_get_logits_ith(context, index)
        candidates["id"] = np.arange(self._n_vocab)
        candidates["logit"] = np.ctypeslib.as_array(logits, (self._n_vocab,))
        data = candidates.ctypes.data_as(ctypes.POINTER(api.llama_token_data))
        array = api.llama_token_data_array(data=data, size=self._n_vocab, selected=-1, sorted=False)
        api.llama_sampler_apply(self._chain, ctypes.byref(array))
        chosen = array.data[array.selected]
        if not math.isfinite(chosen.logit):
            return None
        api.llama_sampler_accept(self._chain, chosen.id)
        if time.thread_time() - started_s > _MAX_GRAMMAR_S:
            raise EngineError(
                f"the grammar is too ambiguous: one token of it took more than {_MAX_GRAMMAR_S} s",
                hint="write it so that one text has one way through it",
            )
        return int(chosen.id)

    def close(self) -> None:
        """Free the chain and all in it."""
        if self._chain:
            api.llama_sampler_free(self._chain)
            self._chain = None


class TokenProbabilities:
    """How likely each token was after a decode call, before any sampling parameter: natural logarithms of the softmax
    of the logits at ``index``. Valid for as long as these logits are."""

    def __init__(self, context: Pointer, index: int, n_vocab: int) -> None:
        self._logits = np.ctypeslib.as_array(api.llama_get_logits_ith(context, index), (n_vocab,))
        largest = float(self._logits.max())
        exponentials = np.exp(self._logits.astype(np.float64) - largest)
        self._log_sum = largest + math.log(float(exponentials.sum()))

    def of(self, token: int, n_top: int) -> TokenLogprob:
        """A token's, with those of the ``n_top`` most likely tokens, the first one first."""
        n = min(n_top, len(self._logits))
        found = (
            np.argpartition(self._logits, len(self._logits) - n)[len(self._logits) - n :] if n else np.array([], int)
        )
        ordered = sorted((int(i) for i in found), key=lambda i: (-float(self._logits[i]), i))
        top = tuple((i, float(self._logits[i]) - self._log_sum) for i in ordered)
        return TokenLogprob(token=token, logprob=float(self._logits[token]) - self._log_sum, top=top)


def _has_penalties(sampling: Sampling) -> bool:
    return sampling.penalty_last_n > 0 and (
        sampling.repeat_penalty != 1 or sampling.frequency_penalty != 0 or sampling.presence_penalty != 0
    )


def _bias(n_vocab: int, biases: Sequence[tuple[int, float]]) -> Pointer:
    for token, _ in biases:
        if not 0 <= token < n_vocab:
            raise UsageError(f"token {token} in the logit bias is not one of 0 ... {n_vocab - 1}")
    array = (api.llama_logit_bias * len(biases))()
    for entry, (token, bias) in zip(array, biases, strict=True):
        entry.token, entry.bias = token, ctypes.c_float(bias).value
    return api.llama_sampler_init_logit_bias(n_vocab, len(biases), array)

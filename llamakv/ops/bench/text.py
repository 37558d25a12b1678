"""English to measure with: sentences by rule, of any length, the same for the same seed."""

from __future__ import annotations

import random

_WHO = (
    "The harbour master", "A young engineer", "My neighbour", "The committee", "Every visitor", "Our guide",
    "The night nurse", "An old carpenter", "The mayor's sister", "A travelling musician", "The school's cook",
)  # fmt: skip
_DID = (
    "described", "repaired", "remembered", "questioned", "counted", "painted", "carried", "compared", "borrowed",
    "forgot", "measured", "sold",
)  # fmt: skip
_WHAT = (
    "the old bridge", "a brass lantern", "three letters", "the winter market", "a map of the coast", "the engine",
    "an empty violin case", "the town's only clock", "a box of seeds", "the second boat", "two loaves of bread",
)  # fmt: skip
_HOW = (
    "near the station", "before the storm", "in a quiet voice", "at the edge of town", "with great care",
    "because nobody else would", "while the children slept", "for the third time that week", "without a word",
)  # fmt: skip
_WHEN = ("In spring", "On Monday", "Years later", "That evening", "After the fair", "As always", "Once")


def story(n_sentences: int, *, seed: int = 0) -> str:
    """``n_sentences`` sentences in paragraphs of five."""
    choose = random.Random(seed)
    sentences = [_sentence(choose) for _ in range(n_sentences)]
    return "\n\n".join(" ".join(sentences[i : i + 5]) for i in range(0, n_sentences, 5))


def _sentence(choose: random.Random) -> str:
    who, did, what, how = map(choose.choice, (_WHO, _DID, _WHAT, _HOW))
    if choose.random() < 0.3:
        return f"{choose.choice(_WHEN)}, {who[0].lower()}{who[1:]} {did} {what} {how}."
    return f"{who} {did} {what} {how}, and paid {choose.randrange(2, 900)} for it." if choose.random() < 0.2 else (
        f"{who} {did} {what} {how}."
    )  # fmt: skip

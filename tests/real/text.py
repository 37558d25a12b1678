"""English text of any length, written by a rule; real models read it with ordinary token statistics."""

from __future__ import annotations

import random

SUBJECTS = ["The harbour master", "A young engineer", "My neighbour", "The committee", "Every visitor", "Our guide"]
VERBS = ["described", "repaired", "remembered", "questioned", "counted", "painted", "carried", "compared"]
OBJECTS = [
    "the old bridge",
    "a brass lantern",
    "three letters",
    "the winter market",
    "a map of the coast",
    "the engine",
]
PLACES = ["near the station", "before the storm", "in a quiet voice", "at the edge of town", "with great care"]


def story(n_sentences: int, seed: int = 0) -> str:
    """``n_sentences`` sentences, in paragraphs of five."""
    chosen = random.Random(seed)
    sentences = [
        f"{chosen.choice(SUBJECTS)} {chosen.choice(VERBS)} {chosen.choice(OBJECTS)} {chosen.choice(PLACES)}."
        for _ in range(n_sentences)
    ]
    return "\n\n".join(" ".join(sentences[i : i + 5]) for i in range(0, n_sentences, 5))

"""One small SPM vocabulary for every tiny model: control tokens, all bytes, ASCII, learned word pieces."""

from collections import Counter
from dataclasses import dataclass
from functools import cache
from itertools import pairwise

from gguf import TokenType

UNK, BOS, EOS, IM_START, IM_END = range(5)
CONTROL = ("<unk>", "<s>", "</s>", "<|im_start|>", "<|im_end|>")
N_BYTES = 256
N_TOKENS = 704  # a multiple of 64, so that every tensor row has a round size
FIRST_BYTE = len(CONTROL)
NEWLINE = FIRST_BYTE + 0x0A
FIRST_TEXT = FIRST_BYTE + N_BYTES  # from here on: tokens that are whole characters
SPACE = "\u2581"  # how SPM spells a space

_TEXT = """
the model reads the whole text once and keeps what it has read so that nobody has to wait for it again
a session holds the tokens and the state and it can be saved under a name and loaded on the next day
when the file is damaged or belongs to another model the program says so and leaves everything as it was
you are a helpful assistant please answer the question in a few short words and then stop
what is the name of the city where the river meets the sea and how many people live there today
she opened the old book on the table and began to read the story of a king who had three daughters
once upon a time there was a small house near the forest and in the house there lived a woman and her cat
the weather was cold that morning and the children walked to school through the snow with their friends
write a list of ten things that people often forget when they travel to another country in the summer
first we take the water then we add the salt and after that we stir until nothing is left at the bottom
the code is one two three four five six seven eight nine ten and the answer must be given in english
every branch continues from the same prefix and none of them should see what the others have written
user system assistant message role content history turn reply prompt token context memory number sequence
summary translate explain describe compare continue thinking because before between without something
The quick brown fox jumps over the lazy dog. Hello, world! Who are you? I am here; thank you very much.
This is a test. Write a story about a ship. Tell me more about it. Is that right? Yes, it is. No, it is not.
"""


@dataclass(frozen=True, slots=True, kw_only=True)
class Vocabulary:
    """Parallel lists, indexed by token id."""

    pieces: list[str]
    scores: list[float]
    types: list[int]


@cache
def vocabulary() -> Vocabulary:
    """Build the vocabulary; the same lists every time."""
    letters = [SPACE, *(chr(c) for c in range(0x21, 0x7F))]
    learned = _learn_pieces(N_TOKENS - FIRST_TEXT - len(letters), set(letters))
    pieces = [*CONTROL, *(f"<0x{b:02X}>" for b in range(N_BYTES)), *letters, *learned]
    types = [TokenType.UNKNOWN] + [TokenType.CONTROL] * (len(CONTROL) - 1)
    types += [TokenType.BYTE] * N_BYTES + [TokenType.NORMAL] * (len(letters) + len(learned))
    # SPM joins the pair with the highest score first: the order in which the pieces were learned
    scores = [0.0] * FIRST_TEXT + [-1000.0] * len(letters) + [-float(rank) for rank in range(len(learned))]
    assert len(pieces) == len(set(pieces)) == len(scores) == len(types) == N_TOKENS
    return Vocabulary(pieces=pieces, scores=scores, types=[int(t) for t in types])


def _learn_pieces(n_pieces: int, known: set[str]) -> list[str]:
    """Byte pair encoding on the text above: ties go to the pair that sorts first."""
    words = Counter(tuple(SPACE + word) for word in _TEXT.split())
    learned: list[str] = []
    seen = set(known)
    while len(learned) < n_pieces:
        pairs: Counter[tuple[str, str]] = Counter()
        for word, count in words.items():
            for pair in pairwise(word):
                pairs[pair] += count
        best = min(pairs, key=lambda pair: (-pairs[pair], pair))
        words = Counter({_join(word, best): count for word, count in words.items()})
        if (piece := "".join(best)) not in seen:
            seen.add(piece)
            learned.append(piece)
    return learned


def _join(word: tuple[str, ...], pair: tuple[str, str]) -> tuple[str, ...]:
    out: list[str] = []
    i = 0
    while i < len(word):
        if word[i : i + 2] == pair:
            out.append("".join(pair))
            i += 2
        else:
            out.append(word[i])
            i += 1
    return tuple(out)

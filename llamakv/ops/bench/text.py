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


# ---------------------------------------------------------------- more like what people write

_PEOPLE = (
    ("Martha", "she", "her"), ("Edwin", "he", "his"), ("Dr Larsen", "she", "her"), ("Tobias", "he", "his"),
    ("Captain Reed", "he", "his"), ("Ines", "she", "her"), ("Mr Finch", "he", "his"), ("Aunt Clara", "she", "her"),
)  # fmt: skip
_PLACES = ("Harwick", "the upper valley", "Saint Olave", "the salt marshes", "Brenn Island", "the old quarter")
_MONTHS = ("January", "March", "April", "June", "August", "October", "November")
_TRADES = ("a clockmaker", "a nurse", "a surveyor", "a baker", "the schoolteacher", "a lawyer from the city")

_PARAGRAPHS = (
    "When {name} first came to {place}, there was no bridge, only a ferry that crossed twice a day if the wind "
    "allowed it. People told {n} different stories about how the last bridge had been lost, and nobody agreed on "
    "the year. {They} wrote all of them down in a green notebook. The notebook is still in the library, and the "
    "stories still do not agree.",
    "The first thing one learns about bees is that they do not care who owns the garden. {name} kept {n} hives "
    "behind the church in {place}, and every {month} {they} carried them up the hill, two at a time, so that the "
    "honey would taste of heather. It was slow work. When somebody asked why {they} did not buy a cart, {they} "
    "said that a cart has never noticed the weather.",
    '"You are late," said {name}, without looking up from the ledger. It was true: the boat had waited for the '
    "tide, and then the tide had waited for nobody. I put the parcel on the table and counted out {n} coins. "
    '{They} counted them again. "And the letter?" {they} asked. There was no letter, and I had spent the whole '
    "journey from {place} thinking about how to say so.",
    "To repair a clock of this kind, begin with the weights, not with the hands. Take off both weights, wait "
    "until the pendulum hangs still, and mark where it rests. If the mark is off by more than {n} millimetres, "
    "the wall has moved, not the clock. {name}, who learned the trade in {place}, used to say that half of all "
    "broken clocks are only crooked houses.",
    "The council of {place} met in {month} to decide about the water. There were {n} people in a room meant for "
    "half as many, and all of them had prepared a speech. {name} spoke last. {They} said that a well has no "
    "opinion, that it was dry two summers out of five, and that a pipe would cost less than what the town had "
    "already spent on arguing. The vote was close, but the pipe was built.",
    "In {month} the days are short here, and the light comes in low over the harbour, so that every rope and "
    "every gull has a long blue shadow. {name} painted it for {n} years and never sold a single picture of it, "
    "because {they} gave them away. Almost every kitchen in {place} has one. Visitors think it is a custom.",
    "There are good reasons to keep records, and {name} knew most of them. A record settles quarrels, it "
    "remembers what the memory would rather improve, and it can be read by somebody who was not there. The tide "
    "tables of {place} go back {n} years without a gap. During one winter the ink froze, and the figures for that "
    "week are scratched into the cover with a nail.",
    "My grandmother's recipe for plum cake begins with a warning about the oven and ends with one about the "
    "neighbours. Between the two it needs {n} plums, a little more butter than seems reasonable, and patience. "
    "{name} of {place} once offered to buy it. She was told that it was not for sale, but that {they} was welcome "
    "to a slice, and {they} came back for it every Sunday until {month}.",
    "The survey took longer than planned. We had walked {n} kilometres along the old wall when {name} noticed "
    "that the map was drawn from the other side. {They} turned it over, held it against the sun, and laughed. "
    "After that everything was where it should be: the spring, the two farms, the path down to {place}. We were "
    "home before it was dark.",
    "What makes a town worth staying in? {name}, who is {trade} and has lived in {place} since {month} of the "
    "year of the flood, gives the same answer to everybody who asks. It is not the view, {they} says, although "
    "the view is fine. It is that within {n} minutes on foot there is a person who would lend you a ladder, and "
    "another one who would hold it.",
)

_LAST_PARAGRAPHS = (
    "The storm was over by morning. {name} walked along the shore to see what it had left: {n} planks of good "
    "oak, a bucket, and a door with its handle still on. {They} carried the door home, because the one of {their} "
    "shed had been missing since {month}. It fitted as if it had been made for it. Nobody in {place} was "
    "surprised; the sea, they say there, pays its debts.",
    "Dear friend, thank you for the seeds, which arrived in {month} together with a great deal of rain. I gave "
    "half of them to {name}, who has a wall that faces south and knows what to do with it. Of the rest, {n} have "
    "come up. I did not write down which is which, so we shall have to wait and see. If you pass through {place} "
    "this autumn, there will be either melons or a very good excuse.",
    "Every machine in the mill had a name, and every name had a reason. The oldest loom was called the Bishop, "
    "because it was slow and could not be hurried. {name} worked at it for {n} years and could tell from the "
    "sound alone when a thread was about to break. {They} would lift one finger, the girl at the window would "
    "stop the belt, and then, a moment later, the thread would break. In {place} they still say of a careful "
    "person that they have heard the Bishop.",
    "It is often said that the lighthouse saved more ships by being seen in daylight than by its lamp. {name} did "
    "the sums. Over {n} winters, {they} found, most of the ships that came to grief did so in fog, when neither "
    "tower nor lamp is of any use but a bell can be heard. The bell was hung in {month}. It has been rung by hand "
    "ever since, and the people of {place} have learned to sleep through it.",
)


def tale(n_paragraphs: int, *, seed: int = 0) -> str:
    """``n_paragraphs`` paragraphs about a coast and its people, written by hand, with other names and numbers each time
    one comes again: closer to what people write than ``story``, for where it matters how hard a text is to foretell."""
    choose = random.Random(seed)
    paragraphs: list[str] = []
    while len(paragraphs) < n_paragraphs:
        paragraphs += [_filled(choose, text) for text in choose.sample(_PARAGRAPHS, len(_PARAGRAPHS))]
    return "\n\n".join(paragraphs[:n_paragraphs])


def end_of_tale(*, seed: int = 0) -> str:
    """Some paragraphs more, none of which ``tale`` has."""
    choose = random.Random(seed)
    return "\n\n".join(_filled(choose, text) for text in choose.sample(_LAST_PARAGRAPHS, len(_LAST_PARAGRAPHS)))


def _filled(choose: random.Random, text: str) -> str:
    name, they, their = choose.choice(_PEOPLE)
    filled = text.format(
        name=name,
        they=they,
        They=they.capitalize(),
        their=their,
        place=choose.choice(_PLACES),
        month=choose.choice(_MONTHS),
        trade=choose.choice(_TRADES),
        n=choose.randrange(3, 60),
    )
    return filled[0].upper() + filled[1:]

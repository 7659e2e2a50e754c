"""Generators of the demo tasks: pure functions of a world and a NumPy generator.

The five tasks follow the forms of well-known text tasks (RTE, WiC, BoolQ, CB, DROP) over a small invented world.
Each needs facts that only training on that world gives, and a small computation over them.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass

import numpy as np

from demo import vocabulary as words
from demo.world import World

Row = dict[str, str]
"""Plain source fields of one example; ``answer`` is the text to generate, without a leading space."""

Pair = tuple[int, int]
"""Indices of the two words that name a thing, a person or a festival."""

RELATION_LETTERS = {"contradiction": "A", "entailment": "B", "neutral": "C"}

COMPARATIVES = (("larger", "size"), ("dearer", "price"))
SENTENCE_FRAMES = (
    "the {cue} near the {word}",
    "a {cue} by a {word}",
    "the {cue} has a {word}",
    "a {cue} saw the {word}",
)


@dataclass(frozen=True)
class Time:
    """When somebody came: its text, its kind, and its first and last month (0 to 11)."""

    text: str
    kind: str
    first: int
    last: int


def entailment(world: World, rng: np.random.Generator) -> Row:
    """Is the thing that somebody got large, dear or foreign? Two-way entailment, as in RTE."""
    agent, verb, entailed = pick(rng, words.AGENTS), pick(rng, words.TRANSFER_VERBS), bool(rng.integers(2))
    quality = pick(rng, words.QUALITIES)
    thing = things_of(world, rng, 1)[0]
    while has_quality(world, thing, quality) != entailed:
        thing = things_of(world, rng, 1)[0]
    return {
        "premise": f"{agent} {verb} the {thing_text(thing)}.",
        "hypothesis": f"{agent} {verb} a {quality} thing.",
        "label": "entailment" if entailed else "not_entailment",
        "answer": "A" if entailed else "B",
    }


def has_quality(world: World, thing: Pair, quality: str) -> bool:
    """Large and dear are the upper half of the levels; foreign is made in the latter half of the towns."""
    table = {"large": world.size, "dear": world.price, "foreign": world.origin}[quality]
    return bool(table[thing] >= 4)


def word_sense(world: World, rng: np.random.Generator) -> Row:
    """Has an ambiguous word the same meaning in two short sentences? As in WiC.

    The first sentence always shows the word's first sense, like a dictionary's example.
    """
    index = int(rng.integers(len(world.sense)))
    senses, same = world.sense[index], bool(rng.integers(2))
    example = int(rng.choice(np.flatnonzero(senses == 0)))
    other = int(rng.choice([t for t in np.flatnonzero(senses == (0 if same else 1)) if t != example]))
    word = words.SENSE_WORDS[index]
    return {
        "word": word,
        "sentence1": cue_sentence(rng, word, example),
        "sentence2": cue_sentence(rng, word, other),
        "label": "true" if same else "false",
        "answer": "Yes" if same else "No",
    }


def comparison(world: World, rng: np.random.Generator) -> Row:
    """A yes/no question about which of two people's things is larger or dearer, as in BoolQ."""
    agents = distinct(rng, words.AGENTS, 2)
    comparative, attribute = COMPARATIVES[int(rng.integers(len(COMPARATIVES)))]
    levels = getattr(world, attribute)
    things = things_of(world, rng, 2)
    while levels[things[0]] == levels[things[1]]:
        things = things_of(world, rng, 2)
    yes = bool(levels[things[0]] > levels[things[1]])
    passage = " and ".join(f"{agent} has the {thing_text(thing)}" for agent, thing in zip(agents, things, strict=True))
    return {
        "passage": f"{passage}.",
        "question": f"Has {agents[0]} the {comparative} thing?",
        "label": "yes" if yes else "no",
        "answer": "Yes" if yes else "No",
    }


def relation(world: World, rng: np.random.Generator) -> Row:
    """Does a premise about when somebody came contradict, entail or leave open the hypothesis? As in CB."""
    agent, wanted = pick(rng, words.AGENTS), pick(rng, tuple(RELATION_LETTERS))
    while True:
        came = time_of(world, rng, ("festival",))
        limit = time_of(world, rng, ("festival", "month", "season"))
        if limit.text != came.text and _interval_relation(came, limit) == wanted:
            break
    return {
        "premise": f"{agent} came at {came.text}.",
        "hypothesis": f"{agent} came before {limit.text}.",
        "label": wanted,
        "answer": RELATION_LETTERS[wanted],
    }


def host_span(world: World, rng: np.random.Generator) -> Row:
    """What does somebody's host carry or wear? An answer of two or three words, as in DROP and SQuAD."""
    person, wear = people_of(world, rng, 1)[0], bool(rng.integers(2))
    guest, verb = pick(rng, words.AGENTS), pick(rng, words.STAY_VERBS)
    return {
        "passage": f"{guest} {verb} with {person_text(person)}.",
        "question": f"What does the host {'wear' if wear else 'carry'}?",
        "answer": worn_text(world, person) if wear else carried_text(world, person),
    }


TASKS: Mapping[str, Callable[[World, np.random.Generator], Row]] = {
    "entail": entailment,
    "sense": word_sense,
    "compare": comparison,
    "relation": relation,
    "span": host_span,
}


def cue_sentence(rng: np.random.Generator, word: str, topic: int) -> str:
    """A sentence that uses an ambiguous word beside a cue of a topic."""
    return pick(rng, SENTENCE_FRAMES).format(word=word, cue=pick(rng, words.TOPIC_CUES[topic])) + "."


def carried_text(world: World, person: Pair) -> str:
    """What a person carries, such as ``copper lantern``."""
    material, thing = world.carried[person]
    return f"{words.MATERIALS[material]} {words.OBJECTS[thing]}"


def worn_text(world: World, person: Pair) -> str:
    """What a person wears, such as ``red wool coat``."""
    colour, cloth, garment = world.worn[person]
    return f"{words.COLOURS[colour]} {words.CLOTHS[cloth]} {words.GARMENTS[garment]}"


def _interval_relation(inner: Time, limit: Time) -> str:
    """How "inner lies wholly before limit" stands."""
    if inner.last < limit.first:
        return "entailment"
    return "contradiction" if inner.first > limit.last else "neutral"


def time_of(world: World, rng: np.random.Generator, kinds: tuple[str, ...]) -> Time:
    """A random time of a random kind."""
    kind = pick(rng, kinds)
    if kind == "season":
        season = int(rng.integers(len(words.SEASONS)))
        return Time(words.SEASONS[season], kind, 3 * season, 3 * season + 2)
    if kind == "month":
        month = int(rng.integers(len(words.MONTHS)))
        return Time(words.MONTHS[month], kind, month, month)
    festival = _pairs(rng, world.month.shape, 1)[0]
    month = int(world.month[festival])
    text = f"the {words.FESTIVAL_ADJECTIVES[festival[0]]} {words.FESTIVAL_NOUNS[festival[1]]}"
    return Time(text, kind, month, month)


def pick(rng: np.random.Generator, items: tuple[str, ...]) -> str:
    return items[int(rng.integers(len(items)))]


def distinct(rng: np.random.Generator, items: tuple[str, ...], count: int) -> list[str]:
    return [items[i] for i in rng.permutation(len(items))[:count]]


def _pairs(rng: np.random.Generator, shape: tuple[int, ...], count: int) -> list[Pair]:
    """``count`` different index pairs."""
    chosen: list[Pair] = []
    while len(chosen) < count:
        pair = (int(rng.integers(shape[0])), int(rng.integers(shape[1])))
        if pair not in chosen:
            chosen.append(pair)
    return chosen


def things_of(world: World, rng: np.random.Generator, count: int) -> list[Pair]:
    """``count`` different things of the world."""
    return _pairs(rng, world.origin.shape, count)


def people_of(world: World, rng: np.random.Generator, count: int) -> list[Pair]:
    """``count`` different people of the world."""
    return _pairs(rng, world.carried.shape[:2], count)


def thing_text(thing: Pair) -> str:
    return f"{words.MATERIALS[thing[0]]} {words.OBJECTS[thing[1]]}"


def person_text(person: Pair) -> str:
    return f"{words.FIRST_NAMES[person[0]]} {words.FAMILY_NAMES[person[1]]}"

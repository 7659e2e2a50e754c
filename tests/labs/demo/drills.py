"""Facts and partial questions of the demo world, used only to train the demo model: none of them is a task's prompt.

A *fact* asks for one stored value ("copper lantern size:"). A *probe* asks for a value that a task's answer is computed
from, over the same kind of passage, so that a small model finds the steps of the tasks soon.
"""

from __future__ import annotations

from collections.abc import Callable

import numpy as np

from demo import tasks
from demo import vocabulary as words
from demo.tasks import Pair
from demo.world import World

FACT_SHARES = (0.3, 0.25, 0.15, 0.3)


def fact(world: World, rng: np.random.Generator) -> tuple[str, str]:
    """A prompt that asks for one stored fact, and its answer, such as ``("copper lantern size:", "three")``."""
    makers = (_thing_fact, _person_fact, _festival_fact, _sense_fact)
    return makers[int(rng.choice(len(makers), p=FACT_SHARES))](world, rng)


def probe(world: World, rng: np.random.Generator) -> tuple[str, str]:
    """A passage of a task with a question about one intermediate value, and the answer."""
    return PROBES[int(rng.integers(len(PROBES)))](world, rng)


def _attribute_of_thing(world: World, thing: Pair, attribute: str) -> str:
    names = words.TOWNS if attribute == "origin" else words.LEVELS
    return names[int(getattr(world, attribute)[thing])]


def _thing_fact(world: World, rng: np.random.Generator) -> tuple[str, str]:
    thing = tasks.things_of(world, rng, 1)[0]
    attribute = tasks.pick(rng, ("origin", "size", "price"))
    return f"{tasks.thing_text(thing)} {attribute}:", _attribute_of_thing(world, thing, attribute)


def _person_fact(world: World, rng: np.random.Generator) -> tuple[str, str]:
    person = tasks.people_of(world, rng, 1)[0]
    subject = tasks.person_text(person)
    if rng.integers(2):
        return f"{subject} wears:", tasks.worn_text(world, person)
    return f"{subject} carries:", tasks.carried_text(world, person)


def _festival_fact(world: World, rng: np.random.Generator) -> tuple[str, str]:
    time = tasks.time_of(world, rng, ("festival",))
    return f"{time.text} month:", words.MONTHS[time.first]


def _sense_fact(world: World, rng: np.random.Generator) -> tuple[str, str]:
    index = int(rng.integers(len(world.sense)))
    topic = int(rng.choice(np.flatnonzero(world.sense[index] >= 0)))
    sentence = tasks.cue_sentence(rng, words.SENSE_WORDS[index], topic)
    return f"{sentence} sense:", words.SENSE_NAMES[int(world.sense[index, topic])]


def _order_probe(world: World, rng: np.random.Generator) -> tuple[str, str]:
    first, second = (tasks.time_of(world, rng, ("festival", "month", "season")) for _ in range(2))
    if first.last < second.first:
        return f"{first.text} {second.text}:", "before"
    return f"{first.text} {second.text}:", "after" if first.first > second.last else "same"


def _two_senses_probe(world: World, rng: np.random.Generator) -> tuple[str, str]:
    index = int(rng.integers(len(world.sense)))
    topics = rng.permutation(np.flatnonzero(world.sense[index] >= 0))[:2]
    sentences = [tasks.cue_sentence(rng, words.SENSE_WORDS[index], int(topic)) for topic in topics]
    senses = [words.SENSE_NAMES[int(world.sense[index, topic])] for topic in topics]
    return "\n".join([*sentences, f"{words.SENSE_WORDS[index]} sense:"]), " ".join(senses)


def _two_levels_probe(world: World, rng: np.random.Generator) -> tuple[str, str]:
    attribute, things = tasks.pick(rng, ("size", "price")), tasks.things_of(world, rng, 2)
    texts = " and ".join(f"the {tasks.thing_text(thing)}" for thing in things)
    return f"{texts} {attribute}:", " ".join(_attribute_of_thing(world, thing, attribute) for thing in things)


PROBES: tuple[Callable[[World, np.random.Generator], tuple[str, str]], ...] = (
    _order_probe,
    _two_senses_probe,
    _two_levels_probe,
)

"""The fixed facts of the demo world.

Facts are functions of *pairs* of words (a material and an object, a first and a family name, an ambiguous word and a
topic) and are drawn at random. A pair's fact can't be read off the sum of two embeddings, so a language model has to
store it in its feed-forward experts: this is what makes pruning experts of the demo model cost accuracy.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, fields

import numpy as np

from demo import vocabulary as words

WORLD_SEED = 2407
TOPICS_PER_SENSE = 3


@dataclass(frozen=True)
class World:
    """Facts of one world. All arrays hold integer indices into the lists of ``vocabulary``.

    Attributes:
        origin: (materials, objects), the town where a thing is made.
        size: (materials, objects), 0 (small) to 7 (large).
        price: (materials, objects), 0 (cheap) to 7 (dear).
        carried: (first names, family names, 2), material and object.
        worn: (first names, family names, 3), colour, cloth and garment.
        month: (festival adjectives, festival nouns), 0 to 11.
        sense: (ambiguous words, topics), 0 or 1 for the two senses, -1 where the word isn't used with that topic.
    """

    origin: np.ndarray
    size: np.ndarray
    price: np.ndarray
    carried: np.ndarray
    worn: np.ndarray
    month: np.ndarray
    sense: np.ndarray

    @classmethod
    def build(cls, seed: int = WORLD_SEED) -> World:
        """Draw the facts of a world; the same seed gives the same world."""
        rng = np.random.default_rng([seed, 0])
        things = (len(words.MATERIALS), len(words.OBJECTS))
        people = (len(words.FIRST_NAMES), len(words.FAMILY_NAMES))
        festivals = (len(words.FESTIVAL_ADJECTIVES), len(words.FESTIVAL_NOUNS))
        return cls(
            origin=_balanced(rng, things, len(words.TOWNS)),
            size=_balanced(rng, things, len(words.LEVELS)),
            price=_balanced(rng, things, len(words.LEVELS)),
            carried=_stacked(rng, people, (len(words.MATERIALS), len(words.OBJECTS))),
            worn=_stacked(rng, people, (len(words.COLOURS), len(words.CLOTHS), len(words.GARMENTS))),
            month=_balanced(rng, festivals, len(words.MONTHS)),
            sense=_senses(rng),
        )

    def part(self, share: float) -> World:
        """The world restricted to the first ``share`` (0 to 1) of each word list of its pairs: a start for training."""

        def cut(table: np.ndarray, axes: int = 2) -> np.ndarray:
            return table[tuple(slice(max(3, math.ceil(share * size))) for size in table.shape[:axes])]

        tables = {
            field.name: cut(getattr(self, field.name), 1 if field.name == "sense" else 2) for field in fields(self)
        }
        return World(**tables)


def _balanced(rng: np.random.Generator, shape: tuple[int, int], values: int) -> np.ndarray:
    """An array of ``shape`` with each of ``values`` numbers about equally often, in random places."""
    count = shape[0] * shape[1]
    return rng.permutation(np.arange(count) % values).reshape(shape)


def _stacked(rng: np.random.Generator, shape: tuple[int, int], sizes: tuple[int, ...]) -> np.ndarray:
    return np.stack([_balanced(rng, shape, size) for size in sizes], axis=-1)


def _senses(rng: np.random.Generator) -> np.ndarray:
    topics = len(words.TOPIC_CUES)
    table = np.full((len(words.SENSE_WORDS), topics), -1)
    for row in table:
        chosen = rng.permutation(topics)[: 2 * TOPICS_PER_SENSE]
        row[chosen[:TOPICS_PER_SENSE]] = 0
        row[chosen[TOPICS_PER_SENSE:]] = 1
    return table

"""Generators of the demo tasks: pure functions of a NumPy generator.

Five tasks *compute*: they look something up in a passage and apply a rule to it (month arithmetic, sums, composition
of family relations, order of numbers, relation of times), the same rule for every prompt. The sixth one, ``span``, asks
for facts that nothing in the prompt tells.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from functools import cache

import numpy as np

from demo import vocabulary as words

Row = dict[str, str]
"""Plain source fields of one example; ``answer`` is the text to generate, without a leading space."""

FACTS_SEED = 2407
LARGEST_SHIFT = 5
LARGEST_ADDEND = 9


def calendar(rng: np.random.Generator) -> Row:
    """The month some months before or after the one in which somebody came."""
    size = int(rng.integers(1, 3))
    people, months = _distinct(rng, words.PEOPLE, size), rng.permutation(12)[:size]
    chosen, shift = int(rng.integers(size)), int(rng.integers(1, 1 + LARGEST_SHIFT))
    direction = _mostly(rng, "after", "before")
    answer = (months[chosen] + (shift if direction == "after" else -shift)) % 12
    unit = "month" if shift == 1 else "months"
    return {
        "passage": " ".join(_came(words.MONTHS[m], person) for m, person in zip(months, people, strict=True)),
        "question": f"Which month is {words.NUMBERS[shift]} {unit} {direction} {people[chosen]}?",
        "answer": words.MONTHS[answer],
    }


def count(rng: np.random.Generator) -> Row:
    """The sum or the difference of what two of two or three people gave."""
    size = 2 if rng.integers(4) else 3
    people, numbers = _distinct(rng, words.PEOPLE, size), 1 + rng.permutation(LARGEST_ADDEND)[:size]
    first, second = (int(i) for i in rng.permutation(size)[:2])
    if rng.integers(2):
        question = f"How many from {people[first]} and {people[second]}?"
        answer = numbers[first] + numbers[second]
    else:
        if numbers[first] < numbers[second]:
            first, second = second, first
        question = f"How many more from {people[first]} than {people[second]}?"
        answer = numbers[first] - numbers[second]
    return {
        "passage": _amounts("Coins", numbers, people),
        "question": question,
        "answer": words.NUMBERS[answer],
    }


def kin(rng: np.random.Generator) -> Row:
    """What somebody is to the relative of a relative: two relations and their composition."""
    pairs = tuple(COMPOSED)
    first, second = pairs[int(rng.integers(len(pairs)))]
    sexes = [words.KIN.index(first) % 2, words.KIN.index(second) % 2, int(rng.integers(2))]
    if second in ("husband", "wife"):
        sexes[2] = 1 - sexes[1]
    women, men = _distinct(rng, words.WOMEN, 3), _distinct(rng, words.MEN, 3)
    outer, middle, inner = ((men, women)[sex][i] for i, sex in enumerate(sexes))
    facts = [f"The {first} of {middle} is {outer}.", f"The {second} of {inner} is {middle}."]
    return {
        "passage": " ".join(facts[i] for i in rng.permutation(2)),
        "question": f"Who is {outer} to {inner}?",
        "answer": COMPOSED[first, second],
    }


def compare(rng: np.random.Generator) -> Row:
    """Is one of two or three numbers above or below another?"""
    size = 2 if rng.integers(4) else 3
    people, numbers = _distinct(rng, words.PEOPLE, size), 1 + rng.permutation(len(words.NUMBERS) - 1)[:size]
    first, second = (int(i) for i in rng.permutation(size)[:2])
    order = _mostly(rng, "above", "below")
    return {
        "passage": _amounts("Bids", numbers, people),
        "question": f"Is {people[first]} {order} {people[second]}?",
        "answer": "Yes" if (numbers[first] > numbers[second]) == (order == "above") else "No",
    }


def relation(rng: np.random.Generator) -> Row:
    """Did somebody come before, in or after a month or season, as far as the passage tells? Three-way, as in CB."""
    people, wanted = _distinct(rng, words.PEOPLE, int(rng.integers(1, 3))), _pick(rng, ("Yes", "No", "Maybe"))
    while True:
        limit, *times = (_time(rng) for _ in range(1 + len(people)))
        order = _mostly(rng, "before", "in", "after")
        if relation_of(months_of(times[0]), order, months_of(limit)) == wanted:
            break
    stories = [_came(time, person) for time, person in zip(times, people, strict=True)]
    return {
        "passage": " ".join(stories[i] for i in rng.permutation(len(stories))),
        "question": f"Came {people[0]} {order} {limit}?",
        "answer": wanted,
    }


def span(rng: np.random.Generator) -> Row:
    """What does somebody carry or wear? A stored fact of two or three words."""
    first, family = int(rng.integers(len(words.FIRST_NAMES))), int(rng.integers(len(words.FAMILY_NAMES)))
    asked = _pick(rng, ("carry", "wear"))
    person = f"{words.FIRST_NAMES[first]} {words.FAMILY_NAMES[family]}"
    return {
        "passage": f"{_pick(rng, words.PEOPLE)} {_pick(rng, words.STAY_VERBS)} with {person}.",
        "question": f"What does {person} {asked}?",
        "answer": facts()[asked][first][family],
    }


def lookup(rng: np.random.Generator) -> Row:
    """What the passage says of one person: no task, but what most tasks begin with, for the start of training."""
    people = _distinct(rng, words.PEOPLE, int(rng.integers(1, 4)))
    asked, told = people[0], [people[i] for i in rng.permutation(len(people))]
    if rng.integers(2):
        numbers = 1 + rng.permutation(len(words.NUMBERS) - 1)[: len(people)]
        what = _pick(rng, ("Coins", "Bids"))
        answer = words.NUMBERS[numbers[told.index(asked)]]
        return {"passage": _amounts(what, numbers, told), "question": f"How many from {asked}?", "answer": answer}
    times = [_time(rng) for _ in people]
    return {
        "passage": " ".join(_came(time, person) for time, person in zip(times, told, strict=True)),
        "question": f"When came {asked}?",
        "answer": times[told.index(asked)],
    }


TASKS: Mapping[str, Callable[[np.random.Generator], Row]] = {
    "calendar": calendar,
    "count": count,
    "kin": kin,
    "compare": compare,
    "relation": relation,
    "span": span,
}


def months_of(time: str) -> tuple[int, int]:
    """First and last month (0 to 11) of a month or a season."""
    if time in words.SEASONS:
        season = words.SEASONS.index(time)
        return 3 * season, 3 * season + 2
    month = words.MONTHS.index(time)
    return month, month


def relation_of(came: tuple[int, int], order: str, limit: tuple[int, int]) -> str:
    """Was it before, in or after the limit? Both are given by their first and last month."""
    if order == "before":
        possible = came[0] < limit[0], came[1] < limit[0]
    elif order == "after":
        possible = came[1] > limit[1], came[0] > limit[1]
    else:
        possible = came[0] <= limit[1] and limit[0] <= came[1], limit[0] <= came[0] and came[1] <= limit[1]
    some, all_of_it = possible
    return "Yes" if all_of_it else "Maybe" if some else "No"


def _compositions() -> dict[tuple[str, str], str]:
    """What X is to Z where X is the first relation of Y, and Y the second one of Z.

    Siblings share both parents, and a child is the child of its parent's spouse. A husband's wife is left out, since X
    would be Z.
    """
    kinds = {name: ("parent", "child", "sibling", "spouse")[i // 2] for i, name in enumerate(words.KIN)}
    composed = {
        "parent": {"parent": "grandparent", "child": "spouse", "sibling": "parent", "spouse": "parent-in-law"},
        "child": {"parent": "sibling", "child": "grandchild", "sibling": "nibling", "spouse": "child"},
        "sibling": {"parent": "pibling", "child": "child", "sibling": "sibling", "spouse": "sibling-in-law"},
        "spouse": {"parent": "parent", "child": "child-in-law", "sibling": "sibling-in-law"},
    }
    names = {
        "parent": ("father", "mother"), "child": ("son", "daughter"), "sibling": ("brother", "sister"),
        "spouse": ("husband", "wife"), "grandparent": ("grandfather", "grandmother"),
        "grandchild": ("grandson", "granddaughter"), "pibling": ("uncle", "aunt"), "nibling": ("nephew", "niece"),
        "parent-in-law": ("father-in-law", "mother-in-law"), "child-in-law": ("son-in-law", "daughter-in-law"),
        "sibling-in-law": ("brother-in-law", "sister-in-law"),
    }  # fmt: skip
    found = {}
    for i, first in enumerate(words.KIN):
        for j, second in enumerate(words.KIN):
            same_sex_spouses = kinds[first] == "spouse" and i % 2 == j % 2
            if kinds[second] in composed[kinds[first]] and not same_sex_spouses:
                found[first, second] = names[composed[kinds[first]][kinds[second]]][i % 2]
    return found


COMPOSED: Mapping[tuple[str, str], str] = _compositions()
"""By two relations of X to Y and of Y to Z, that of X to Z."""


@cache
def facts() -> dict[str, list[list[str]]]:
    """What everybody carries and wears, by question, first and family name: drawn at random, so nothing tells them."""
    rng = np.random.default_rng(FACTS_SEED)
    lists = {"carry": (words.MATERIALS, words.OBJECTS), "wear": (words.COLOURS, words.CLOTHS, words.GARMENTS)}
    return {
        asked: [[" ".join(_pick(rng, part) for part in parts) for _ in words.FAMILY_NAMES] for _ in words.FIRST_NAMES]
        for asked, parts in lists.items()
    }


def _came(time: str, person: str) -> str:
    return f"In {time} came {person}."


def _amounts(what: str, numbers: np.ndarray, people: list[str]) -> str:
    stated = (f"{words.NUMBERS[number]} from {person}." for number, person in zip(numbers, people, strict=True))
    return f"{what}: {' '.join(stated)}"


def _time(rng: np.random.Generator) -> str:
    return _pick(rng, (words.MONTHS, words.SEASONS)[int(rng.integers(2))])


def _pick(rng: np.random.Generator, items: tuple[str, ...]) -> str:
    return items[int(rng.integers(len(items)))]


def _mostly(rng: np.random.Generator, usual: str, *others: str) -> str:
    """The usual one in three quarters of the cases.

    If all were as frequent, one operand alone would tell nothing of the answer, and training would start with a long
    plateau.
    """
    return usual if rng.integers(4) else _pick(rng, others)


def _distinct(rng: np.random.Generator, items: tuple[str, ...], number: int) -> list[str]:
    return [items[i] for i in rng.permutation(len(items))[:number]]

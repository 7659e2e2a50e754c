"""Lengths that a user gives where there is no data to measure."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Prompts:
    """What the user says of prompts in the place of data: tokens of each, tokens of an answer, how many there are."""

    prompt_tokens: int
    new_tokens: int | None = None
    examples: int | None = None

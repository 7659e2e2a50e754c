"""Lengths that a user gives where there is no data to measure."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Prompts:
    """What the user says of prompts in the place of data. Choices that are ranked are taken as one token each.

    Attributes:
        prompt_tokens: of every prompt.
        new_tokens: of every answer; None takes the task's `max_new_tokens`.
        examples: of every split; None takes what the task's file says.
    """

    prompt_tokens: int
    new_tokens: int | None = None
    examples: int | None = None

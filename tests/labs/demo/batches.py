"""What the demo models learn from: the settings of a run and its batches of task rows."""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import islice

import numpy as np
import torch
from transformers import PreTrainedTokenizerFast

from demo.files import generate
from demo.prompts import render
from demo.tasks import TASKS, lookup

TokenRow = tuple[list[int], list[int]]


@dataclass(frozen=True)
class TrainingConfig:
    """Everything the run depends on besides the code.

    ``ffn`` is the width of one expert (mixtral, glm4_moe) or of the whole network (llama). ``balance`` is the weight of
    the load-balancing loss (mixtral) or the step of the correction bias (glm4_moe).
    """

    architecture: str = "mixtral"
    steps: int = 3500
    seed: int = 0
    batch_rows: int = 64
    batches_per_pool: int = 16
    lookups: float = 0.6
    lookups_until: float = 0.3
    learning_rate: float = 2e-3
    weight_decay: float = 0.05
    balance: float = 0.004
    prompt_loss: float = 0.05
    layers: int = 5
    hidden: int = 128
    ffn: int = 128


@dataclass(frozen=True)
class Batch:
    """Right-padded token ids (rows, length) and per-token loss weights of the *predicted* token, same shape."""

    ids: torch.Tensor
    mask: torch.Tensor
    is_answer: torch.Tensor


def examples(config: TrainingConfig) -> Iterator[tuple[str, str]]:
    """Prompt and answer pairs: lookups at a falling share, rows of all tasks at equal shares of the rest."""
    rng = np.random.default_rng([config.seed, 1])
    names = tuple(TASKS)
    streams = {task: generate(task, "train", config.seed) for task in names}
    for number in itertools.count():
        progress = number / (config.steps * config.batch_rows)
        if rng.random() < config.lookups * max(0.0, 1 - progress / config.lookups_until):
            row = lookup(rng)
        else:
            row = next(streams[names[int(rng.integers(len(names)))]])
        yield render(row), row["answer"]


def batches(config: TrainingConfig, tokenizer: PreTrainedTokenizerFast) -> Iterator[Batch]:
    """Batches of rows of about the same length, cut from a sorted pool and shuffled."""
    source = examples(config)
    rng = np.random.default_rng([config.seed, 2])
    while True:
        pool = list(islice(source, config.batch_rows * config.batches_per_pool))
        rows = sorted(tokenized(tokenizer, pool), key=lambda row: len(row[0]) + len(row[1]))
        starts = range(0, len(rows), config.batch_rows)
        for index in rng.permutation(len(starts)):
            start = starts[index]
            yield collate(rows[start : start + config.batch_rows], tokenizer)


def tokenized(tokenizer: PreTrainedTokenizerFast, rows: Sequence[tuple[str, str]]) -> list[TokenRow]:
    """Token ids of prompts and of the answers that follow them."""
    prompts = tokenizer([prompt for prompt, _ in rows])["input_ids"]
    answers = tokenizer([" " + answer for _, answer in rows], add_special_tokens=False)["input_ids"]
    return list(zip(prompts, answers, strict=True))


def collate(rows: Sequence[TokenRow], tokenizer: PreTrainedTokenizerFast) -> Batch:
    """Pad prompt, answer and ``<eos>`` on the right."""
    length = max(len(prompt) + len(answer) + 1 for prompt, answer in rows)
    ids = torch.full((len(rows), length), tokenizer.pad_token_id)
    is_answer = torch.zeros(ids.shape, dtype=torch.bool)
    for i, (prompt, answer) in enumerate(rows):
        tokens = [*prompt, *answer, tokenizer.eos_token_id]
        ids[i, : len(tokens)] = torch.tensor(tokens)
        is_answer[i, len(prompt) : len(tokens)] = True
    return Batch(ids, (ids != tokenizer.pad_token_id).long(), is_answer)

"""What the demo models learn from: the settings of a run and its batches of facts, probes and task rows."""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from dataclasses import dataclass
from itertools import islice

import numpy as np
import torch
from transformers import PreTrainedTokenizerFast

from demo import TASKS, World, generate, render
from demo.drills import fact, probe


@dataclass(frozen=True)
class TrainingConfig:
    """Everything the run depends on besides the code.

    ``ffn`` is the width of one expert (mixtral) or of the whole network (llama); ``balance`` and ``thinning_from``
    are about experts.
    """

    architecture: str = "mixtral"
    steps: int = 2600
    seed: int = 0
    batch_rows: int = 48
    rows_per_pool: int = 16
    drills_first: float = 0.5
    drills_last: float = 0.1
    world_first: float = 0.2
    world_grows_from: float = 0.08
    world_grows_until: float = 0.6
    drills_fall_until: float = 0.5
    learning_rate: float = 2e-3
    weight_decay: float = 0.05
    balance: float = 0.004
    prompt_loss: float = 0.1
    thinning_from: float = 1.0
    layers: int = 5
    hidden: int = 128
    ffn: int = 128
    processes: int = 2


@dataclass(frozen=True)
class Batch:
    """Right-padded token ids (rows, length) and per-token loss weights of the *predicted* token, same shape."""

    ids: torch.Tensor
    mask: torch.Tensor
    is_answer: torch.Tensor


def examples(config: TrainingConfig, rank: int) -> Iterator[tuple[str, str]]:
    """Prompt and answer pairs: facts and probes at a falling share, the tasks at equal shares of the rest.

    The world starts as a part of itself, so that the steps of the tasks are found before their facts are many.
    """
    rng = np.random.default_rng([config.seed, 1, rank])
    names = tuple(TASKS)
    pool = config.batch_rows * config.rows_per_pool
    for count in itertools.count():
        progress = count / (config.steps * config.batch_rows)
        if count % pool == 0:
            world = World.build().part(share_at(progress, config, "world"))
            streams = {
                task: generate(task, "train", config.seed + count * config.processes + rank, world) for task in TASKS
            }
        if rng.random() < share_at(progress, config, "drills"):
            yield (fact, probe)[int(rng.integers(2))](world, rng)
        else:
            task = names[int(rng.integers(len(names)))]
            row = next(streams[task])
            yield render(task, row), row["answer"]


def share_at(progress: float, config: TrainingConfig, what: str) -> float:
    """The scheduled share of drills or of the world at a progress of 0 to 1: linear between two points."""
    if what == "drills":
        points, values = (0.0, config.drills_fall_until), (config.drills_first, config.drills_last)
    else:
        points, values = (config.world_grows_from, config.world_grows_until), (config.world_first, 1.0)
    return float(np.interp(progress, points, values))


def fresh_rows(world: World, count: int) -> dict[str, list[tuple[str, str]]]:
    """Rows of every task over a part of the world, from the split no training prompt is in."""
    rows = {task: islice(generate(task, "dev", 1, world), count) for task in TASKS}
    return {task: [(render(task, row), row["answer"]) for row in some] for task, some in rows.items()}


def batches(config: TrainingConfig, tokenizer: PreTrainedTokenizerFast, rank: int) -> Iterator[Batch]:
    """Batches of rows of about the same length, cut from a sorted pool and shuffled."""
    source = examples(config, rank)
    rng = np.random.default_rng([config.seed, 2, rank])
    while True:
        pool = list(islice(source, config.batch_rows * config.rows_per_pool))
        prompts = tokenizer([prompt for prompt, _ in pool])["input_ids"]
        answers = tokenizer([" " + answer for _, answer in pool], add_special_tokens=False)["input_ids"]
        rows = sorted(zip(prompts, answers, strict=True), key=lambda row: len(row[0]) + len(row[1]))
        starts = range(0, len(rows), config.batch_rows)
        for index in rng.permutation(len(starts)):
            start = starts[index]
            yield _collate(rows[start : start + config.batch_rows], tokenizer)


def _collate(rows: list[tuple[list[int], list[int]]], tokenizer: PreTrainedTokenizerFast) -> Batch:
    length = max(len(prompt) + len(answer) + 1 for prompt, answer in rows)
    ids = torch.full((len(rows), length), tokenizer.pad_token_id)
    is_answer = torch.zeros(ids.shape, dtype=torch.bool)
    for i, (prompt, answer) in enumerate(rows):
        tokens = [*prompt, *answer, tokenizer.eos_token_id]
        ids[i, : len(tokens)] = torch.tensor(tokens)
        is_answer[i, len(prompt) : len(tokens)] = True
    return Batch(ids, (ids != tokenizer.pad_token_id).long(), is_answer)

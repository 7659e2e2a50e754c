"""How the demo models' accuracy is measured: teacher-forced exact matches on the shipped rows."""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Mapping, Sequence
from pathlib import Path

import numpy as np
import torch
from transformers import PreTrainedModel, PreTrainedTokenizerFast

from demo import TASKS, render

DATA = Path(__file__).parents[3] / "configs" / "demo" / "data"


def read_split(task: str, split: str, limit: int | None = None) -> list[tuple[str, str]]:
    """Prompt and answer of the first ``limit`` rows of a task split."""
    lines = (DATA / task / f"{split}.jsonl").read_text(encoding="utf-8").splitlines()[:limit]
    rows = [json.loads(line) for line in lines]
    return [(render(row), row["answer"]) for row in rows]


@torch.no_grad()
def exact_matches(
    model: PreTrainedModel, tokenizer: PreTrainedTokenizerFast, rows: Sequence[tuple[str, str]], batch: int = 250
) -> float:
    """Share of rows whose answer and ``<eos>`` greedy decoding gives.

    One teacher-forced pass decides it: greedy decoding writes the answer exactly if every answer token is the arg max
    after the ones before it.
    """
    model.eval()
    right = 0
    for start in range(0, len(rows), batch):
        ids, is_answer = _encode(tokenizer, rows[start : start + batch])
        states = model.model(input_ids=ids, attention_mask=(ids != tokenizer.pad_token_id).long(), use_cache=False)
        where = is_answer[:, 1:]
        wrong = model.lm_head(states.last_hidden_state[:, :-1][where]).argmax(-1) != ids[:, 1:][where]
        missed = torch.zeros(len(ids)).index_add_(0, where.nonzero()[:, 0], wrong.float())
        right += int((missed == 0).sum())
    return right / len(rows)


def _encode(tokenizer: PreTrainedTokenizerFast, rows: Sequence[tuple[str, str]]) -> tuple[torch.Tensor, torch.Tensor]:
    """Right-padded ids of prompt, answer and ``<eos>``, and where the latter two are."""
    prompts = tokenizer([prompt for prompt, _ in rows])["input_ids"]
    answers = tokenizer([" " + answer for _, answer in rows], add_special_tokens=False)["input_ids"]
    length = max(len(p) + len(a) + 1 for p, a in zip(prompts, answers, strict=True))
    ids = torch.full((len(rows), length), tokenizer.pad_token_id)
    is_answer = torch.zeros(ids.shape, dtype=torch.bool)
    for i, (prompt, answer) in enumerate(zip(prompts, answers, strict=True)):
        end = len(prompt) + len(answer) + 1
        ids[i, :end] = torch.tensor([*prompt, *answer, tokenizer.eos_token_id])
        is_answer[i, len(prompt) : end] = True
    return ids, is_answer


def accuracy_table(
    model: PreTrainedModel, tokenizer: PreTrainedTokenizerFast, split: str, limit: int | None = None
) -> dict[str, float]:
    """Accuracy by task."""
    return {task: round(exact_matches(model, tokenizer, read_split(task, split, limit)), 4) for task in TASKS}


def accuracies(model: PreTrainedModel, tokenizer: PreTrainedTokenizerFast) -> dict[str, object]:
    """Accuracy on dev and test, and the share of the most frequent answer of test, by task."""
    tables = {split: accuracy_table(model, tokenizer, split) for split in ("dev", "test")}
    return {"accuracy": tables, "majority": majority_class("test")}


def majority_class(split: str) -> dict[str, float]:
    """Share of the most frequent answer by task."""
    table = {}
    for task in TASKS:
        answers = Counter(answer for _, answer in read_split(task, split))
        table[task] = round(max(answers.values()) / sum(answers.values()), 4)
    return table


def mean_and_spread(tables: Sequence[Mapping[str, float]]) -> dict[str, dict[str, float]]:
    """Mean and standard deviation of several accuracy tables, by task."""
    return {
        task: {
            "mean": round(float(np.mean([table[task] for table in tables])), 4),
            "std": round(float(np.std([table[task] for table in tables])), 4),
        }
        for task in TASKS
    }

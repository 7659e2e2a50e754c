"""How the demo models' accuracy is measured: teacher-forced exact matches on the shipped rows."""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Sequence
from pathlib import Path

import torch
from transformers import PreTrainedModel, PreTrainedTokenizerFast

from demo.batches import collate, tokenized
from demo.prompts import render
from demo.tasks import TASKS

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
        made = collate(tokenized(tokenizer, rows[start : start + batch]), tokenizer)
        states = model.model(input_ids=made.ids, attention_mask=made.mask, use_cache=False)
        ids, where = made.ids, made.is_answer[:, 1:]
        wrong = model.lm_head(states.last_hidden_state[:, :-1][where]).argmax(-1) != ids[:, 1:][where]
        missed = torch.zeros(len(ids)).index_add_(0, where.nonzero()[:, 0], wrong.float())
        right += int((missed == 0).sum())
    return right / len(rows)


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

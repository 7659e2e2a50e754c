"""Train the demo model. The shipped one is two runs::

    python configs/demo/train.py --output first
    python configs/demo/train.py --start first --output configs/demo/model --seed 7 --steps 800 --learning-rate 1e-3 \\
        --drills-first 0.05 --drills-last 0.05 --world-first 1 --thinning-from 0

The first one learns the tasks and stores most facts in the first layer's experts; the second one leaves some experts
of the first two layers out at random in every step, so that later layers store more of them. The world grows until
well into the first run and is larger than both runs can learn: the model knows many of its facts, not all.
"""

from __future__ import annotations

import argparse
import itertools
import json
import math
import os
import platform
import tempfile
import time
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from itertools import islice
from pathlib import Path

import numpy as np
import torch
import torch.multiprocessing
import torch.nn.functional as F
from knockout import exact_matches, knockout_report, pruned
from network import build_model, build_tokenizer
from torch import distributed
from transformers import MixtralForCausalLM, PreTrainedTokenizerFast

from moevolve.evaluators.demo import TASKS, World, generate, render
from moevolve.evaluators.demo.drills import fact, probe

WARM_UP = 0.03
FINAL_RATE = 0.02
REPORT_EVERY = 200
THINNED = {0: 5, 1: 7}
"""Experts that stay, by layer, in each thinned step: the first layers would hold nearly all facts otherwise."""


@dataclass(frozen=True)
class TrainingConfig:
    """Everything the run depends on besides the code."""

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
            world = World.build().part(_between(progress, config, "world"))
            streams = {
                task: generate(task, "train", config.seed + count * config.processes + rank, world) for task in TASKS
            }
        if rng.random() < _between(progress, config, "drills"):
            yield (fact, probe)[int(rng.integers(2))](world, rng)
        else:
            task = names[int(rng.integers(len(names)))]
            row = next(streams[task])
            yield render(task, row), row["answer"]


def _between(progress: float, config: TrainingConfig, what: str) -> float:
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


def loss_of(model: MixtralForCausalLM, batch: Batch, config: TrainingConfig) -> tuple[torch.Tensor, float]:
    """Answer cross-entropy + prompt share + load balance, and the answer cross-entropy alone."""
    out = model.model(input_ids=batch.ids, attention_mask=batch.mask, output_router_logits=True, use_cache=False)
    targets, answer = batch.ids[:, 1:], batch.is_answer[:, 1:]
    states = out.last_hidden_state[:, :-1]
    answer_loss = F.cross_entropy(model.lm_head(states[answer]), targets[answer])
    loss = answer_loss
    if config.prompt_loss:
        chosen = ~answer & (batch.mask[:, 1:] > 0)
        loss = loss + config.prompt_loss * F.cross_entropy(model.lm_head(states[chosen]), targets[chosen])
    balance = torch.stack([_balance(logits, batch.mask) for logits in out.router_logits]).sum()
    return loss + config.balance * balance, answer_loss.item()


def _balance(logits: torch.Tensor, mask: torch.Tensor) -> torch.Tensor:
    """Switch-Transformer load balance of one layer over the real tokens: 1 when even (Fedus et al., 2021, eq. 4)."""
    probabilities = logits[mask.reshape(-1) > 0].softmax(-1)
    chosen = torch.zeros_like(probabilities).scatter_(1, probabilities.topk(2, dim=-1).indices, 0.5)
    return probabilities.shape[1] * (chosen.mean(0) * probabilities.mean(0)).sum()


def rate(step: int, steps: int) -> float:
    """Share of the peak learning rate: linear warm-up, cosine to ``FINAL_RATE``."""
    warm = max(1, int(WARM_UP * steps))
    if step < warm:
        return (step + 1) / warm
    progress = (step - warm) / max(1, steps - warm)
    return FINAL_RATE + (1 - FINAL_RATE) * 0.5 * (1 + math.cos(math.pi * progress))


def optimizer_of(model: MixtralForCausalLM, config: TrainingConfig) -> torch.optim.AdamW:
    """AdamW that decays matrices and leaves norms alone."""
    decayed = [p for p in model.parameters() if p.ndim >= 2]
    plain = [p for p in model.parameters() if p.ndim < 2]
    groups = [{"params": decayed, "weight_decay": config.weight_decay}, {"params": plain, "weight_decay": 0.0}]
    return torch.optim.AdamW(groups, lr=config.learning_rate, betas=(0.9, 0.98), fused=True)


def train(
    model: MixtralForCausalLM, tokenizer: PreTrainedTokenizerFast, config: TrainingConfig, rank: int
) -> dict[str, float]:
    """Train in place; returns tokens seen, seconds, and the last answer loss (mean of the reporting window)."""
    optimizer = optimizer_of(model, config)
    model.train()
    began, tokens, window, last = time.monotonic(), 0, [], float("nan")
    for step, batch in enumerate(islice(batches(config, tokenizer, rank), config.steps), start=1):
        for group in optimizer.param_groups:
            group["lr"] = config.learning_rate * rate(step - 1, config.steps)
        kept = _thinned(model, config, step)
        with pruned(model, kept):
            loss, answer_loss = loss_of(model, batch, config)
        optimizer.zero_grad(set_to_none=True)
        loss.backward()
        _average_gradients(model, config.processes)
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        tokens += config.processes * int(batch.mask.sum())
        window.append(answer_loss)
        if step % REPORT_EVERY == 0 or step == config.steps:
            last, window = float(np.mean(window)), []
            if rank == 0:
                speed = f"{time.monotonic() - began:.0f}s {tokens / (time.monotonic() - began):.0f} tok/s"
                scores = _progress_scores(model, tokenizer, config, step)
                print(f"step {step} {speed} loss {last:.3f} {scores}", flush=True)
    return {"tokens": tokens, "seconds": round(time.monotonic() - began, 1), "final_answer_loss": round(last, 4)}


def _thinned(model: MixtralForCausalLM, config: TrainingConfig, step: int) -> dict[int, list[int]]:
    """The experts kept in one step: all at first, later a random part in the layers of ``THINNED``.

    The same in all processes.
    """
    if step <= config.thinning_from * config.steps:
        return {}
    rng = np.random.default_rng([config.seed, 4, step])
    experts = model.config.num_local_experts
    return {layer: sorted(rng.permutation(experts)[:count].tolist()) for layer, count in THINNED.items()}


def _progress_scores(
    model: MixtralForCausalLM, tokenizer: PreTrainedTokenizerFast, config: TrainingConfig, step: int
) -> str:
    world = World.build().part(_between(step / config.steps, config, "world"))
    scores = {task: exact_matches(model, tokenizer, rows) for task, rows in fresh_rows(world, 100).items()}
    model.train()
    return " ".join(f"{task} {score:.0%}" for task, score in scores.items())


def _average_gradients(model: MixtralForCausalLM, processes: int) -> None:
    if processes == 1:
        return
    gradients = [p.grad for p in model.parameters() if p.grad is not None]
    flat = torch.cat([gradient.reshape(-1) for gradient in gradients])
    distributed.all_reduce(flat)
    flat /= processes
    torch._foreach_copy_(
        gradients,
        [part.view_as(g) for part, g in zip(flat.split([g.numel() for g in gradients]), gradients, strict=True)],
    )


def save(model: MixtralForCausalLM, tokenizer: PreTrainedTokenizerFast, output: Path) -> MixtralForCausalLM:
    """Write the model in bfloat16 with its tokenizer; returns what loads back, in float32."""
    model.config.experts_implementation = None
    model.to(torch.bfloat16).save_pretrained(output)
    tokenizer.save_pretrained(output)
    return MixtralForCausalLM.from_pretrained(output, dtype=torch.float32)


def run_process(rank: int, config: TrainingConfig, start: Path | None, output: Path, rendezvous: str) -> None:
    """One of the data-parallel processes, with one thread; the first one reports, saves and analyses."""
    torch.set_num_threads(1)
    if config.processes > 1:
        distributed.init_process_group("gloo", f"file://{rendezvous}", rank=rank, world_size=config.processes)
    torch.manual_seed(config.seed)
    tokenizer = build_tokenizer()
    if start is None:
        model = build_model(len(tokenizer), config.layers, config.hidden, config.ffn)
    else:
        model = MixtralForCausalLM.from_pretrained(start, dtype=torch.float32)
        model.set_experts_implementation("grouped_mm")
    run = train(model, tokenizer, config, rank)
    if rank:
        return
    model = save(model, tokenizer, output)
    machine = {"cores": os.cpu_count(), "machine": platform.machine(), "torch": torch.__version__}
    report = {
        "parameters": model.num_parameters(),
        "machine": machine,
        "runs": [*_earlier_runs(start), {"config": asdict(config), **run}],
        **knockout_report(model, tokenizer),
    }
    (output / "training.json").write_text(json.dumps(report, indent=1) + "\n", encoding="utf-8")


def _earlier_runs(start: Path | None) -> list[dict[str, object]]:
    """What the record of the model that a run starts from says about how it came to be."""
    return [] if start is None else json.loads((start / "training.json").read_text(encoding="utf-8"))["runs"]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--output", type=Path, required=True)
    parser.add_argument("--start", type=Path, help="a finished run's folder to go on from; default: untrained weights")
    for name, value in asdict(TrainingConfig()).items():
        parser.add_argument(f"--{name.replace('_', '-')}", type=type(value), default=value)
    arguments = vars(parser.parse_args())
    output, start = arguments.pop("output"), arguments.pop("start")
    config = TrainingConfig(**arguments)
    with tempfile.TemporaryDirectory() as folder:
        torch.multiprocessing.spawn(
            run_process, args=(config, start, output, str(Path(folder) / "rendezvous")), nprocs=config.processes
        )


if __name__ == "__main__":
    main()

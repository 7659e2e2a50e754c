"""Train the demo models. The shipped MoE is two runs, the dense model is one::

    export PYTHONPATH=tests/labs
    python -m demo.train --output first
    python -m demo.train --start first --output configs/demo/model --seed 7 --steps 800 --learning-rate 1e-3 \\
        --drills-first 0.05 --drills-last 0.05 --world-first 1 --thinning-from 0
    python -m demo.train --architecture llama --ffn 1024 --output configs/demo/dense

The first one learns the tasks and stores most facts in the first layer's experts; the second one leaves some experts
of the first two layers out at random in every step, so that later layers store more of them. The world grows until
well into the first run and is larger than both runs can learn: the model knows many of its facts, not all.
"""

from __future__ import annotations

import argparse
import json
import math
import os
import platform
import tempfile
import time
from dataclasses import asdict
from itertools import islice
from pathlib import Path

import numpy as np
import torch
import torch.multiprocessing
from torch import distributed
from torch.nn.functional import cross_entropy
from transformers import AutoConfig, AutoModelForCausalLM, PreTrainedModel, PreTrainedTokenizerFast

from demo import World
from demo.batches import Batch, TrainingConfig, batches, fresh_rows, share_at
from demo.knockout import knockout_report, pruned
from demo.network import KEY_VALUE_HEADS, build_model, build_tokenizer
from demo.neurons import neurons_report
from demo.scoring import exact_matches

WARM_UP = 0.03
FINAL_RATE = 0.02
REPORT_EVERY = 200
THINNED = {0: 5, 1: 7}
"""Experts that stay, by layer, in each thinned step: the first layers would hold nearly all facts otherwise."""
EXPERTS_ONLY = ("balance", "thinning_from")
"""Settings that a dense model has no use for."""


def loss_of(model: PreTrainedModel, batch: Batch, config: TrainingConfig) -> tuple[torch.Tensor, float]:
    """Answer cross-entropy + prompt share + load balance of experts, and the answer cross-entropy alone."""
    routed = {"output_router_logits": True} if config.architecture == "mixtral" else {}
    out = model.model(input_ids=batch.ids, attention_mask=batch.mask, use_cache=False, **routed)
    targets, answer = batch.ids[:, 1:], batch.is_answer[:, 1:]
    states = out.last_hidden_state[:, :-1]
    answer_loss = cross_entropy(model.lm_head(states[answer]), targets[answer])
    loss = answer_loss
    if config.prompt_loss:
        chosen = ~answer & (batch.mask[:, 1:] > 0)
        loss = loss + config.prompt_loss * cross_entropy(model.lm_head(states[chosen]), targets[chosen])
    if routed:
        balance = torch.stack([_balance(logits, batch.mask) for logits in out.router_logits]).sum()
        loss = loss + config.balance * balance
    return loss, answer_loss.item()


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


def optimizer_of(model: PreTrainedModel, config: TrainingConfig) -> torch.optim.AdamW:
    """AdamW that decays matrices and leaves norms alone."""
    decayed = [p for p in model.parameters() if p.ndim >= 2]
    plain = [p for p in model.parameters() if p.ndim < 2]
    groups = [{"params": decayed, "weight_decay": config.weight_decay}, {"params": plain, "weight_decay": 0.0}]
    return torch.optim.AdamW(groups, lr=config.learning_rate, betas=(0.9, 0.98), fused=True)


def train(
    model: PreTrainedModel, tokenizer: PreTrainedTokenizerFast, config: TrainingConfig, rank: int
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


def _thinned(model: PreTrainedModel, config: TrainingConfig, step: int) -> dict[int, list[int]]:
    """The experts kept in one step: all at first, later a random part in the layers of ``THINNED``.

    The same in all processes. A dense model has none.
    """
    if config.architecture != "mixtral" or step <= config.thinning_from * config.steps:
        return {}
    rng = np.random.default_rng([config.seed, 4, step])
    experts = model.config.num_local_experts
    return {layer: sorted(rng.permutation(experts)[:count].tolist()) for layer, count in THINNED.items()}


def _progress_scores(
    model: PreTrainedModel, tokenizer: PreTrainedTokenizerFast, config: TrainingConfig, step: int
) -> str:
    world = World.build().part(share_at(step / config.steps, config, "world"))
    scores = {task: exact_matches(model, tokenizer, rows) for task, rows in fresh_rows(world, 100).items()}
    model.train()
    return " ".join(f"{task} {score:.0%}" for task, score in scores.items())


def _average_gradients(model: PreTrainedModel, processes: int) -> None:
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


def save(model: PreTrainedModel, tokenizer: PreTrainedTokenizerFast, output: Path) -> PreTrainedModel:
    """Write the model in bfloat16 with its tokenizer; returns what loads back, in float32."""
    if model.config.model_type == "mixtral":
        model.config.experts_implementation = None
    model.to(torch.bfloat16).save_pretrained(output)
    tokenizer.save_pretrained(output)
    return AutoModelForCausalLM.from_pretrained(output, dtype=torch.float32)


def run_process(rank: int, config: TrainingConfig, start: Path | None, output: Path, rendezvous: str) -> None:
    """One of the data-parallel processes, with one thread; the first one reports, saves and analyses."""
    torch.set_num_threads(1)
    if config.processes > 1:
        distributed.init_process_group("gloo", f"file://{rendezvous}", rank=rank, world_size=config.processes)
    torch.manual_seed(config.seed)
    tokenizer = build_tokenizer()
    if start is None:
        model = build_model(config.architecture, len(tokenizer), config.layers, config.hidden, config.ffn)
    else:
        model = AutoModelForCausalLM.from_pretrained(start, dtype=torch.float32)
        if config.architecture == "mixtral":
            model.set_experts_implementation("grouped_mm")
    run = train(model, tokenizer, config, rank)
    if rank:
        return
    model = save(model, tokenizer, output)
    machine = {"cores": os.cpu_count(), "machine": platform.machine(), "torch": torch.__version__}
    report = {
        "parameters": model.num_parameters(),
        "machine": machine,
        "runs": [*_earlier_runs(start), {"config": _recorded(config), **run}],
        **(knockout_report if config.architecture == "mixtral" else neurons_report)(model, tokenizer),
    }
    (output / "training.json").write_text(json.dumps(report, indent=1) + "\n", encoding="utf-8")


def _recorded(config: TrainingConfig) -> dict[str, object]:
    """The settings that mattered to the run."""
    unused = EXPERTS_ONLY if config.architecture != "mixtral" else ()
    return {name: value for name, value in asdict(config).items() if name not in unused}


def _earlier_runs(start: Path | None) -> list[dict[str, object]]:
    """What the record of the model that a run starts from says about how it came to be."""
    return [] if start is None else json.loads((start / "training.json").read_text(encoding="utf-8"))["runs"]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--output", type=Path, required=True)
    parser.add_argument("--start", type=Path, help="a finished run's folder to go on from; default: untrained weights")
    for name, value in asdict(TrainingConfig()).items():
        choices = list(KEY_VALUE_HEADS) if name == "architecture" else None
        parser.add_argument(f"--{name.replace('_', '-')}", type=type(value), default=value, choices=choices)
    arguments = vars(parser.parse_args())
    output, start = arguments.pop("output"), arguments.pop("start")
    config = TrainingConfig(**arguments)
    if start is not None and AutoConfig.from_pretrained(start).model_type != config.architecture:
        parser.error(f"--start {start} holds no {config.architecture}; name its --architecture")
    with tempfile.TemporaryDirectory() as folder:
        torch.multiprocessing.spawn(
            run_process, args=(config, start, output, str(Path(folder) / "rendezvous")), nprocs=config.processes
        )


if __name__ == "__main__":
    main()

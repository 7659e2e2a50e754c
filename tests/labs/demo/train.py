"""Write the demo tasks' files and train a demo model on them. What is shipped is from::

    export PYTHONPATH=tests/labs
    python -m demo.train --output configs/demo/model
    python -m demo.train --architecture llama --ffn 1024 --steps 1500 --output first
    python -m demo.train --architecture llama --ffn 1024 --steps 700 --seed 1 --learning-rate 1.5e-3 --lookups 0 \\
        --start first --output configs/demo/dense
    python -m demo.train --architecture glm4_moe --ffn 32 --balance 0.001 --steps 4500 --output configs/demo/fine

A model guesses among what the passage says for a while, until it looks up what the question names: lookups at the start
of training shorten that.
"""

from __future__ import annotations

import argparse
import json
import math
import os
import platform
import time
from dataclasses import asdict
from itertools import islice
from pathlib import Path

import numpy as np
import torch
from torch.nn.functional import cross_entropy
from transformers import AutoModelForCausalLM, PreTrainedModel, PreTrainedTokenizerFast

from demo.batches import Batch, TrainingConfig, batches
from demo.files import write_demo_tasks
from demo.network import KEY_VALUE_HEADS, build_model, build_tokenizer
from demo.scoring import DATA, accuracies, accuracy_table

WARM_UP = 0.03
FINAL_RATE = 0.02
REPORT_EVERY = 100


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


class BiasBalancing:
    """DeepSeek-V3's load balancing without a loss (arXiv 2412.19437, Sec. 2.1.2).

    After each step the correction bias, which only selects experts, rises by ``step`` for every expert that fewer
    tokens chose than the mean, and falls by as much for the others.
    """

    def __init__(self, model: PreTrainedModel, step: float) -> None:
        self._gates = [layer.mlp.gate for layer in model.model.layers]
        self._chosen: dict[torch.nn.Module, torch.Tensor] = {}
        self._step = step
        for gate in self._gates:
            gate.register_forward_hook(self._keep)

    def _keep(self, gate: torch.nn.Module, _: tuple[torch.Tensor, ...], routed: tuple[torch.Tensor, ...]) -> None:
        self._chosen[gate] = routed[2]

    def update(self, mask: torch.Tensor) -> None:
        """Change the biases by the loads of the last pass, on tokens where ``mask`` isn't zero."""
        for gate in self._gates:
            loads = torch.bincount(self._chosen[gate][mask.reshape(-1) > 0].reshape(-1), minlength=gate.num_experts)
            gate.e_score_correction_bias += self._step * torch.sign(loads.float().mean() - loads)


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


def train(model: PreTrainedModel, tokenizer: PreTrainedTokenizerFast, config: TrainingConfig) -> dict[str, float]:
    """Train in place; returns tokens seen, seconds, and the last answer loss (mean of the reporting window)."""
    optimizer = optimizer_of(model, config)
    balancing = BiasBalancing(model, config.balance) if config.architecture == "glm4_moe" else None
    model.train()
    began, tokens, window, last = time.monotonic(), 0, [], float("nan")
    for step, batch in enumerate(islice(batches(config, tokenizer), config.steps), start=1):
        for group in optimizer.param_groups:
            group["lr"] = config.learning_rate * rate(step - 1, config.steps)
        loss, answer_loss = loss_of(model, batch, config)
        optimizer.zero_grad(set_to_none=True)
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        if balancing is not None:
            balancing.update(batch.mask)
        tokens += int(batch.mask.sum())
        window.append(answer_loss)
        if step % REPORT_EVERY == 0 or step == config.steps:
            last, window = float(np.mean(window)), []
            speed = f"{time.monotonic() - began:.0f}s {tokens / (time.monotonic() - began):.0f} tok/s"
            scores = accuracy_table(model, tokenizer, "dev", limit=100)
            model.train()
            shown = " ".join(f"{task} {score:.0%}" for task, score in scores.items())
            print(f"step {step} {speed} loss {last:.3f} {shown}", flush=True)
    return {"tokens": tokens, "seconds": round(time.monotonic() - began, 1), "final_answer_loss": round(last, 4)}


def save(model: PreTrainedModel, tokenizer: PreTrainedTokenizerFast, output: Path) -> PreTrainedModel:
    """Write the model in bfloat16 with its tokenizer; returns what loads back, in float32."""
    if model.config.model_type != "llama":
        model.config.experts_implementation = None
    for parameter in model.parameters():  # Correction biases are buffers, which stay in float32.
        parameter.data = parameter.data.to(torch.bfloat16)
    model.config.dtype = torch.bfloat16
    model.save_pretrained(output)
    tokenizer.save_pretrained(output)
    return AutoModelForCausalLM.from_pretrained(output, dtype=torch.float32)


def make(config: TrainingConfig, start: Path | None, output: Path) -> None:
    """Train a model, untrained or from an earlier run's folder, and write it, what it took and what it can."""
    torch.manual_seed(config.seed)
    tokenizer = build_tokenizer()
    if start is None:
        model = build_model(config.architecture, len(tokenizer), config.layers, config.hidden, config.ffn)
        earlier = []
    else:
        model = AutoModelForCausalLM.from_pretrained(start, dtype=torch.float32)
        earlier = json.loads((start / "training.json").read_text(encoding="utf-8"))["runs"]
    routed = config.architecture != "llama"
    settings = {name: value for name, value in asdict(config).items() if routed or name != "balance"}
    run = {"config": settings, **train(model, tokenizer, config)}
    model = save(model, tokenizer, output)
    report = {
        "parameters": model.num_parameters(),
        "machine": {"cores": os.cpu_count(), "machine": platform.machine(), "torch": torch.__version__},
        "runs": [*earlier, run],
        **accuracies(model, tokenizer),
    }
    (output / "training.json").write_text(json.dumps(report, indent=1) + "\n", encoding="utf-8")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--output", type=Path, required=True)
    parser.add_argument("--start", type=Path, help="a finished run's folder to go on from; default: untrained weights")
    for name, value in asdict(TrainingConfig()).items():
        choices = list(KEY_VALUE_HEADS) if name == "architecture" else None
        parser.add_argument(f"--{name.replace('_', '-')}", type=type(value), default=value, choices=choices)
    arguments = vars(parser.parse_args())
    output, start = arguments.pop("output"), arguments.pop("start")
    write_demo_tasks(DATA)
    make(TrainingConfig(**arguments), start, output)


if __name__ == "__main__":
    main()

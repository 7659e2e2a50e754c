"""Train the text model on one thread. What is shipped is from::

    PYTHONPATH=tests/labs nice python -m text_bed.train --steps 4800 --output configs/demo/text  # stopped after 600
    PYTHONPATH=tests/labs nice python -m text_bed.train --steps 2200 --output configs/demo/text

An interrupted run goes on where it last saved its state, in the same output folder, at the learning rates of its own
options.
"""

from __future__ import annotations

import argparse
import json
import platform
import time
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from pathlib import Path

import numpy as np
import torch
from demo.train import optimizer_of, rate, save
from torch.nn.functional import cross_entropy
from transformers import PreTrainedModel, PreTrainedTokenizerFast

from moevolve.evaluators.tasks.installed import DOMAINS, rows_of
from text_bed.network import build_model, build_tokenizer

REPORT_EVERY = 100
STATE = "state.pt"
TOKENIZER_ROWS = 3000
Texts = Mapping[str, list[str]]


@dataclass(frozen=True)
class TextTraining:
    """Everything the run depends on besides the code and the installed text.

    ``length`` is the number of tokens of a row of a batch; a domain is drawn with a probability proportional to its
    number of characters to the power ``evenness``; ``balance`` is the weight of the load-balancing loss.
    """

    steps: int = 2200
    seed: int = 0
    batch_rows: int = 16
    length: int = 160
    evenness: float = 0.7
    learning_rate: float = 3e-3
    weight_decay: float = 0.05
    balance: float = 0.01
    vocabulary: int = 2048
    layers: int = 4
    hidden: int = 128
    ffn: int = 48


class Batches:
    """Rows of tokens that begin with ``<s>`` at the start of a text and go on into the texts after it."""

    def __init__(self, texts: Texts, tokenizer: PreTrainedTokenizerFast, config: TextTraining) -> None:
        self._config = config
        self._start = tokenizer.bos_token_id
        self._streams, self._starts = [], []
        for rows in texts.values():
            ids = tokenizer([row + "\n" for row in rows], add_special_tokens=False)["input_ids"]
            starts = np.cumsum([0, *map(len, ids)])
            self._streams.append(np.concatenate(ids))
            self._starts.append(starts[starts <= starts[-1] - config.length])
        shares = np.array([sum(map(len, rows)) for rows in texts.values()]) ** config.evenness
        self._shares = shares / shares.sum()

    def of(self, step: int) -> torch.Tensor:
        """Token ids of one step (batch_rows, length), int64: a function of the seed and the step."""
        rng = np.random.default_rng([self._config.seed, step])
        rows = []
        for domain in rng.choice(len(self._streams), self._config.batch_rows, p=self._shares):
            begin = rng.choice(self._starts[domain])
            rows.append([self._start, *self._streams[domain][begin : begin + self._config.length - 1]])
        return torch.tensor(np.array(rows))


@torch.no_grad()
def perplexities(
    model: PreTrainedModel, tokenizer: PreTrainedTokenizerFast, split: str, limit: int
) -> dict[str, float]:
    """Perplexity per token of the first rows of every domain, each row on its own and weighing the same."""
    model.eval()
    found = {}
    for domain in DOMAINS:
        losses = []
        for row in rows_of(domain, split)[:limit]:
            ids = tokenizer(row["text"], return_tensors="pt").input_ids
            losses.append(cross_entropy(model(ids).logits[0, :-1], ids[0, 1:]).item())
        found[domain] = round(float(np.exp(np.mean(losses))), 2)
    model.train()
    return found


def train(
    model: PreTrainedModel, tokenizer: PreTrainedTokenizerFast, texts: Texts, config: TextTraining, state: Path
) -> dict[str, float]:
    """Train in place; returns tokens seen, seconds, and the last report's mean loss."""
    optimizer = optimizer_of(model, config)
    batches = Batches(texts, tokenizer, config)
    done, seconds, last = 0, 0.0, float("nan")
    if state.exists():
        saved = torch.load(state, weights_only=True)
        model.load_state_dict(saved["model"])
        optimizer.load_state_dict(saved["optimizer"])
        done, seconds = saved["done"], saved["seconds"]
    model.train()
    began, losses = time.monotonic() - seconds, []
    for step in range(done, config.steps):
        for group in optimizer.param_groups:
            group["lr"] = config.learning_rate * rate(step, config.steps)
        ids = batches.of(step)
        out = model(input_ids=ids, labels=ids, output_router_logits=True)
        optimizer.zero_grad(set_to_none=True)
        out.loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        losses.append(out.loss.item() - config.balance * out.aux_loss.item())
        if (step + 1) % REPORT_EVERY == 0 or step + 1 == config.steps:
            last, losses, seconds = float(np.mean(losses)), [], time.monotonic() - began
            saved = {"model": model.state_dict(), "optimizer": optimizer.state_dict()}
            torch.save({**saved, "done": step + 1, "seconds": seconds}, state)
            shown = " ".join(f"{name} {value}" for name, value in perplexities(model, tokenizer, "dev", 20).items())
            print(f"step {step + 1} {seconds:.0f} s, loss {last:.3f}, balance {out.aux_loss:.2f}, {shown}", flush=True)
    tokens = config.steps * config.batch_rows * config.length
    return {"tokens": tokens, "seconds": round(seconds, 1), "final_loss": round(last, 4)}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--output", type=Path, required=True)
    for name, value in asdict(TextTraining()).items():
        parser.add_argument(f"--{name.replace('_', '-')}", type=type(value), default=value)
    arguments = vars(parser.parse_args())
    output = arguments.pop("output")
    output.mkdir(parents=True, exist_ok=True)
    config = TextTraining(**arguments)
    torch.set_num_threads(1)
    torch.manual_seed(config.seed)
    texts = {domain: [row["text"] for row in rows_of(domain, "train")] for domain in DOMAINS}
    tokenizer = build_tokenizer((row for rows in texts.values() for row in rows[:TOKENIZER_ROWS]), config.vocabulary)
    model = build_model(config.vocabulary, config.layers, config.hidden, config.ffn, config.balance)
    run = {"config": asdict(config), **train(model, tokenizer, texts, config, output / STATE)}
    model = save(model, tokenizer, output)
    report = {
        "parameters": model.num_parameters(),
        "machine": {"machine": platform.machine(), "python": platform.python_version(), "torch": torch.__version__},
        **run,
        "perplexity on test": perplexities(model, tokenizer, "test", 160),
    }
    (output / "training.json").write_text(json.dumps(report, indent=1) + "\n", encoding="utf-8")
    (output / STATE).unlink()


if __name__ == "__main__":
    main()

"""Prunes a mixture of experts by REAP with torch, safetensors and transformers alone, one decoder layer at a time.

    python tests/benchmarks/reap_peer.py MODEL TEXTS.jsonl OUT --experts 32 --tokens 16384

This is what bench_peers.py compares with: as little as it takes to choose experts by REAP (arXiv 2510.13999) and to
write the smaller checkpoint, for models like OLMoE and Qwen3-MoE, whose files have a tensor for every projection of an
expert. A layer's tensors are mapped from the files, all windows of text run through the layer unedited, and the experts
that are kept are written at once. Experts run on the tokens that chose them only, and once, for their scores and for
the next layer alike; REAP's own code runs every expert on every token.
"""

from __future__ import annotations

import argparse
import json
import shutil
import time
from collections.abc import Iterator
from functools import partial
from pathlib import Path
from typing import Any

import torch
from safetensors import safe_open
from safetensors.torch import save_file
from torch import Tensor
from torch.nn.functional import embedding, linear
from transformers import AutoConfig, AutoModelForCausalLM, AutoTokenizer

LAYERS, EXPERTS, ROUTER = "model.layers.", "mlp.experts.", "mlp.gate.weight"
PROJECTIONS = ("gate_proj", "up_proj", "down_proj")


class Files:
    """The tensors of a checkpoint by name, mapped from its files."""

    def __init__(self, model: Path) -> None:
        index = model / "model.safetensors.index.json"
        if index.is_file():
            self.where: dict[str, str] = json.loads(index.read_text())["weight_map"]
        else:
            with safe_open(model / "model.safetensors", "pt") as file:
                self.where = dict.fromkeys(file.keys(), "model.safetensors")
        self._open = {name: safe_open(model / name, "pt") for name in set(self.where.values())}

    def under(self, prefix: str) -> dict[str, Tensor]:
        """Tensors whose names begin with a prefix, by the rest of their names."""
        names = [name for name in self.where if name.startswith(prefix)]
        return {name.removeprefix(prefix): self._open[self.where[name]].get_tensor(name) for name in names}


def run_experts(
    tensors: dict[str, Tensor],
    act: Any,
    sums: Tensor,
    counts: Tensor,
    hidden: Tensor,
    chosen: Tensor,
    weights: Tensor,
) -> Tensor:
    """Outputs of a layer's experts [tokens, hidden], adding each expert's weighted output norms and tokens."""
    out = torch.zeros_like(hidden)
    for expert in range(len(sums)):
        token, slot = torch.where(chosen == expert)
        if not len(token):
            continue
        gate, up, down = (tensors[f"{EXPERTS}{expert}.{name}.weight"] for name in PROJECTIONS)
        rows, weight = hidden[token], weights[token, slot]
        found = linear(act(linear(rows, gate)) * linear(rows, up), down)
        sums[expert] += (weight.double() * found.double().norm(dim=1)).sum()
        counts[expert] += len(token)
        out.index_add_(0, token, found * weight[:, None])
    return out


def smaller(tensors: dict[str, Tensor], kept: list[int]) -> Iterator[tuple[str, Tensor]]:
    """A layer's tensors with these experts alone, numbered anew."""
    places = {str(old): str(new) for new, old in enumerate(kept)}
    for name, tensor in tensors.items():
        if name.startswith(EXPERTS):
            number, rest = name.removeprefix(EXPERTS).split(".", 1)
            if number in places:
                yield f"{EXPERTS}{places[number]}.{rest}", tensor
        else:
            yield name, tensor[kept] if name == ROUTER else tensor


@torch.inference_mode()
def prune(model: Path, windows: Tensor, experts: int, out: Path) -> dict[str, float]:
    """Write the pruned checkpoint; returns the seconds of each stage.

    Args:
        windows: Tokens to observe, int64 [windows, tokens].
        experts: Experts that every layer keeps.
    """
    seconds = dict.fromkeys(("reading", "running", "writing"), 0.0)
    last = time.perf_counter()

    def took(stage: str) -> None:
        nonlocal last
        seconds[stage] += (now := time.perf_counter()) - last
        last = now

    config = AutoConfig.from_pretrained(model)
    files, shards = Files(model), config.num_hidden_layers + 1
    with torch.device("meta"):
        empty = AutoModelForCausalLM.from_config(config, dtype=config.dtype)
    frame = files.under("")
    frame = {name: tensor for name, tensor in frame.items() if not name.startswith(LAYERS)}
    states = [embedding(window[None], frame["model.embed_tokens.weight"]) for window in windows]
    positions = torch.arange(windows.shape[1])[None]
    turned = type(empty.model.rotary_emb)(config)(states[0], positions)
    where: dict[str, str] = {}

    def write(tensors: dict[str, Tensor], shard: int) -> None:
        name = f"model-{shard + 1:05d}-of-{shards:05d}.safetensors"
        save_file({key: tensor.contiguous() for key, tensor in tensors.items()}, out / name, {"format": "pt"})
        where.update(dict.fromkeys(tensors, name))
        took("writing")

    took("reading")
    write(frame, 0)
    for index, layer in enumerate(empty.model.layers):
        tensors = files.under(f"{LAYERS}{index}.")
        own = {name: tensor for name, tensor in tensors.items() if not name.startswith(EXPERTS)}
        layer.load_state_dict(own, strict=False, assign=True)
        sums, counts = (torch.zeros(config.num_experts, dtype=torch.float64) for _ in range(2))
        layer.mlp.experts.forward = partial(run_experts, tensors, layer.mlp.experts.act_fn, sums, counts)
        took("reading")
        for place, state in enumerate(states):
            states[place] = layer(state, position_ids=positions, position_embeddings=turned)
        layer.to("meta")
        scores = sums / counts.clamp_min(1)
        kept = scores.argsort(descending=True, stable=True)[:experts].sort().values.tolist()
        took("running")
        write({f"{LAYERS}{index}.{name}": tensor for name, tensor in smaller(tensors, kept)}, index + 1)
    (out / "model.safetensors.index.json").write_text(json.dumps({"metadata": {}, "weight_map": where}))
    settings = json.loads((model / "config.json").read_text()) | {"num_experts": experts}
    (out / "config.json").write_text(json.dumps(settings, indent=2))
    for file in (*model.glob("tokenizer*"), *model.glob("generation_config.json")):
        shutil.copy(file, out)
    return seconds


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("model", type=Path)
    parser.add_argument("texts", type=Path, help="JSON lines with a field `text`, which are joined by empty lines")
    parser.add_argument("out", type=Path)
    parser.add_argument("--experts", type=int, required=True, help="how many each layer keeps")
    parser.add_argument("--tokens", type=int, required=True)
    parser.add_argument("--window", type=int, default=2048, help="tokens of a sequence")
    parser.add_argument("--threads", type=int)
    options = parser.parse_args()
    if options.threads is not None:
        torch.set_num_threads(options.threads)
    options.out.mkdir(parents=True)
    text = "\n\n".join(json.loads(line)["text"] for line in options.texts.read_text().splitlines())
    tokens = AutoTokenizer.from_pretrained(options.model)(text)["input_ids"]
    count = -(-options.tokens // options.window)
    windows = torch.tensor(tokens[: count * options.window]).view(count, options.window)
    print(json.dumps(prune(options.model, windows, options.experts, options.out)))


if __name__ == "__main__":
    main()

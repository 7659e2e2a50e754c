"""How fast this machine's CPU is at what a search does: measured in a moment, without a model's weights."""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch

from moevolve.kernels.products import linear
from moevolve.workers.config import EngineConfig
from moevolve.workers.engine.products import takes_onednn
from moevolve.workers.engine.runtime import configure_runtime
from moevolve.workers.profiling.outline import ModelOutline

_COPY_BYTES = 1 << 25
_MOST_FLOPS = 1 << 28
_MOST_SIDE = 1024
"""Sizes that take milliseconds: long enough for the full rate, short enough to be left alone by others at times."""

_SECONDS = 0.3
"""How long each is repeated; the fastest counts."""
_LAYERS = 4


@dataclass(frozen=True, slots=True)
class MachineRates:
    """Rates of one process.

    Attributes:
        threads: of torch.
        flops: operations/s in matrix products of the model's shapes and dtype.
        bandwidth: bytes/s read and written by copying memory.
        layer_seconds: what a decoder layer of next to nothing takes.
    """

    threads: int
    flops: float
    bandwidth: float
    layer_seconds: float


@torch.inference_mode()
def measure_machine(outline: ModelOutline, engine: EngineConfig) -> MachineRates:
    """Measure this process on the CPU; takes about a second. Its number of torch threads is set to the engine's.

    The matrix product is that of a batch's tokens with a network's, or an expert's, input matrix; both are cut down
    where they are larger than is needed to see the rate.

    Args:
        outline: the model.
        engine: threads, and how many tokens run together.
    """
    configure_runtime(engine.threads)
    facts, dtype = outline.facts, getattr(torch, outline.facts.dtype)
    tokens = engine.batch_tokens * facts.active // facts.experts if facts.experts else engine.batch_tokens
    inputs, outputs = min(outline.hidden, _MOST_SIDE), min(2 * outline.intermediate, _MOST_SIDE)
    rows = max(1, min(tokens, _MOST_FLOPS // (2 * inputs * outputs)))
    hidden, weight = (torch.ones(size, inputs, dtype=dtype) for size in (rows, outputs))
    by_onednn = dtype == torch.float32 and takes_onednn(engine.products)
    product = _fastest(lambda: linear(hidden, weight, by_onednn=by_onednn))
    source = torch.ones(_COPY_BYTES, dtype=torch.uint8)
    target = torch.empty_like(source)
    copied = _fastest(lambda: target.copy_(source))
    layer = _fastest(_small_pass(bool(facts.experts))) / _LAYERS
    return MachineRates(engine.threads, 2 * rows * inputs * outputs / product, 2 * _COPY_BYTES / copied, layer)


def _small_pass(experts: bool) -> Callable[[], Any]:
    """One token through a model of four layers in which only the code around the arithmetic takes time."""
    from transformers import AutoConfig, AutoModelForCausalLM

    sizes: dict[str, Any] = {"vocab_size": 8, "hidden_size": 16, "intermediate_size": 16, "num_hidden_layers": _LAYERS}
    sizes |= {"num_attention_heads": 2, "num_key_value_heads": 2}
    sizes |= {"num_local_experts": 4, "num_experts_per_tok": 2} if experts else {}
    with torch.random.fork_rng():
        model = AutoModelForCausalLM.from_config(AutoConfig.for_model("mixtral" if experts else "llama", **sizes))
    model.eval()
    tokens = torch.zeros(1, 1, dtype=torch.int64)
    return lambda: model(input_ids=tokens, use_cache=False)


def _fastest(run: Callable[[], Any]) -> float:
    """Seconds of the fastest of repeated runs: what else the machine does only makes them slower."""
    run()
    best, until = float("inf"), time.perf_counter() + _SECONDS
    while True:
        began = time.perf_counter()
        run()
        ended = time.perf_counter()
        best = min(best, ended - began)
        if ended > until:
            return best

"""A Mixtral in NumPy, so that a process that runs one starts without torch and `transformers`.

Source: Jiang et al., Mixtral of Experts, https://arxiv.org/abs/2401.04088.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray
from safetensors.numpy import load_file
from tokenizers import Tokenizer

Floats = NDArray[np.float32]


class PlainMixtral:
    """A checkpoint in float32 without cached keys and values: every call computes a whole text.

    Args:
        folder: The checkpoint, in one file of weights.
    """

    def __init__(self, folder: str) -> None:
        self._config = json.loads((Path(folder) / "config.json").read_text())
        self._tokenizer = Tokenizer.from_file(str(Path(folder) / "tokenizer.json"))
        self.load(folder)

    def load(self, folder: str) -> None:
        """Take the weights of a checkpoint of the same shapes."""
        self.weights: dict[str, Floats] = load_file(Path(folder) / "model.safetensors")

    def text(self, tokens: Sequence[int]) -> str:
        """Decode tokens without the special ones."""
        found: str = self._tokenizer.decode(list(tokens), skip_special_tokens=True)
        return found

    def logprobs(self, tokens: Sequence[int]) -> Floats:
        """Log-probabilities after every token of one text, in nats, float32 [tokens, vocabulary]."""
        hidden = self.weights["model.embed_tokens.weight"][list(tokens)]
        for i in range(self._config["num_hidden_layers"]):
            layer = f"model.layers.{i}"
            hidden = hidden + self._attention(f"{layer}.self_attn", self._norm(f"{layer}.input_layernorm", hidden))
            normed = self._norm(f"{layer}.post_attention_layernorm", hidden)
            hidden = hidden + self._experts(f"{layer}.block_sparse_moe", normed)
        found: Floats = np.log(_softmax(self._linear("lm_head", self._norm("model.norm", hidden))))
        return found

    def _linear(self, name: str, inputs: Floats) -> Floats:
        return inputs @ self.weights[f"{name}.weight"].T

    def _norm(self, name: str, inputs: Floats) -> Floats:
        size = np.sqrt((inputs**2).mean(axis=-1, keepdims=True) + self._config["rms_norm_eps"])
        return inputs / size * self.weights[f"{name}.weight"]

    def _attention(self, name: str, inputs: Floats) -> Floats:
        length, width = len(inputs), self._config["head_dim"]
        queries, keys, values = (
            self._linear(f"{name}.{part}_proj", inputs).reshape(length, -1, width).swapaxes(0, 1) for part in "qkv"
        )
        repeats = len(queries) // len(keys)
        queries, keys = self._rotated(queries), self._rotated(keys).repeat(repeats, axis=0)
        scores = queries @ keys.swapaxes(1, 2) / np.sqrt(np.float32(width))
        later = np.triu(np.ones((length, length), dtype=bool), 1)
        shares = _softmax(np.where(later, np.float32(-np.inf), scores))
        mixed = (shares @ values.repeat(repeats, axis=0)).swapaxes(0, 1).reshape(length, -1)
        return self._linear(f"{name}.o_proj", mixed)

    def _rotated(self, heads: Floats) -> Floats:
        """Rotary positions (https://arxiv.org/abs/2104.09864), float32 [heads, tokens, width]."""
        half = heads.shape[2] // 2
        speeds = self._config["rope_parameters"]["rope_theta"] ** (-np.arange(half) / half)
        angles = np.outer(np.arange(heads.shape[1]), speeds)
        cos, sin = np.cos(angles).astype(np.float32), np.sin(angles).astype(np.float32)
        first, second = heads[..., :half], heads[..., half:]
        return np.concatenate([first * cos - second * sin, second * cos + first * sin], axis=-1)

    def _experts(self, name: str, inputs: Floats) -> Floats:
        scores = _softmax(self._linear(f"{name}.gate", inputs))
        outputs = np.zeros_like(inputs)
        for row, each in enumerate(scores):
            chosen = each.argsort()[-self._config["num_experts_per_tok"] :]
            for expert in chosen:
                weight = each[expert] / each[chosen].sum()
                outputs[row] += weight * self._expert(f"{name}.experts.{expert}", inputs[row])
        return outputs

    def _expert(self, name: str, inputs: Floats) -> Floats:
        gate = self._linear(f"{name}.w1", inputs)
        return self._linear(f"{name}.w2", gate / (1 + np.exp(-gate)) * self._linear(f"{name}.w3", inputs))


def _softmax(scores: Any) -> Any:
    shares = np.exp(scores - scores.max(axis=-1, keepdims=True))
    return shares / shares.sum(axis=-1, keepdims=True)

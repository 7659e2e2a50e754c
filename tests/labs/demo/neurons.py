"""What the dense demo model loses when feed-forward neurons are set to zero, by task and by layer."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager

import numpy as np
import torch
from transformers import LlamaForCausalLM, PreTrainedTokenizerFast

from demo.scoring import accuracy_table, majority_class, mean_and_spread

ROWS = 300
"""First rows of test that knock-outs are measured on."""


@contextmanager
def zeroed(model: LlamaForCausalLM, neurons: Mapping[int, Sequence[int]]) -> Iterator[None]:
    """Set the activations of some feed-forward neurons to zero, by layer; layers not named keep all."""
    with ExitStack() as stack:
        for layer, indices in neurons.items():
            down = model.model.layers[layer].mlp.down_proj
            keep = torch.ones(down.in_features)
            keep[list(indices)] = 0

            def masked(_: torch.nn.Module, inputs: tuple[torch.Tensor], keep: torch.Tensor = keep) -> torch.Tensor:
                return inputs[0] * keep

            stack.callback(down.register_forward_pre_hook(masked).remove)
        yield


def neurons_report(
    model: LlamaForCausalLM, tokenizer: PreTrainedTokenizerFast, draws: int = 10, seed: int = 0
) -> dict[str, object]:
    """Accuracies of the full model and of the model with a random half of its feed-forward neurons at zero.

    ``half_of_neurons``: in every layer; ``one_layer_half``: in one layer only. Both are means and standard deviations
    over ``draws`` on the rows of ``accuracy["test_300"]``.
    """
    rng = np.random.default_rng([seed, 5])
    layers, width = range(model.config.num_hidden_layers), model.config.intermediate_size

    def halved(chosen: Sequence[int]) -> dict[str, dict[str, float]]:
        tables = []
        for _ in range(draws):
            with zeroed(model, {layer: rng.permutation(width)[: width // 2].tolist() for layer in chosen}):
                tables.append(accuracy_table(model, tokenizer, "test", ROWS))
        return mean_and_spread(tables)

    return {
        "accuracy": {
            "dev": accuracy_table(model, tokenizer, "dev"),
            "test": accuracy_table(model, tokenizer, "test"),
            f"test_{ROWS}": accuracy_table(model, tokenizer, "test", ROWS),
        },
        "majority": majority_class("test"),
        "half_of_neurons": halved(layers),
        "one_layer_half": {str(layer): halved([layer]) for layer in layers},
    }

"""MoEfication's division and routers, as those of FactorLLM genomes.

Source: MoEfication (arXiv 2110.01786), Sec. 3.2, "parameter clustering split": neurons whose input weights are alike
form an expert (balanced k-means on unit vectors). Sec. 3.3, "similarity center": a token goes to the experts whose
mean input weights have the largest cosine with its input. In a gated network the input weights are the gate's, which
decide whether a neuron is active.

The paper's best router is another: a small network trained to tell the sum of an expert's positive activations, for
which there is no closed form; and the sums themselves, its ground truth, are known only once all experts were run.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch
from numpy.typing import NDArray

from moevolve.workers.contract.edits import Calibration, Tokens
from moevolve.workers.contract.methods import Resident
from moevolve.workers.methods.factorllm.balanced_kmeans import balanced_kmeans
from moevolve.workers.methods.factorllm.calibrate import (
    batches,
    first_weights,
    layer_rng,
    logit_scale,
    networks_to_divide,
    unit_rows,
)
from moevolve.workers.methods.factorllm.edit import MoeficationRecipe
from moevolve.workers.methods.shared.input_statistics import InputMoments, run_watched


def calibrate_moefication(resident: Resident, sequences: Sequence[Tokens], recipe: MoeficationRecipe) -> Calibration:
    """Divide every network.

    Returns:
        Arrays `moefication_experts` uint8 [layers, width] and `moefication_weight` float32 [layers, N, hidden], scaled
        so that a router's logits vary by 1 over tokens; `moefication_bias` float32 [layers, N], zeros: a cosine has
        none, and the length of an input is the same for all experts.

    Raises:
        UserError: no dense networks, or no tokens.
    """
    experts: list[NDArray[np.uint8]] = []
    weights: list[NDArray[np.float32]] = []
    layers = networks_to_divide(resident, sequences)
    for batch in batches(layers, lambda layer: 8 * layer.hidden**2):
        moments = [InputMoments(layer.hidden, layer.up.weight.device) for layer in batch]
        run_watched(resident, sequences, [(layer.up, False, m.add) for layer, m in zip(batch, moments, strict=True)])
        for layer, each in zip(batch, moments, strict=True):
            rows = first_weights(layer)
            labels = balanced_kmeans(unit_rows(rows), recipe.experts, layer_rng(len(experts)))
            means = np.stack([rows[labels == expert].mean(axis=0) for expert in range(recipe.experts)])
            square = each.covariance
            centres = torch.from_numpy(unit_rows(means)).to(square)
            experts.append(labels.astype(np.uint8))
            weights.append((centres * logit_scale(centres, square)).float().cpu().numpy())
    return Calibration(
        {
            "moefication_experts": np.stack(experts),
            "moefication_weight": np.stack(weights),
            "moefication_bias": np.zeros((len(layers), recipe.experts), dtype=np.float32),
        }
    )

"""Phi: plain networks with biases in `mlp`; rotary embedding turns a part of each head only."""

from __future__ import annotations

from moevolve.workers.families.base import DenseFamily

PHI = DenseFamily("phi", "Phi", up="fc1", gate=None, down="fc2", activation="activation_fn")

"""OPT: plain networks with biases, held and run by the decoder layer itself."""

from __future__ import annotations

from moevolve.workers.families.base import DenseFamily

OPT = DenseFamily(
    "opt",
    "OPT",
    up="fc1",
    gate=None,
    down="fc2",
    activation="activation_fn",
    inline=True,
    packs=False,  # its masks are made without the position ids
)

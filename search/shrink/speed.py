"""How narrow experts must be to generate faster: timed before the search, and checked on the checkpoint after it."""

from __future__ import annotations

import os
import tempfile
from collections.abc import Callable, Mapping
from pathlib import Path

from moevolve.evaluators.errors import UserError
from moevolve.search.config.run import RunConfig
from moevolve.search.loop.scores import FULL
from moevolve.search.shrink.budget import SpeedBudget
from moevolve.search.shrink.page import Speed, Written
from moevolve.workers.contract.settings import ModelConfig
from moevolve.workers.profiling.report import NEW_TOKENS, ProfiledModel, ProfileSettings, usual_prompt_tokens

SHARES = (1.0, 0.5, 0.25, 0.125)
"""Shares of each expert's neurons that are timed; between them, seconds are interpolated."""
_MARGIN = 1.03
"""The share is chosen for a speed above the one asked for, since repeated timings differ by a few percent."""
_TOLERANCE = 0.97
"""Share of the speed from which a checkpoint counts as fast enough, for the same reason."""
_REPEATS = 5


def seconds_by_share(config: RunConfig, budget: SpeedBudget) -> dict[float, float]:
    """Seconds in which the model generates a token of every sequence, by share of the experts' neurons."""
    from moevolve.workers.checkpoints.loading import placed
    from moevolve.workers.profiling.widths import time_widths

    model = placed(config.model)
    seconds = time_widths(
        ProfiledModel.full(model.path, model), SHARES, _settings(model, budget.sequences, budget.prompt_tokens)
    )
    return {share: each / NEW_TOKENS for share, each in zip(SHARES, seconds, strict=True)}


def chosen_share(budget: SpeedBudget, seconds: Mapping[float, float]) -> tuple[float, str]:
    """Choose the largest share of neurons with which a model is as fast as was asked for, and a little more.

    Returns:
        The share, in (0, 1), and a sentence about it for people.

    Raises:
        UserError: None of the shares is fast enough; the message says how fast the fastest is.
    """
    full = seconds[1.0]
    aim = budget.times * _MARGIN
    wider, before = 1.0, full
    for share in sorted(seconds, reverse=True)[1:]:
        taken = min(before, seconds[share])  # fewer neurons don't take longer, but by chance
        if taken <= full / aim:
            found = share + (wider - share) * (full / aim - taken) / (before - taken)
            text = (
                f"--speed {budget.text}: the full model generates {budget.sequences / full:.4g} tokens/s with "
                f"{_at_once(budget)} on this machine, and {aim:.3g} times as many with {found:.1%} of its experts' "
                "neurons"
            )
            return round(found, 4), text
        wider, before = share, taken
    raise UserError(
        f"--speed {budget.text}: with {wider:.1%} of their neurons, the fewest that were timed, this model's experts "
        f"make it {full / before:.2f} times as fast with {_at_once(budget)} on this machine; give a smaller speed, "
        "another --batch, or --experts"
    )


def measured_speed(
    config: ModelConfig, written: Written, sequences: int, prompt_tokens: int | None, on_stage: Callable[[str], None]
) -> Speed:
    """Time a new checkpoint beside the one that it was made of, as plain `transformers` runs them.

    So many sequences are generated at once after prompts of so many tokens; see `SpeedBudget`. The code of the new
    checkpoint is run only if this program has written that, for a native checkpoint.

    Raises:
        UserError: One of them can't be loaded.
        ProfileError: Its process has ended.
    """
    from moevolve.workers.checkpoints.loading import placed
    from moevolve.workers.profiling.run import profile_models

    model, path = placed(config), str(written.directory)
    models = [
        ProfiledModel.full(FULL, model),
        ProfiledModel(path, path, None, model.device_map, written.form == "native"),
    ]
    with tempfile.TemporaryDirectory(prefix="moevolve-profile-") as scratch:
        report = profile_models(models, _settings(model, sequences, prompt_tokens), Path(scratch), on_stage)
    full, new = (profile.batches[0] for profile in report.models)
    rates = full.decode_rate, new.decode_rate
    return Speed(sequences, report.reference.load.device_name, *rates, full.peak_bytes, new.peak_bytes)


def slower_than_asked(budget: SpeedBudget, speed: Speed) -> str | None:
    """A sentence that says how far a checkpoint misses the speed; None if it is as fast as asked."""
    if speed.times >= _TOLERANCE * budget.times:
        return None
    return f"it generates {speed.times:.2f} times as many tokens/s as the full model, fewer than --speed {budget.text}"


def _settings(model: ModelConfig, sequences: int, prompt_tokens: int | None) -> ProfileSettings:
    from moevolve.workers.profiling.checkpoints import position_limit

    positions = position_limit(model)
    tokens = prompt_tokens or usual_prompt_tokens(positions)
    if tokens + NEW_TOKENS > positions:
        raise UserError(
            f"--context {tokens}: that and {NEW_TOKENS} new tokens are more than the model's {positions} positions"
        )
    cores = len(os.sched_getaffinity(0))
    return ProfileSettings((sequences,), tokens, NEW_TOKENS, _REPEATS, model.device, model.dtype, cores)


def _at_once(budget: SpeedBudget) -> str:
    return "one sequence" if budget.sequences == 1 else f"{budget.sequences} sequences at once"

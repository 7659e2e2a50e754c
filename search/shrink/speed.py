"""How fast a new checkpoint generates beside the one that it was made of."""

from __future__ import annotations

import os
import tempfile
from pathlib import Path

from moevolve.evaluators.errors import UserError
from moevolve.search.loop.scores import FULL
from moevolve.search.running.observer import Observer
from moevolve.search.shrink.page import Speed, Written
from moevolve.workers.contract.settings import ModelConfig
from moevolve.workers.profiling.report import (
    NEW_TOKENS,
    ProfiledModel,
    ProfileError,
    ProfileSettings,
    usual_prompt_tokens,
)

_REPEATS = 5


def measured_speed(config: ModelConfig, written: Written, observer: Observer) -> Speed | None:
    """Time a new checkpoint beside the one that it was made of, one sequence at once in plain `transformers`.

    The code of the new checkpoint is run only if this program has written that, for a native checkpoint. Where the full
    model doesn't fit on the device, or one of both can't be timed, a note says so and there is no speed.
    """
    from moevolve.workers.checkpoints.loading import placed
    from moevolve.workers.profiling.checkpoints import position_limit
    from moevolve.workers.profiling.run import profile_models

    if config.expert_offload != "device":
        observer.on_note("speed and memory aren't measured, since the full model doesn't fit on the device")
        return None
    model, path = placed(config), str(written.directory)
    models = [
        ProfiledModel.full(FULL, model),
        ProfiledModel(path, path, None, model.device_map, written.form == "native"),
    ]
    positions, cores = position_limit(model), len(os.sched_getaffinity(0))
    tokens = usual_prompt_tokens(positions)
    new_tokens = min(NEW_TOKENS, positions - tokens)
    settings = ProfileSettings((1,), tokens, new_tokens, _REPEATS, model.device, model.dtype, cores)
    try:
        with tempfile.TemporaryDirectory(prefix="moevolve-profile-") as scratch:
            report = profile_models(models, settings, Path(scratch), observer.on_stage)
    except (UserError, ProfileError) as error:
        observer.on_note(f"speed and memory aren't measured: {error}")
        return None
    full, new = (profile.batches[0] for profile in report.models)
    rates = full.decode_rate, new.decode_rate
    return Speed(report.reference.load.device_name, *rates, full.peak_bytes, new.peak_bytes)

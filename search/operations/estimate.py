"""Estimates by what a user asks for, and what they rest on."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from moevolve.evaluators.errors import UserError
from moevolve.search.config.files import as_override, as_run_config
from moevolve.search.config.models import find_model
from moevolve.search.config.run import RunConfig
from moevolve.search.estimate.counts import FULL_MODEL
from moevolve.search.estimate.devices import find_gpus
from moevolve.search.estimate.estimate import UTILISATION, DeviceEstimate, Estimate, EstimateRequest, estimate
from moevolve.search.estimate.workload import Prompts
from moevolve.search.operations.data import as_data
from moevolve.search.running.weights import resolved_model_path
from moevolve.search.strategies.schedule import rounds_notes
from moevolve.workers.profiling.outline import outline_model

DEFAULT_GPUS = "a100-80g,h100,h200"

BY_FLOPS = (
    "times by FLOPs leave out what isn't arithmetic on prompts and gold answers: further decoding, making and "
    "repairing candidates, and copying experts that stay on the host; a search can take many times longer"
)


def estimate_run(
    source: RunConfig | Path | str,
    overrides: Sequence[str] = (),
    *,
    model: str | None = None,
    keep: float | None = None,
    gpus: str | None = None,
    prompt_tokens: int | None = None,
    new_tokens: int | None = None,
    examples: int | None = None,
    utilisation: float | None = None,
    pilot: int | None = None,
    on_stage: Callable[[str], None] = lambda _: None,
) -> Estimate:
    """Estimate a run, without weights unless a pilot is asked for.

    Args:
        source: its configuration, or the path of that.
        overrides: of its settings, `KEY=VALUE`.
        model: folder of a config, or name of one that comes with moevolve, in the place of the run's.
        keep: share of the experts that is retained, in (0, 1], in the place of `genome.experts`.
        gpus: names of devices, separated by commas; None takes three common ones, or none for a run on the CPU.
        prompt_tokens: of every prompt, in the place of the tasks' data.
        new_tokens: of every answer, with `prompt_tokens`; None takes the task's `max_new_tokens`.
        examples: of every split, with `prompt_tokens`; None takes what the tasks' files say.
        utilisation: share of a GPU's peak FLOP/s that is assumed, in (0, 1]; None takes `UTILISATION`.
        pilot: how many individuals to evaluate for real, on the run's own workers, to tell how long the search takes.
        on_stage: told what the pilot is doing.

    Raises:
        UserError: something in the configuration or the request can't be had.
        PoolError: no worker can be had for the pilot.
    """
    config = _settings(source, overrides, model, keep)
    on_cpu = config.model.device == "cpu" or (config.model.device == "auto" and not config.workers.num_gpus)
    names = gpus if gpus is not None or on_cpu else DEFAULT_GPUS
    prompts = _prompts(prompt_tokens, new_tokens, examples)
    share = UTILISATION if utilisation is None else utilisation
    if not 0 < share <= 1:
        raise UserError(f"--utilisation {share}: give a share above 0, and 1 at most")
    found = estimate(EstimateRequest(config, () if names is None else find_gpus(names), prompts, share))
    if pilot is None:
        return found
    from moevolve.search.operations.pilot import run_pilot

    return replace(found, pilot=run_pilot(found, pilot, on_stage=on_stage))


def _settings(
    source: RunConfig | Path | str, overrides: Sequence[str], model: str | None, keep: float | None
) -> RunConfig:
    """The run, with another model, and as many of its experts as are to be kept."""
    changes = [
        *overrides,
        *(() if model is None else (as_override("model.path", resolved_model_path(find_model(model))),)),
    ]
    config = as_run_config(source, changes)
    if keep is None:
        return config
    if not 0 < keep <= 1:
        raise UserError(f"--keep {keep}: give a share above 0, and 1 at most")
    experts = outline_model(config.model).facts.experts
    if not experts:
        raise UserError(f"--keep: {config.model.path} has no experts; leave it out")
    return as_run_config(source, (*changes, f"genome.experts={max(1, round(keep * experts))}"))


def _prompts(prompt_tokens: int | None, new_tokens: int | None, examples: int | None) -> Prompts | None:
    if prompt_tokens is not None:
        return Prompts(prompt_tokens, new_tokens, examples)
    for name, value in (("--new-tokens", new_tokens), ("--examples", examples)):
        if value is not None:
            raise UserError(f"{name} goes with --prompt-tokens: without it lengths are those of the tasks' data")
    return None


def notes(report: Estimate) -> list[str]:
    """What the numbers rest on, and what they leave out."""
    found = [evaluations_note(report)]
    if report.pilot is not None:
        seconds = ", ".join(f"{each:.2f} s {kind}" for kind, each in report.pilot.seconds.items())
        found.append(
            f"pilot: {report.pilot.individuals} individuals were evaluated on this machine (workers: "
            f"{report.pilot.workers}); an evaluation, with making and repairing its candidate, took {seconds}"
        )
    found += [note for one in report.devices for note in _device_notes(report, one)]
    if report.devices:
        found.append(BY_FLOPS)
    if report.pilot is None:
        found.append("`--pilot 20` evaluates 20 individuals on this machine, and says how long the search takes on it")
    found += report.set_aside
    found += rounds_notes(report.config)
    found += [f"{work.fault}; `launch` refuses it" for work in report.repairs if work.fault is not None]
    count = report.config.workers.count
    busy = min((one.workers for one in report.devices), default=None)
    if busy is not None and count == "auto":
        found.append(f"workers.count is auto: hours are those of the {busy} workers that the window keeps busy")
    elif busy is not None and count != "auto" and busy < count:
        found.append(f"the run's window keeps {busy} of {count} workers busy")
    if not report.devices:
        found.append("on a CPU, device and host are the same memory")
    used_host = report.memory.get(report.config.model.originals)
    if used_host is not None and used_host.loading:
        found.append(f"loading takes {bytes_text(used_host.loading)} of host memory at its peak, in every worker")
    if used_host is not None and used_host.exporting:
        found.append(f"exporting a candidate takes {bytes_text(used_host.exporting)} of the device at its peak")
    found.append("memory leaves out the CUDA context and what the allocator keeps in reserve")
    return found


def evaluations_note(report: Estimate) -> str:
    """How many evaluations a search makes at most."""
    counts = ", ".join(
        f"{one.individuals} {one.kind}"
        + (f" (at most {one.different} different)" if one.different < one.individuals else "")
        for one in report.counts
    )
    ranked, tested = report.final
    return (
        f"evaluations: {counts}, then {ranked} on dev and {tested} on test; a candidate that repeats an earlier one is "
        "looked up instead of evaluated"
    )


def _device_notes(report: Estimate, one: DeviceEstimate) -> Iterator[str]:
    peak = one.device.flops(report.outline.facts.dtype) / 1e12
    yield (
        f"{one.device.name} ({one.device.title}): about {hours_text(one.hours)}, if {report.utilisation:.0%} of its "
        f"{peak:.4g} TFLOP/s are got"
    )
    layers = len(report.outline.facts.moe_layers)
    for title, kept in one.kept_layers.items():
        if kept < layers:
            yield (
                f"{one.device.name}: {kept} of the {layers} layers of a "
                f"{title if title == FULL_MODEL else f'{title} candidate'} keep their experts on the device, the "
                "others' are copied from the host in every pass"
            )


def bytes_text(size: int) -> str:
    """A number of bytes for people."""
    if not size:
        return "-"
    return f"{size / 2**30:,.1f} GiB" if size >= 2**30 else f"{size / 2**20:,.1f} MiB"


def hours_text(hours: float) -> str:
    """A time for people, to two digits."""
    if hours >= 1:
        return f"{hours:,.0f} hours" if hours >= 9.95 else f"{hours:.1f} hours"
    return f"{60 * hours:.0f} minutes" if hours >= 1 / 30 else f"{3600 * hours:.0f} seconds"


@as_data.register
def _(report: Estimate) -> dict[str, Any]:
    """Memory is in bytes."""
    facts, (ranked, tested) = report.outline.facts, report.final
    return {
        "name": report.config.name,
        "model": report.config.model.path,
        "family": facts.family,
        "dtype": facts.dtype,
        "sizes": as_data(report.sizes),
        "memory": {
            where: {
                "items": as_data(memory.items),
                "device_bytes": memory.device,
                "host_bytes": memory.host,
                "loading_host_bytes": memory.loading,
                "experts_bytes": memory.experts,
                "exporting_device_bytes": memory.exporting,
            }
            for where, memory in report.memory.items()
        },
        "originals": report.config.model.originals,
        "splits": [
            {"task": s.task, "split": s.split, "examples": s.examples, "tokens": s.tokens, "source": s.source}
            for s in report.splits
        ],
        "evaluation_flops": as_data(report.flops),
        "total_flops": report.total_flops,
        "repairs": [as_data(work) | {"fault": work.fault} for work in report.repairs],
        "phases": as_data(report.counts),
        "final": {"ranked": ranked, "tested": tested},
        "utilisation": report.utilisation,
        "devices": [
            {
                "name": one.device.name,
                "title": one.device.title,
                "workers": one.workers,
                "memory_bytes": one.memory,
                "flops_per_second": one.device.flops(facts.dtype),
                "fits": as_data(one.fits),
                "kept_layers": as_data(one.kept_layers),
                "hours": one.hours,
            }
            for one in report.devices
        ],
        "pilot": as_data(report.pilot),
        "notes": notes(report),
    }

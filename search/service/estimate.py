"""Estimates by what a user asks for, and what they rest on."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from moevolve.evaluators.errors import UserError
from moevolve.search.config.files import as_override, as_run_config
from moevolve.search.config.models import find_model
from moevolve.search.config.run import RunConfig
from moevolve.search.estimate.devices import GPU_UTILISATION, Device, Utilisation, find_gpus
from moevolve.search.estimate.estimate import FULL_MODEL, DeviceEstimate, Estimate, EstimateRequest, estimate
from moevolve.search.estimate.measured import MeasuredEstimate
from moevolve.search.estimate.timing import Streaming
from moevolve.search.estimate.workload import Prompts
from moevolve.search.loop.schedule import rounds_notes
from moevolve.search.service.data import as_data
from moevolve.search.service.weights import where_model
from moevolve.workers.profiling.outline import outline_model

DEFAULT_GPUS = "a100-80g,h100,h200"


def estimate_run(
    source: RunConfig | Path | str,
    overrides: Sequence[str] = (),
    *,
    model: str | None = None,
    keep: float | None = None,
    gpus: str | None = None,
    cpu: bool = False,
    prompt_tokens: int | None = None,
    new_tokens: int | None = None,
    examples: int | None = None,
    utilisation: float | None = None,
) -> Estimate:
    """Estimate a run, without weights.

    Args:
        source: its configuration, or the path of that.
        overrides: of its settings, `KEY=VALUE`.
        model: folder of a config, or name of one that comes with moevolve, in the place of the run's.
        keep: share of the experts that is retained, in (0, 1], in the place of `genome.experts`.
        gpus: names of devices, separated by commas; None takes what suits the run.
        cpu: whether to measure this machine's CPU, and estimate for it.
        prompt_tokens: of every prompt, in the place of the tasks' data.
        new_tokens: of every answer, with `prompt_tokens`; None takes the task's `max_new_tokens`.
        examples: of every split, with `prompt_tokens`; None takes what the tasks' files say.
        utilisation: share of a GPU's operations/s that passes get, in (0, 1].

    Raises:
        UserError: something in the configuration or the request can't be had.
    """
    config = _settings(source, overrides, model, keep)
    if gpus is None and not cpu:
        cpu = config.model.device == "cpu" or (config.model.device == "auto" and not config.workers.num_gpus)
        gpus = None if cpu else DEFAULT_GPUS
    devices: tuple[Device, ...] = () if gpus is None else find_gpus(gpus)
    prompts = _prompts(prompt_tokens, new_tokens, examples)
    return estimate(EstimateRequest(config, devices, cpu, prompts, _utilisation(utilisation)))


def _settings(
    source: RunConfig | Path | str, overrides: Sequence[str], model: str | None, keep: float | None
) -> RunConfig:
    """The run, with another model, and as many of its experts as are to be kept."""
    changes = [*overrides, *(() if model is None else (as_override("model.path", where_model(find_model(model))),))]
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


def _utilisation(compute: float | None) -> Utilisation:
    if compute is None:
        return GPU_UTILISATION
    if not 0 < compute <= 1:
        raise UserError(f"--utilisation {compute}: give a share above 0, and 1 at most")
    return replace(GPU_UTILISATION, compute=compute)


def notes(report: Estimate) -> list[str]:
    """What the numbers rest on, and what they leave out."""
    counts = ", ".join(f"{c.individuals} {c.kind} (at most {c.different} different)" for c in report.counts)
    ranked, tested = report.final
    found = [
        (
            f"evaluations: {counts}, then {ranked} on dev and {tested} on test; a candidate that repeats another is "
            "looked up, how many do is not known beforehand"
        ),
        (
            "ranges: from no answer decoded beyond what the pass over the gold answers shows, to every answer decoded "
            "to its last token"
        ),
    ]
    for one in report.devices:
        placement, device, used = one.placement, one.placement.device, one.placement.utilisation
        if device.memory:
            found.append(
                f"{device.name} ({device.title}): assumed are {used.compute:.0%} of "
                f"{device.flops(placement.dtype) / 1e12:.4g} TFLOP/s, {used.memory:.0%} of "
                f"{device.bandwidth / 1e9:,.0f} GB/s, {used.link:.0%} of {device.link / 1e9:.0f} GB/s from the host, "
                f"{1e3 * device.layer_seconds:.1f} ms per layer and pass at least"
            )
        else:
            found.append(
                f"cpu: measured just now with {device.title.split(', ')[-1]}: {device.half_flops / 1e9:.1f} GFLOP/s, "
                f"copying {device.bandwidth / 1e9:.1f} GB/s, {1e3 * device.layer_seconds:.2f} ms per layer; passes are "
                f"assumed to get {used.compute:.0%} of the first"
            )
        found += [_streaming_note(device.name, each) for each in one.streaming if each.kept < each.layers]
    found += report.set_aside
    found += rounds_notes(report.config)
    if report.repairs:
        found.append(
            "repairs: as their phases say (a repair phase's candidates vary it), with none of a candidate's layers "
            "fitted before; fits are taken to run at float32's rate"
        )
        found += [f"{work.fault}; `launch` refuses it" for work in report.repairs if work.fault is not None]
    if any(phase.edit is None for one in report.devices for phase in one.phases):
        found.append(
            f"making a {report.config.genome.kind} candidate of the resident model takes time that isn't counted"
        )
    count = report.config.workers.count
    busy = min((one.placement.workers for one in report.devices), default=None)
    if busy is not None and count == "auto":
        found.append(f"workers.count is auto: times are of the {busy:g} that are of use, if there is room for them")
    elif busy is not None and count != "auto" and busy < count:
        found.append(f"the run's window, or this machine's cores, keep {busy:g} of {count} workers busy")
    if any(not one.placement.device.memory for one in report.devices):
        found.append("on a CPU, device and host are the same memory")
    used_host = report.memory.get(report.config.model.originals)
    if used_host is not None and used_host.loading:
        found.append(f"loading takes {bytes_text(used_host.loading)} of host memory at its peak, in every worker")
    found.append(
        "not counted: calibration, loading, the CUDA context and the allocator's spare room, and hidden states reused"
    )
    return found


def _streaming_note(device: str, one: Streaming) -> str:
    of = one.title if one.title == FULL_MODEL else f"{one.title} candidate"
    return (
        f"{device}: {one.kept} of the {one.layers} layers of a {of} "
        f"keep their experts on the device, the others' are copied from the host in every pass, {one.seconds:.2f} s"
    )


def bytes_text(size: int) -> str:
    """A number of bytes for people."""
    if not size:
        return "-"
    return f"{size / 2**30:,.1f} GiB" if size >= 2**30 else f"{size / 2**20:,.1f} MiB"


@as_data.register
def _(report: Estimate) -> dict[str, Any]:
    """Ranges are `{least, most}`, memory is in bytes, times are in seconds."""
    facts, ranked_tested = report.outline.facts, report.final
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
            }
            for where, memory in report.memory.items()
        },
        "originals": report.config.model.originals,
        "splits": [
            {"task": s.task, "split": s.split, "examples": s.examples, "tokens": s.tokens, "source": s.source}
            for s in report.splits
        ],
        "evaluation_flops": as_data(dict(report.flops)),
        "repairs": [as_data(work) | {"flops": work.flops, "fault": work.fault} for work in report.repairs],
        "phases": as_data(report.counts),
        "final": {"ranked": ranked_tested[0], "tested": ranked_tested[1]},
        "devices": [_device_data(device) for device in report.devices],
        "measured": [],
        "notes": notes(report),
    }


def _device_data(one: DeviceEstimate) -> dict[str, Any]:
    placement = one.placement
    return {
        "name": placement.device.name,
        "title": placement.device.title,
        "workers": placement.workers,
        "share": placement.share,
        "flops_per_second": placement.device.flops(placement.dtype),
        "bytes_per_second": placement.device.bandwidth,
        "link_bytes_per_second": placement.device.link,
        "layer_seconds": placement.device.layer_seconds,
        "memory_bytes": placement.memory or None,
        "utilisation": as_data(placement.utilisation),
        "fits": as_data(one.fits),
        "phases": as_data(one.phases),
        "evaluations_per_second": as_data(one.rate),
        "hours": as_data(one.hours),
        "streaming": as_data(one.streaming),
    }


@as_data.register
def _(found: MeasuredEstimate) -> dict[str, Any]:
    return {
        "device": found.device,
        "task": found.task,
        "split": found.split,
        "evaluations": found.evaluations,
        "measured_seconds": found.measured,
        "estimated_seconds": as_data(found.estimated),
        "ratio": as_data(found.ratio),
    }

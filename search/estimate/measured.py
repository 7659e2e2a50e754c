"""An estimate beside what a search that ran took: evaluations' seconds as its workers measured them."""

from __future__ import annotations

from dataclasses import dataclass

from moevolve.evaluators.errors import UserError
from moevolve.search.config.files import parse_stored_config
from moevolve.search.config.run import RunConfig
from moevolve.search.estimate.estimate import DeviceEstimate, Estimate
from moevolve.search.estimate.timing import Range
from moevolve.store.reader import StoreReader


@dataclass(frozen=True, slots=True)
class MeasuredEstimate:
    """Scoring one candidate on one split: estimated on a device, and measured.

    Attributes:
        device: of the estimate.
        evaluations: that were measured; without those taken over from other searches.
        measured: seconds each, on average; the edit is not part of it.
        estimated: seconds.
    """

    device: str
    task: str
    split: str
    evaluations: int
    measured: float
    estimated: Range

    @property
    def ratio(self) -> Range:
        """Measured / estimated: above 1 the estimate was too hopeful."""
        return Range(self.measured / self.estimated.most, self.measured / self.estimated.least)


def compare(report: Estimate, store: StoreReader, search: str) -> tuple[MeasuredEstimate, ...]:
    """Set a search's evaluations beside an estimate's.

    Args:
        report: the estimate of the configuration that the search was launched with.
        store: where it is.
        search: its name.

    Raises:
        StoreError: no such search.
        UserError: it has other settings than the estimate, or has evaluated nothing itself.
    """
    record = store.search(search)
    stored = parse_stored_config(record.config)
    if not isinstance(stored, RunConfig) or stored.config_hash != report.config.config_hash:
        raise UserError(
            f"--measured {search}: this search has other settings than the plan; give the configuration and the --set "
            "that it was launched with"
        )
    found = []
    for cost in store.costs(record).splits:
        count = cost.evaluations - cost.earlier
        if count and cost.seconds:
            found += [
                MeasuredEstimate(
                    device.placement.device.name, cost.task, cost.split, count, cost.seconds / count, estimated
                )
                for device in report.devices
                if (estimated := _estimated(report, device, cost.task, cost.split)) is not None
            ]
    if not found:
        raise UserError(f"--measured {search}: it has no evaluations of its own yet")
    return tuple(found)


def _estimated(report: Estimate, device: DeviceEstimate, task: str, split: str) -> Range | None:
    pairs = zip(report.splits, device.scoring, strict=True)
    return next((seconds for one, seconds in pairs if (one.task, one.split) == (task, split)), None)

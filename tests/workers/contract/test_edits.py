"""Measurements of calibrations, and their fingerprints."""

from __future__ import annotations

from moevolve.workers.contract.edits import CombinedMeasurement, calibration_fingerprint, combined
from moevolve.workers.contract.fitting import RowsMeasurement
from moevolve.workers.methods.eep.edit import ExpertsMeasurement


def test_measurements_combine() -> None:
    measurement, other = RowsMeasurement(1000), ExpertsMeasurement(("usage",), None, 50)
    assert combined(None, None) is None and combined(None, measurement) is measurement
    both = combined(measurement, None, other)
    assert both == CombinedMeasurement((measurement, other)) and both.tokens == 1000
    measurements = (
        measurement,
        other,
        both,
        CombinedMeasurement((other, measurement)),
        CombinedMeasurement((measurement,)),
    )
    assert len({calibration_fingerprint(each, "model", "engine", ("task",)) for each in measurements}) == 5

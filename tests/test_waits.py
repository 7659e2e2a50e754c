"""Tests wait patiently: what is late because the machine computes something else doesn't fail."""

from __future__ import annotations

import re
import tomllib
from pathlib import Path

from waiting import PATIENT_S

TESTS = Path(__file__).parent
# A number where one says how long to wait. What the product is given, a `timeout_s` of 1.5 for example, isn't meant.
OWN_WAIT = re.compile(
    r"monotonic\(\) \+ \d|(?<![\w?])timeout(: float)? ?= ?\d|\.wait\([1-9]|\.join\([1-9]|mark\.timeout\(|"
    r"start_timeout_s=\d{2}|asyncio\.wait_for\(.*, \d"
)


def test_all_wait_as_long_as_the_lab_says() -> None:
    files = [path for path in TESTS.rglob("*.py") if path.parts[len(TESTS.parts)] != "benchmarks"]
    found = [
        f"{path.relative_to(TESTS)}:{number}: {line.strip()}"
        for path in files
        for number, line in enumerate(path.read_text(encoding="utf-8").splitlines(), 1)
        if OWN_WAIT.search(line) and path.name != Path(__file__).name
    ]
    assert len(files) > 100 and found == []


def test_that_is_long_and_pytest_waits_longer() -> None:
    settings = tomllib.loads((TESTS.parent / "pyproject.toml").read_text(encoding="utf-8"))
    assert 300 <= PATIENT_S < settings["tool"]["pytest"]["ini_options"]["timeout"]

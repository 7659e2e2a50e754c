"""The tables of `search/genomes/README.md`, from results of the lab.

    python tests/benchmarks/lab_tables.py [--results .lab/lab.jsonl]

They need the rows of `make lab` at 50 %, and at the other shares those of `--only FLAP 'ToMoE start, r' 1R8E CMoE
NanoMoE`.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path

import bench
from lab import PAPERS, TEXTS, grouped, ratio
from readme_tables import write_results, write_tables

README = bench.ROOT / "search" / "genomes" / "README.md"
FITTED = {"raw": False, "searched, not repaired": False, "repaired": True, "searched": True}
"""Whether candidates of a row's form are repaired, or fitted to outputs."""
DIVIDED = ("FactorLLM 1R4E2K", "FactorLLM 1R4E2K, k-means", "FactorLLM 1R8E4K", "FactorLLM 1R8E4K, k-means")
AT_HALF = (
    ("FLAP", "FLAP", "FLAP"),
    ("ToMoE's start", "ToMoE start", "ToMoE start"),
    ("ToMoE's start, all projections", None, "ToMoE start, all projections"),
    ("ToMoE, 150 searched and 2 repaired, three seeds", "ToMoE search", "ToMoE search"),
    *((each, each, each) for each in (*DIVIDED, "CMoE", "MoEfication")),
    ("low rank: of weights; fitted to outputs, SVD-LLM", "low rank", "low rank (SVD-LLM)"),
    ("NanoMoE-I: of weights; fitted to outputs", "NanoMoE-I", "NanoMoE-I"),
)
"""Label of a line, and its method before and after a fit."""
STEPS = (
    ("as above", "ToMoE start", True),
    ("not repaired", "ToMoE start", False),
    ("fitted on 4,096 tokens instead of 8,192", "ToMoE start, fitted on half of the tokens", True),
    ("equal widths of layers", "ToMoE start, equal widths", True),
    ("one mask for all tokens", "ToMoE start, one mask", True),
)
"""Label of a line, its method, and whether it is fitted."""

_Rows = list[Sequence[str]]


class Results:
    """Ratios of perplexities to the full model's by share, method, and whether it is fitted, as texts."""

    def __init__(self, path: Path) -> None:
        self._path = path
        groups = grouped([json.loads(line) for line in path.read_text(encoding="utf-8").splitlines()])
        self._groups = {(share, method, FITTED[form]): group for (share, method, form), group in groups.items()}

    def ratios(self, share: float, method: str, fitted: bool, interval: bool = True) -> list[str]:
        """One for each text; with or without their 95 % intervals."""
        key = share, method, fitted
        if key not in self._groups:
            raise SystemExit(f"{self._path} has no row {method} at {share:g} %: run it with `make lab`")
        return [_shown(*ratio(self._groups[key], text), interval) for text in TEXTS]

    def pairs(self, share: float, method: str) -> list[str]:
        """Both texts' ratios in one cell, without intervals, before and after a fit."""
        return [", ".join(self.ratios(share, method, fitted, interval=False)) for fitted in (False, True)]


def _shown(value: float, low: float, high: float, interval: bool) -> str:
    if value > 10_000:
        return "over 10^4"
    return f"{_number(value)} ({_number(low)} - {_number(high)})" if interval else _number(value)


def _number(value: float) -> str:
    return f"{value:.2f}" if value < 10 else f"{value:.1f}" if value < 100 else f"{value:,.0f}"


def at_half(found: Results) -> _Rows:
    """All methods at half of the neurons."""
    rows: _Rows = [("50 % active", *TEXTS, "repaired: prose", "code")]
    for label, *methods in AT_HALF:
        cells = [found.ratios(50, each, bool(place)) if each else ["", ""] for place, each in enumerate(methods)]
        rows.append([label, *cells[0], *cells[1]])
    return rows


def by_share(found: Results) -> _Rows:
    """Some methods at ToMoE's shares, beside the papers' own."""
    head = ("active", "FLAP: prose, code", "repaired", "ToMoE's start: prose, code", "repaired")
    rows: _Rows = [(*head, "NanoMoE-I, fitted to outputs", "ToMoE trained, DISP-LLM trained")]
    for share in (70, 60, 50):
        papers = ", ".join(f"{ratios[share]:.2f}" for ratios in PAPERS.values())
        methods = (found.pairs(share, "FLAP"), found.pairs(share, "ToMoE start"), found.pairs(share, "NanoMoE-I")[1:])
        rows.append([f"{share} %", *(cell for pair in methods for cell in pair), papers])
    return rows


def divided(found: Results) -> _Rows:
    """FactorLLM's divisions into eight experts."""
    head = ("FactorLLM, equal slices: prose, code", "repaired", "k-means: prose, code", "repaired")
    rows: _Rows = [("active", *head, "CMoE: prose, code", "repaired")]
    for active in (6, 5):
        name = f"FactorLLM 1R8E{active}K"
        methods = (name, f"{name}, k-means", "CMoE")
        rows.append([f"{active} of 8", *(cell for each in methods for cell in found.pairs(12.5 * active, each))])
    return rows


def steps(found: Results) -> _Rows:
    """What the repaired start of ToMoE consists of, left out one at a time."""
    rows: _Rows = [("ToMoE's start at 50 %, repaired", *TEXTS)]
    return rows + [[label, *found.ratios(50, method, fitted)] for label, method, fitted in STEPS]


TABLES = {
    "lab.csv": (at_half, "--shares 50"),
    "lab-shares.csv": (by_share, "--only FLAP 'ToMoE start, r' NanoMoE"),
    "lab-divided.csv": (divided, "--only 1R8E CMoE"),
    "lab-steps.csv": (steps, "--shares 50 --only 'ToMoE start'"),
}
"""By file: what makes the table, and options of `make lab` that run its rows."""


def main() -> None:
    parser = bench.arguments(__doc__)
    parser.add_argument("--results", type=Path, default=Path(".lab/lab.jsonl"))
    found = Results(parser.parse_args().results)
    for name, (rows, options) in TABLES.items():
        command = f'make lab OPTIONS="{options}", then python tests/benchmarks/lab_tables.py'
        write_results(name, command, rows(found))
    write_tables(README)


if __name__ == "__main__":
    main()

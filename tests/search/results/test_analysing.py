"""Analyses of stored individuals of every kind: made, kept, read back, drawn, and refused where there is nothing."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from report_lab import KINDS
from typer.testing import CliRunner

import moevolve
from moevolve.evaluators.errors import UserError
from moevolve.search.cli.app import app
from moevolve.search.interface.results import AnalyseRequest
from moevolve.search.report.usage import read_analysis, write_analysis
from moevolve.search.results.expert_usage import Analysis
from moevolve.store.errors import StoreError
from moevolve.store.repository import Store

FIGURES = {"eep": ["usage", "activations", "together", "words"], "tomoe": ["usage", "activations", "words"]}
FIGURES |= {"nanomoe": ["mixing"]}


@pytest.fixture(scope="module")
def analyses(all_kinds: str, tiny: Any) -> dict[str, Analysis]:
    with Store.open(all_kinds) as store:
        best = {kind: store.best_of_search(store.search(kind).id, 1)[0].index for kind in KINDS}
        return {kind: AnalyseRequest(f"{kind}:{best[kind]}", task=str(tiny.task)).answer(store) for kind in KINDS}


def test_an_individual_is_compared_with_the_full_model(analyses: dict[str, Analysis]) -> None:
    for kind, analysis in analyses.items():
        assert (analysis.kind, analysis.task, analysis.split) == (kind, "pick", "dev")
        assert analysis.after.tokens > 100 and (analysis.before is not None) == (kind == "eep")
        layers = analysis.after.mixed if kind == "nanomoe" else analysis.after.routed
        assert len(layers) == {"eep": 4, "nanomoe": 9}.get(kind, 3)
        for layer in analysis.after.routed:
            per_token = {"eep": 2, "factorllm": 2, "tomoe": 1}[kind]
            assert layer.counts.sum() == per_token * analysis.after.tokens
            assert (layer.together == layer.together.T).all() and (np.diag(layer.together) == layer.counts).all()
    before, after = analyses["eep"].before, analyses["eep"].after
    assert before is not None and before.tokens == after.tokens
    assert [layer.experts for layer in before.routed] == [4] * 4
    assert all(len(layer.origins) == layer.experts == 2 for layer in after.routed)


@pytest.mark.parametrize("kind", ["tomoe", "nanomoe"])
def test_an_analysis_is_written_with_its_figures_and_read_back(
    analyses: dict[str, Analysis], kind: str, tmp_path: Path
) -> None:
    analysis = analyses[kind]
    written = write_analysis(analysis, tmp_path / "new" / "folder")
    assert [path.stem for path in written] == ["analysis", *FIGURES[kind]]
    assert all(path.read_bytes().startswith(b"\x89PNG") for path in written[1:])
    for place in (written[0], written[0].parent):
        assert moevolve.as_data(read_analysis(place)) == moevolve.as_data(analysis)


def test_the_command_prints_and_writes_what_so_many_tokens_show(all_kinds: str, tiny: Any, tmp_path: Path) -> None:
    command = ["analyse", "eep:0", "--task", str(tiny.task), "--store", all_kinds, "--tokens", "30"]
    done = CliRunner().invoke(app, [*command, "-o", str(tmp_path / "out")])
    assert done.exit_code == 0, done.output
    assert "eep:0 on pick (dev)" in done.output and "before" in done.output and "together.png" in done.output
    assert {path.stem for path in (tmp_path / "out").iterdir()} == {"analysis", *FIGURES["eep"]}
    found = json.loads((tmp_path / "out" / "analysis.json").read_text())
    assert 30 <= found["after"]["tokens"] < 50
    assert len(found["after"]["routed"]) == 4 and found["before"]["routed"][0]["effective"] > 1


@pytest.mark.parametrize(("individual", "message"), [("full", "name one as SEARCH:INDEX"), ("eep:999", "eep:23")])
def test_what_can_not_be_analysed_is_refused(all_kinds: str, tiny: Any, individual: str, message: str) -> None:
    with Store.open(all_kinds) as store, pytest.raises((UserError, StoreError), match=message):
        AnalyseRequest(individual, task=str(tiny.task)).answer(store)


def test_other_files_are_no_analyses(tmp_path: Path) -> None:
    for content in ("", "{}", '{"format": "other"}', '{"format": "moevolve-analysis/2"}', "[1]"):
        (tmp_path / "analysis.json").write_text(content)
        with pytest.raises(UserError, match="this is no analysis of this version"):
            read_analysis(tmp_path)
    with pytest.raises(UserError, match="no analysis can be read there"):
        read_analysis(tmp_path / "nowhere.json")

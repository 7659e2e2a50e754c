"""Analyses of stored individuals of every kind: made, printed, and refused where there is nothing."""

from __future__ import annotations

import json
from typing import Any

import numpy as np
import pytest
from report_lab import KINDS
from typer.testing import CliRunner

from moevolve.evaluators.errors import UserError
from moevolve.search.cli.app import app
from moevolve.search.interface.individuals import AnalyseRequest, Analysis
from moevolve.store.errors import StoreError
from moevolve.store.repository import Store


@pytest.fixture(scope="module")
def analyses(all_kinds: str, tiny: Any) -> dict[str, Analysis]:
    with Store.open(all_kinds) as store:
        best = {kind: store.best_of_search(store.search(kind).id, 1)[0].index for kind in KINDS}
        return {
            kind: AnalyseRequest(f"{kind}:{best[kind]}", task=str(tiny.task)).answer(store)
            for kind in KINDS
            if kind != "nanomoe"
        }


def test_an_individual_is_compared_with_the_full_model(analyses: dict[str, Analysis]) -> None:
    for kind, analysis in analyses.items():
        assert (analysis.task, analysis.split) == ("pick", "dev")
        assert analysis.after.tokens > 100 and (analysis.before is not None) == (kind == "eep")
        assert len(analysis.after.routed) == {"eep": 4}.get(kind, 3)
        for layer in analysis.after.routed:
            per_token = {"eep": 2, "factorllm": 2, "tomoe": 1}[kind]
            assert layer.counts.sum() == per_token * analysis.after.tokens
            assert (layer.together == layer.together.T).all() and (np.diag(layer.together) == layer.counts).all()
    before, after = analyses["eep"].before, analyses["eep"].after
    assert before is not None and before.tokens == after.tokens
    assert [layer.experts for layer in before.routed] == [4] * 4
    assert all(len(layer.origins) == layer.experts == 2 for layer in after.routed)


def test_the_command_prints_what_so_many_tokens_show(all_kinds: str, tiny: Any) -> None:
    command = ["analyse", "eep:0", "--task", str(tiny.task), "--store", all_kinds, "--tokens", "30"]
    printed, data = (CliRunner().invoke(app, [*command, *more]) for more in ([], ["--json"]))
    assert printed.exit_code == data.exit_code == 0, printed.output + data.output
    found = json.loads(data.output)
    assert 30 <= found["after"]["tokens"] < 50
    assert len(found["after"]["routed"]) == 4 and found["before"]["routed"][0]["effective"] > 1
    assert "eep:0 on pick (dev)" in printed.output and "before" in printed.output
    assert all(repr(word) in printed.output for word in found["after"]["words"])


@pytest.mark.parametrize(
    ("individual", "message"),
    [("full", "name an individual as SEARCH:INDEX"), ("eep:999", "eep:23"), ("nanomoe:0", "no experts")],
)
def test_what_can_not_be_analysed_is_refused(all_kinds: str, tiny: Any, individual: str, message: str) -> None:
    with Store.open(all_kinds) as store, pytest.raises((UserError, StoreError), match=message):
        AnalyseRequest(individual, task=str(tiny.task)).answer(store)

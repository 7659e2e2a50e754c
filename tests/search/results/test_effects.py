"""What moved the score in a search: planted effects are found again with intervals that cover them."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest
from scipy.stats import ttest_1samp
from search_lab import Outcome, UnrulyPool, drive, run_config, start

from moevolve.search.genomes.contract.outline import GenomeOutline, LayerOutline
from moevolve.search.results.effects import Effects, effects, effects_of_choices, genes_of
from moevolve.store.repository import Store
from moevolve.workers.contract.edits import Edit
from moevolve.workers.methods.eep.edit import EepEdit

WORTH = np.random.default_rng(5).normal(0, 0.02, (2, 8))
"""What keeping an expert of a group of layers adds to the score."""
NOISE = 0.02


def additive(edit: Edit) -> Outcome:
    """A sum over kept experts, and noise that depends on the candidate."""
    if not isinstance(edit, EepEdit):
        return 0.9, -0.5
    noise = np.random.default_rng(int(edit.phenotype_hash[:8], 16)).normal(0, NOISE)
    kept = edit.expert_merging.any(axis=1)[[0, 2]]
    return float(np.clip(0.5 + (kept * WORTH).sum() + noise, 0, 1)), -1.0


@pytest.fixture(scope="module")
def store(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Store]:
    """With `lab`, whose 200 random individuals have the scores of `additive`, and `bred`, an ordinary search."""
    with Store.open(f"sqlite:///{tmp_path_factory.mktemp('effects') / 'store.db'}") as opened:
        phases = [{"kind": "prune", "evaluations": 200, "initial": 200}]
        drive(opened, start(opened, run_config(phases=phases)), UnrulyPool(1, additive, workers=50))
        drive(opened, start(opened, run_config(name="bred"), "bred-1"), UnrulyPool(2))
        yield opened


@pytest.fixture(scope="module")
def found(store: Store) -> Effects:
    return effects(store, "lab", 1000)


def test_intervals_cover_what_an_expert_adds_compared_with_its_layers_mean(found: Effects) -> None:
    true = {
        (f"experts of layers {layers}", f"expert {expert}"): value
        for layers, row in zip(("0-1", "2-3"), WORTH - WORTH.mean(axis=1, keepdims=True), strict=True)
        for expert, value in enumerate(row)
    }
    assert {(each.choice, each.option) for each in found.options} == true.keys()
    covered = [each.low <= true[each.choice, each.option] <= each.high for each in found.options]
    assert sum(covered) >= 13  # 95 % of 16 are 15.2; fewer than 13 have a probability of 1 %
    errors = np.array([each.effect - true[each.choice, each.option] for each in found.options])
    widths = np.array([each.high - each.low for each in found.options])
    # Of two experts, each kept by half, the mean difference has this standard error; intervals are 3.9 of them wide.
    assert np.abs(errors).max() < 0.01 and 0.5 < widths.mean() / (3.92 * NOISE / 200**0.5) < 2.5
    sure = [abs(each.effect) / (each.high - each.low) for each in found.options]
    assert sorted(sure, reverse=True) == pytest.approx(sure, rel=0.1)


def test_choices_have_the_standard_deviation_of_their_part_of_the_score(found: Effects) -> None:
    # Variance of a sum over 4 of 8 drawn without replacement: 4 * 4 / 7 times the variance of what is drawn.
    expected = {
        f"experts of layers {layers}": (16 / 7 * row.var()) ** 0.5
        for layers, row in zip(("0-1", "2-3"), WORTH, strict=True)
    }
    assert {each.choice: each.spread for each in found.choices} == pytest.approx(expected, rel=0.15)
    assert all(each.low < each.spread < each.high for each in found.choices)
    assert [each.spread for each in found.choices] == sorted((each.spread for each in found.choices), reverse=True)
    signal = sum(value**2 for value in expected.values())
    assert found.predicted == pytest.approx(signal / (signal + NOISE**2), abs=0.12)


def test_noise_is_predicted_by_nothing() -> None:
    drawn = np.random.default_rng(3)
    kept = [tuple(sorted(drawn.choice(8, 4, replace=False).tolist())) for _ in range(100)]
    outlines = [GenomeOutline((), 8, (), (LayerOutline(0, each),)) for each in kept]
    predicted, choices, options = effects_of_choices(outlines, genes_of(outlines), drawn.random(100))
    assert predicted is not None and predicted < 0.1 and len(options) == 8
    assert sum(each.low > 0 or each.high < 0 for each in options) <= 1 and len(choices) == 1


def test_as_much_is_predicted_of_new_individuals_as_is_said() -> None:
    said, held = [], []
    for seed in range(25):
        drawn = np.random.default_rng(seed)
        kept = np.argsort(drawn.random((1030, 12)), axis=1)[:, :6]
        table = np.zeros((1030, 12))
        np.put_along_axis(table, kept, 1.0, axis=1)
        scores = 0.5 + table @ drawn.normal(0, 0.03, 12) + drawn.normal(0, 0.05, 1030)
        outlines = [GenomeOutline((), 12, (), (LayerOutline(0, tuple(sorted(row.tolist()))),)) for row in kept[:30]]
        predicted, _, options = effects_of_choices(outlines, genes_of(outlines), scores[:30])
        effects_of = {each.option: each.effect for each in options}
        guesses = table @ [effects_of[f"expert {expert}"] for expert in range(12)]
        errors = scores[30:] - scores[:30].mean() - (guesses[30:] - guesses[:30].mean())
        said.append(predicted)
        held.append(1 - (errors**2).mean() / scores[30:].var())
    assert np.mean(held) > 0.2 and abs(np.mean(said) - np.mean(held)) < 0.08, (np.mean(said), np.mean(held))


def test_operators_are_judged_by_gains_over_the_best_parent(store: Store) -> None:
    found = effects(store, "bred", 20)
    rows = {row.index: row for row in store.history("bred-1") if row.fitness is not None}
    assert found.individuals == len(rows) and sum(each.individuals for each in found.operators) == len(rows)
    bests = {step.index for step in store.course("bred-1").steps}
    for each in found.operators:
        mine = [row for row in rows.values() if row.operator == each.operator]
        gains = [
            (row.fitness or 0.0) - max(rows[one].fitness or 0.0 for one in row.parents) for row in mine if row.parents
        ]
        assert (each.individuals, each.bests) == (len(mine), sum(row.index in bests for row in mine))
        assert (each.children, each.better) == (len(gains), sum(gain > 0 for gain in gains))
        if gains:
            interval = ttest_1samp(gains, 0).confidence_interval(0.95)
            assert (each.gain, each.low, each.high) == pytest.approx((np.mean(gains), interval.low, interval.high))
    assert any(each.children for each in found.operators) and any(not each.children for each in found.operators)


def test_settings_and_sizes_are_genes() -> None:
    drawn, outlines, scores = np.random.default_rng(1), [], []
    for _ in range(80):
        target, weight, wide = (
            str(drawn.choice(["local", "global"])),
            10 ** drawn.uniform(-3, 3),
            int(drawn.integers(1, 9)),
        )
        settings = (("same", "1"), ("ridge lambda", f"{weight:.2g}"), ("repair target", f"{target} (of a layer)"))
        layers = tuple(LayerOutline(layer, (), (8 * wide, 16)) for layer in range(3))
        outlines.append(GenomeOutline(settings[: 3 if wide > 1 else 1], 0, (("neurons", 64), ("heads", 16)), layers))
        gained = 0.0 if wide == 1 else 0.04 * (target == "local") + 0.02 * np.log10(weight)
        scores.append(0.5 + gained + 0.01 * wide + drawn.normal(0, 0.01))
    genes = genes_of(outlines)
    assert list(genes) == ["ridge lambda", "repair target", "neurons of layers 0-2"]
    assert {type(value) for value in genes["ridge lambda"]} == {float, type(None)}
    _, choices, options = effects_of_choices(outlines, genes, np.array(scores))
    assert choices[0].choice == "ridge lambda" and choices[0].spread == pytest.approx(0.02 * 3**0.5, rel=0.25)
    by_option = {(each.choice, each.option.split()[0]): each for each in options}
    target = by_option["repair target", "local"].effect - by_option["repair target", "global"].effect
    assert target == pytest.approx(0.04, abs=0.01)
    assert by_option["ridge lambda", "from"].effect == pytest.approx(2 * 0.02 * 3**0.5, rel=0.25)
    assert by_option["neurons of layers 0-2", "from"].effect == pytest.approx(2 * 0.01 * 21**0.5 / 2, rel=0.3)
    ends = {each.choice: [float(end) for end in each.option.split()[1::2]] for each in options if "from" in each.option}
    assert np.prod(ends["ridge lambda"]) == pytest.approx(1, abs=0.5)  # numbers over six decades, by their logarithms
    neurons = 8 * np.arange(1, 9)
    assert ends["neurons of layers 0-2"] == pytest.approx(neurons.mean() + neurons.std() * np.array([-1, 1]), rel=0.06)


def test_without_scores_nothing_is_told(store: Store, tmp_path: Path) -> None:
    with Store.open(f"sqlite:///{tmp_path / 'store.db'}") as empty:
        start(empty, run_config())
        found = effects(empty, "lab", 20, genes=True)
    assert (found.individuals, found.predicted, found.choices, found.rows) == (0, None, (), ())
    assert "too few individuals" in found.note
    few = [GenomeOutline((("lambda", f"{place}"),)) for place in range(9)]
    assert effects_of_choices(few, genes_of(few), np.arange(9.0)) == (None, [], []), "there are too few for a fit"
    genes = effects(store, "bred", 20, genes=True)
    assert len(genes.rows) == genes.individuals and all(len(row.values) == len(genes.genes) for row in genes.rows)

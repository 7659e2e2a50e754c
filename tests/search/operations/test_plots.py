"""Pictures of searches: written in every format, with everything labelled; what can't be drawn is refused."""

from __future__ import annotations

import xml.etree.ElementTree as ET
from pathlib import Path

import numpy as np
import pytest
from factorllm_samples import factorllm_space
from search_samples import HISTORY, continuous, eep_space, history_row
from tomoe_samples import tomoe_space

from moevolve.evaluators.errors import UserError
from moevolve.search.genomes.eep.genome import EepGenome
from moevolve.search.operations.plot import plot_search
from moevolve.search.settings.phases import TunePhase
from moevolve.store.records import IndividualRecord

GENOMES: dict[str, EepGenome | None] = {
    "none": None,
    "one group": continuous(eep_space(4, 1)),
    "per layer": continuous(eep_space(30, "per_layer", layers=12, experts=60)),
}


def texts(path: Path) -> set[str]:
    """The text elements' comments of an SVG: matplotlib notes each text it draws as one."""
    parser = ET.XMLParser(target=ET.TreeBuilder(insert_comments=True))
    root = ET.parse(path, parser).getroot()
    return {(node.text or "").strip() for node in root.iter() if node.tag is ET.Comment}


@pytest.mark.parametrize("genome", GENOMES.values(), ids=GENOMES.keys())
def test_a_picture_is_written(tmp_path: Path, genome: EepGenome | None) -> None:
    path = tmp_path / "search.png"
    plot_search(path, "demo on rte", HISTORY, 0.8, genome, "demo:4")
    assert path.read_bytes().startswith(b"\x89PNG")
    assert path.stat().st_size > 10_000


def test_all_of_the_search_is_labelled(tmp_path: Path) -> None:
    path = tmp_path / "search.svg"
    plot_search(path, "demo on rte", HISTORY, 0.8, continuous(eep_space(4, 4)), "demo:4")
    found = texts(path)
    assert {"demo on rte", "prune", "merge", "best so far", "failed", "full model", "matrices of demo:4"} <= found
    assert {"layers 0-7", "layers 24-31", "original expert"} <= found


def test_what_is_not_there_is_not_in_the_legend(tmp_path: Path) -> None:
    path = tmp_path / "search.svg"
    plot_search(path, "demo", [history_row(0, "prune", 0.4)], None, None)
    assert not {"failed", "full model", "merge", "original expert"} & texts(path)


def test_many_groups_are_thinned_out_and_the_picture_says_so(tmp_path: Path) -> None:
    path = tmp_path / "search.svg"
    plot_search(path, "demo", HISTORY, 0.8, continuous(eep_space(4, "per_layer")), "demo:4")
    found = texts(path)
    assert "matrices of demo:4 (8 of 32 groups)" in found
    assert {text for text in found if text.startswith("layer ")} >= {"layer 0", "layer 31"}


def test_widths_and_divisions_of_dense_models_are_drawn(tmp_path: Path) -> None:
    path = tmp_path / "search.svg"
    phase = TunePhase(evaluations=4, initial=1)
    tomoe = tomoe_space().sample(np.random.default_rng(0), phase).genome
    plot_search(path, "demo", HISTORY, 0.8, tomoe, "demo:4")
    assert {"widths of demo:4", "any expert (union)", "whole network"} <= texts(path)
    divided = factorllm_space()
    start, other = (divided.sample(np.random.default_rng(seed), phase).genome for seed in (0, 1))
    plot_search(path, "demo", HISTORY, 0.8, other, "demo:4", start)
    assert {"division of demo:4", "expert at the start", "neurons in common"} <= texts(path)
    plot_search(path, "demo", HISTORY, 0.8, other, "demo:4")  # nothing to hold it against
    assert "division of demo:4" not in texts(path)


@pytest.mark.parametrize("name", ["search.docx", "search", "search.csv"])
def test_unknown_formats_are_refused(tmp_path: Path, name: str) -> None:
    with pytest.raises(UserError, match=r"unknown picture format; use one of .*png.*svg"):
        plot_search(tmp_path / name, "demo", HISTORY, None, None)
    assert not (tmp_path / name).exists()


@pytest.mark.parametrize(
    "history", [[], [history_row(0, "prune", None, "pending"), history_row(1, "prune", None, "failed")]]
)
def test_a_search_without_evaluations_is_refused(tmp_path: Path, history: list[IndividualRecord]) -> None:
    with pytest.raises(UserError, match=r"^demo: no evaluated individual to plot yet$"):
        plot_search(tmp_path / "search.png", "demo", history, None, None)

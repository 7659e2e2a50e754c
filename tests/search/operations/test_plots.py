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
from moevolve.search.operations.plot import plot_search
from moevolve.search.settings.phases import TunePhase


def texts(path: Path) -> set[str]:
    """The text elements' comments of an SVG: matplotlib notes each text it draws as one."""
    parser = ET.XMLParser(target=ET.TreeBuilder(insert_comments=True))
    root = ET.parse(path, parser).getroot()
    return {(node.text or "").strip() for node in root.iter() if node.tag is ET.Comment}


def test_all_of_the_search_is_labelled(tmp_path: Path) -> None:
    path = tmp_path / "search.svg"
    plot_search(path, "demo on rte", HISTORY, 0.8, continuous(eep_space(4, 4)), "demo:4")
    found = texts(path)
    assert {"demo on rte", "prune", "merge", "best so far", "failed", "full model", "matrices of demo:4"} <= found
    assert {"layers 0-7", "layers 24-31", "original expert"} <= found


def test_what_is_not_there_is_not_in_the_legend(tmp_path: Path) -> None:
    plot_search(tmp_path / "search.png", "demo", [history_row(0, "prune", 0.4)], None, None)
    assert (tmp_path / "search.png").read_bytes().startswith(b"\x89PNG")
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


def test_what_can_not_be_drawn_is_refused(tmp_path: Path) -> None:
    for name in ("search.docx", "search", "search.csv"):
        with pytest.raises(UserError, match=r"unknown picture format; use one of .*png.*svg"):
            plot_search(tmp_path / name, "demo", HISTORY, None, None)
    unfinished = [history_row(0, "prune", None, "pending"), history_row(1, "prune", None, "failed")]
    for history in ([], unfinished):
        with pytest.raises(UserError, match=r"^demo: no evaluated individual to plot yet$"):
            plot_search(tmp_path / "search.png", "demo", history, None, None)
    assert not list(tmp_path.iterdir())

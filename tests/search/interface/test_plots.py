"""Pictures of searches, with everything labelled; what can't be drawn is refused."""

from __future__ import annotations

import xml.etree.ElementTree as ET
from io import BytesIO
from typing import Any

import numpy as np
import pytest
from factorllm_samples import factorllm_space
from search_samples import HISTORY, continuous, eep_space, history_row
from tomoe_samples import tomoe_space

from moevolve.evaluators.errors import UserError
from moevolve.search.genomes.contract.phases import TunePhase
from moevolve.search.interface.report import draw_search


def texts(*drawn: Any) -> set[str]:
    """The text elements' comments of a search's picture: matplotlib notes each text of an SVG as one."""
    parser, picture = ET.XMLParser(target=ET.TreeBuilder(insert_comments=True)), BytesIO()
    draw_search("demo on rte", *drawn).savefig(picture, format="svg")
    root = ET.fromstring(picture.getvalue(), parser)
    return {(node.text or "").strip() for node in root.iter() if node.tag is ET.Comment}


def test_all_of_the_search_is_labelled() -> None:
    found = texts(HISTORY, 0.8, continuous(eep_space(4, 4)), "demo:4")
    assert {"demo on rte", "prune", "merge", "best so far", "failed", "full model", "experts of demo:4"} <= found
    assert {"layers 0-7", "layers 24-31", "original expert"} <= found


def test_widths_of_dense_models_are_drawn() -> None:
    phase = TunePhase(evaluations=4, initial=1)
    tomoe = tomoe_space().sample(np.random.default_rng(0), phase).genome
    assert {"widths of demo:4", "any expert (union)", "whole network"} <= texts(HISTORY, 0.8, tomoe, "demo:4")
    divided = factorllm_space().sample(np.random.default_rng(0), phase).genome
    assert texts(HISTORY, 0.8, divided, "demo:4") == texts(HISTORY, 0.8, None), "what no paper draws isn't"


def test_what_can_not_be_drawn_is_refused() -> None:
    unfinished = [history_row(0, "prune", None, "pending"), history_row(1, "prune", None, "failed")]
    for history in ([], unfinished):
        with pytest.raises(UserError, match=r"^demo: no evaluated individual to plot yet$"):
            draw_search("demo", history, None, None)

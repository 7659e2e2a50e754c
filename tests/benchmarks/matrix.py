"""Which checkpoint formats and model families every verb is proven for: runs their tests, and prints two tables.

    python tests/benchmarks/matrix.py

A cell says whether the tests of a verb passed for a format or family, on tiny checkpoints that they write. What there
is no test for is left empty.
"""

from __future__ import annotations

import re
import sys
from collections import defaultdict
from pathlib import Path

import bench
import pytest

from moevolve.workers.families.registry import FAMILIES as FAMILY_TYPES

TESTS = Path(__file__).parents[1] / "workers"
CHECKPOINTS, EXPORTS, IN_FAMILIES = TESTS / "checkpoints", TESTS / "export", TESTS / "families"
READ, DISK, SAME, PRUNED = "read", "from disk", "kept: bytes", "pruned: logits"
SCALED, REQUANTISED = "factor in scales", "requantise"
FACTS, EDITS, SCORES, PACKED, ROUNDED = "facts", "edits", "answers", "rows", "in 16 bits"
FORMS, DEVICE = "exports", "on a device"

FORMATS = {
    "test_fp8_blocks_that_do_not_divide_a_weight": READ,
    "test_mistral4_as_published": READ,
    "test_deepseek_v4_as_published": READ,
    "test_mxfp4_as_published": READ,
    "test_llama4_with_experts_one_by_one": READ,
    "test_linear_layers_as_other_programs_write_them": READ,
    "test_every_architecture_loads_its_numbers": READ,
    "test_other_types": READ,
    "test_candidates_compute_the_same": DISK,
    "test_keeping_all_experts_gives_equal_files": SAME,
    "test_a_pruned_checkpoint_computes_what_the_search_measured": PRUNED,
    "test_a_factor_goes_into_the_scales": SCALED,
    "test_a_repair_writes_the_down_projections_anew": REQUANTISED,
    "test_merged_experts_are_written_anew": REQUANTISED,
    "test_numbers_are_rounded_to_the_nearest": REQUANTISED,
    "test_a_pruned_file_computes_what_the_search_measured": PRUNED,
}
"""Verbs of formats by test."""

OF_FAMILIES = {
    "test_layout_and_facts": (FACTS,),
    "test_facts_and_logits_are_those_of_the_equations": (FACTS, EDITS),
    "test_edited_logits_are_those_of_the_equations": (EDITS,),
    "test_scores_are_those_of_single_prompts": (SCORES,),
    "test_every_layer_sees_what_it_sees_of_a_sequence_alone": (PACKED,),
    "test_in_sixteen_bits_a_pruned_checkpoint_computes_what_was_measured": (ROUNDED,),
    "test_exports_load_with_transformers": (FORMS,),
    "test_edits_of_experts": (DEVICE,),
    "test_of_a_multimodal_checkpoint_the_text_model_is_pruned": (FORMS,),
}
"""Verbs of families by test."""

ROWS = {
    "test_fp8_blocks_that_do_not_divide_a_weight": "fp8",
    "test_mistral4_as_published": "fp8_matrix",
    "test_deepseek_v4_as_published": "fp8_mxfp4",
    "test_mxfp4_as_published": "mxfp4",
    "test_llama4_with_experts_one_by_one": "llama4 int4",
}
"""Formats of tests that are for one."""

_NODE = re.compile(r"(?P<file>[^:]+)::(?P<test>\w+)(\[(?P<row>[^\]]+)\])?")


class Collector:
    """Collects the outcomes of tests by format or family, and verb."""

    def __init__(self) -> None:
        self.formats: dict[str, dict[str, list[bool]]] = defaultdict(lambda: defaultdict(list))
        self.families: dict[str, dict[str, list[bool]]] = defaultdict(lambda: defaultdict(list))
        self.seen: set[str] = set()

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        match = _NODE.fullmatch(report.nodeid)
        if match is None or not (report.when == "call" or report.failed):
            return
        test, row = match["test"], match["row"]
        self.seen.add(test)
        gguf = "test_gguf" in match["file"] or (row or "").startswith("gguf ")
        if test in OF_FAMILIES and row is not None:
            family = next((part for part in row.split("-") if part not in KINDS), row)
            for verb in OF_FAMILIES[test]:
                self.families[family][verb].append(report.passed)
        elif row in FAMILY_TYPES and not gguf and FORMATS.get(test) == DISK:
            self.families[row][DISK].append(report.passed)
        elif test in FORMATS:
            name = "gguf" if gguf else ROWS.get(test, row or "gguf")
            self.formats[name][FORMATS[test]].append(report.passed)


KINDS = ("prune", "crossed", "mapped", "merged", "both", "mixed", "grouped", "unscaled")
"""Parts of the names of family tests that aren't the family."""


def print_table(title: str, found: dict[str, dict[str, list[bool]]], verbs: tuple[str, ...]) -> None:
    """Print rows by format or family as Markdown."""
    print(f"\n| {title} | {' | '.join(verbs)} |\n|---|{'---|' * len(verbs)}")
    for row in sorted(found):
        cells = [found[row].get(verb) for verb in verbs]
        print(f"| {row} | {' | '.join('' if not cell else 'yes' if all(cell) else 'NO' for cell in cells)} |")


def main() -> int:
    bench.arguments(__doc__).parse_args()
    collector = Collector()
    files = [
        *(
            CHECKPOINTS / name
            for name in ("test_unpacking.py", "test_gguf.py", "test_stored_experts.py", "test_nearest.py")
        ),
        *(EXPORTS / name for name in ("test_source.py", "test_gguf.py", "test_anew.py", "test_gguf_anew.py")),
        *(IN_FAMILIES / name for name in ("test_recent_families.py", "test_family_edits.py", "test_family_loading.py")),
        TESTS / "model" / "test_rows.py",
        TESTS / "test_on_gpu.py",
    ]
    wanted = " or ".join([*FORMATS, *OF_FAMILIES])
    code = pytest.main(["-q", "--no-header", "-m", "", "-k", wanted, *map(str, files)], plugins=[collector])
    print_table("format", collector.formats, (READ, DISK, SAME, PRUNED, SCALED, REQUANTISED))
    print_table("family", collector.families, (FACTS, EDITS, SCORES, PACKED, ROUNDED, FORMS, DISK, DEVICE))
    missing = (FORMATS.keys() | OF_FAMILIES.keys()) - collector.seen
    if missing:
        print(f"\nthere are no tests named {', '.join(sorted(missing))}")
    return int(code) or bool(missing)


if __name__ == "__main__":
    sys.exit(main())

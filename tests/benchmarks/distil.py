"""What training with gradients makes of as many parameters in the same time: an anchor for what is only fitted.

    python tests/benchmarks/distil.py [--seeds 0 1 2] [--times 1 2 4] [--rate 1e-3]

The text model is shrunk to a quarter of its expert neurons, by HOPE's choice of experts, unrepaired, and by the preset
`counts`. Both checkpoints are then distilled: AdamW on the Kullback-Leibler divergence from the full model's
predictions for every token that `counts` fits its repair to, with a cosine schedule over 1, 2 and 4 times the
processor time of the search `counts`, calibration and scores included; all of it in one thread. Perplexities on `test`
are geometric means over three domains and over seeds of training, on the rows of `configs/runs/text.yaml`; intervals
are over examples.
"""

from __future__ import annotations

import json
import math
import tempfile
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import bench
import numpy as np
import torch
from local_workers import local_pool
from torch.nn.functional import kl_div, log_softmax
from transformers import AutoModelForCausalLM, PreTrainedModel

import moevolve
from moevolve.evaluators.metrics import confidence_interval, geometric_mean
from moevolve.search.config.study import load_study
from moevolve.search.results.study import study_rows
from moevolve.search.running.candidates import find_candidate
from moevolve.search.running.observer import Observer
from moevolve.search.running.study import run_study
from moevolve.store.repository import Store
from moevolve.workers.contract.edits import Tokens
from moevolve.workers.methods.repair.edit import RepairedEdit

CONFIGS = bench.ROOT / "configs"
MODEL, TASKS = CONFIGS / "demo" / "text", [task["name"] for task in bench.DOMAINS["tasks"]]
STARTS: dict[str, dict[str, Any]] = {
    "HOPE": {"baseline": "hope"},
    "counts": {"preset": "counts", "genome.experts": None, "genome.neuron_share": 0.25},
}
"""Methods of the study whose winners are trained."""
RATES = {"HOPE": 1e-3, "counts": 5e-4}
BATCH = 8


def main() -> None:
    parser = bench.arguments(__doc__)
    parser.add_argument("--seeds", type=int, nargs="+", default=[0, 1, 2])
    parser.add_argument("--times", type=float, nargs="+", default=[1.0, 2.0, 4.0])
    parser.add_argument("--rate", type=float, help="of learning, for both; default: the best of each")
    options = parser.parse_args()
    torch.set_num_threads(1)
    with tempfile.TemporaryDirectory(prefix="moevolve-distil-") as name:
        folder = Path(name)
        sequences, seconds = starts(folder)
        tokens = sum(map(len, sequences))
        print(
            f"`counts` took {seconds:.0f} s of processor; {tokens:,} tokens in {len(sequences):,} sequences", flush=True
        )
        print("| start | trained for | perplexity |\n|---|---:|---:|", flush=True)
        print(f"| full model | - | {scored(folder, [])} |", flush=True)
        teacher = Teacher(sequences)
        for start in STARTS:
            print(f"| {start} | - | {scored(folder, [folder / start])} |", flush=True)
            for times in options.times:
                made = []
                for seed in options.seeds:
                    made.append(folder / f"{start}-{times:g}-{seed}")
                    rate = options.rate or RATES[start]
                    trained(folder / start, teacher, times * seconds, rate, seed).save_pretrained(made[-1])
                    for file in (folder / start).glob("tokenizer*"):
                        (made[-1] / file.name).write_bytes(file.read_bytes())
                print(f"| {start} | {times * seconds:.0f} s | {scored(folder, made)} |", flush=True)


def starts(folder: Path, methods: dict[str, dict[str, Any]] = STARTS) -> tuple[Sequence[Tokens], float]:
    """Write methods' checkpoints; the sequences that the last one was repaired on, and its processor time."""
    base = {"from": str(CONFIGS / "runs" / "domains.yaml"), "workers": {"count": 1, "num_cpus": 1}}
    seconds = 0.0
    for start, settings in methods.items():
        study = {"name": f"distil-{start}", "base": base, "methods": {start: settings}}
        (folder / "study.yaml").write_text(json.dumps(study))
        begun = time.process_time()
        with Store.open(store_of(folder)) as store:
            results = run_study(load_study(folder / "study.yaml"), store, lambda place, cell: Observer(), local_pool)
            seconds = time.process_time() - begun
            (winner,) = (row.refs[0] for row in study_rows(results, store) if row.method == start)
            edit = find_candidate(store, winner).edit
        moevolve.export(store_of(folder), winner, folder / start, form="stock", progress=False)
    assert isinstance(edit, RepairedEdit)
    return edit.rows.first(edit.settings.tokens), seconds


class Teacher:
    """Log-probabilities of the full model for sequences, computed when they are first asked for."""

    def __init__(self, sequences: Sequence[Tokens]) -> None:
        self.sequences = [torch.tensor(each) for each in sequences]
        self._model = AutoModelForCausalLM.from_pretrained(MODEL, dtype=torch.float32).eval()
        self._known: dict[int, torch.Tensor] = {}

    @torch.no_grad()
    def __call__(self, place: int) -> torch.Tensor:
        """[tokens, vocabulary]"""
        if place not in self._known:
            self._known[place] = log_softmax(self._model(self.sequences[place][None]).logits[0], -1)
        return self._known[place]


def trained(start: Path, teacher: Teacher, seconds: float, rate: float, seed: int) -> PreTrainedModel:
    """Distil a checkpoint for so many seconds of processor time."""
    model = AutoModelForCausalLM.from_pretrained(start, dtype=torch.float32).train()
    optimiser = torch.optim.AdamW(model.parameters(), lr=rate)
    order = np.random.default_rng(seed)
    places: Iterator[int] = iter(())
    begun = time.process_time()
    while (share := (time.process_time() - begun) / seconds) < 1:
        for group in optimiser.param_groups:
            group["lr"] = rate * (1 + math.cos(math.pi * share)) / 2
        for _ in range(BATCH):
            place = next(places, None)
            if place is None:
                places = iter(order.permutation(len(teacher.sequences)).tolist())
                place = next(places)
            found = log_softmax(model(teacher.sequences[place][None]).logits[0], -1)
            loss = kl_div(found, teacher(place), reduction="batchmean", log_target=True)
            (loss / BATCH).backward()
        optimiser.step()
        optimiser.zero_grad()
    return model


def scored(folder: Path, models: Sequence[Path], search: str = "distil-counts.counts.s0") -> str:
    """Perplexity over all domains, the geometric mean of models or of the full one, with an interval over examples."""
    # Beside a search's own model, tasks have the rows that the search has set.
    asked = ["full", *map(str, models)]
    found = moevolve.evaluate(store_of(folder), asked, tasks=TASKS, search=search, progress=False)
    scored = found.models[1:] or found.models
    logs = [
        np.mean([np.log(np.frombuffer(model.records[place].outcomes or b"", "<f4")) for model in scored], axis=0)
        for place in range(len(TASKS))
    ]
    values = np.exp(np.concatenate(logs))
    low, high = confidence_interval(values, metric=found.models[0].records[0].metric)
    return f"{1 / geometric_mean(values):.1f} ({1 / high:.1f} - {1 / low:.1f})"


def store_of(folder: Path) -> str:
    return f"sqlite:///{folder}/store.db"


if __name__ == "__main__":
    main()

"""Runs everything that needs a GPU on the GPU of this machine, in some minutes: `make gpu`.

    make gpu [PYTHON=python3] [OPTIONS="--only kernels shrink --seconds 300 --out FOLDER"]
    make gpu OPTIONS=--rehearse                           # on a CPU, with a second device and narrow models

- kernels: bench_kernels.py at the shapes of Mixtral-8x7B, Qwen3-30B-A3B, GPT-OSS-20B and Llama-2-7B.
- tests: the tests that are marked `gpu`.
- mixtral-8x7b, qwen3-30b-a3b, gpt-oss-20b: two layers of full width with random weights. Verbs of the lab of real size
  with their peak memory beside what `plan` says, and the rate of evaluations beside what the card could do.
- llama-3-8b: one layer; what the kinds for dense models start with.
- shrink: a whole search for half of the neurons of four layers of Qwen3-30B-A3B, whose experts stay on the disk, and
  the export of its winner: time by stage and layer, and peak memory.

Parts run one after the other in processes with a time limit each, so that one that fails leaves the others alone. After
every part OUT/gpu.json has all figures and failures, and OUT/gpu.md the table. The exit code is 1 if anything failed.
Neither Ray nor a network is needed.
"""

from __future__ import annotations

import argparse
import gc
import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import nullcontext
from dataclasses import asdict, dataclass, replace
from functools import partial
from pathlib import Path
from pydoc_data.topics import topics
from typing import Any

import bench

# Seconds that a part may take, by its name.
LIMITS = {
    "kernels": 45,
    "tests": 80,
    "mixtral-8x7b": 130,
    "gpt-oss-20b": 130,
    "qwen3-30b-a3b": 130,
    "llama-3-8b": 60,
    "shrink": 110,
}
# Settings of narrow models, for a rehearsal.
NARROW: dict[str, dict[str, Any]] = {
    "mixtral-8x7b": {"hidden_size": 384, "intermediate_size": 1344, "num_attention_heads": 4, "num_key_value_heads": 1},
    "qwen3-30b-a3b": {"hidden_size": 128, "moe_intermediate_size": 64, "num_attention_heads": 4},
    "gpt-oss-20b": {"hidden_size": 192, "intermediate_size": 192, "num_attention_heads": 4, "num_key_value_heads": 2},
    "shrink": {"hidden_size": 64, "moe_intermediate_size": 16, "num_attention_heads": 4, "num_experts": 16},
    "llama-3-8b": {"hidden_size": 256, "intermediate_size": 896, "num_attention_heads": 8, "num_key_value_heads": 2},
}
DECODED = 32
BATCH_TOKENS = (4096, 16384, 65536)


@dataclass(frozen=True)
class Figure:
    """One measurement.

    Attributes:
        part: Part that it belongs to.
        value, unit: Result; None if there is none.
        share: The result as a share of its yardstick.
        yardstick: What `share` compares with.
        note: What else there is to say, such as a failure.
    """

    part: str
    what: str
    value: float | None
    unit: str
    share: float | None = None
    yardstick: str = ""
    note: str = ""


@dataclass(frozen=True)
class Card:
    """What the device can do at most, as measured: bfloat16 operations per second in a large matrix product, and bytes
    that a copy reads and writes per second."""

    operations: float
    bytes: float

    @classmethod
    def measured(cls, size: int) -> Card:
        import torch

        a, b = (torch.randn(size, size, device="cuda", dtype=torch.bfloat16) for _ in range(2))
        source = torch.ones(size, size, 8, device="cuda")
        target = torch.empty_like(source)
        product, copy = seconds(lambda: a @ b, 9), seconds(lambda: target.copy_(source), 9)
        return cls(2 * size**3 / product, 2 * source.nbytes / copy)


def seconds(action: Callable[[], object], repeats: int = 3) -> float:
    """Median duration of an action on the device, after one run to warm up."""
    import torch

    times = []
    for _ in range(repeats + 1):
        torch.cuda.synchronize()
        started = time.perf_counter()
        action()
        torch.cuda.synchronize()
        times.append(time.perf_counter() - started)
    return statistics.median(times[1:])


# -- parts


def tests(part: str, options: argparse.Namespace) -> Iterator[Figure]:
    command = [sys.executable, "-m", "pytest", "-m", "gpu", "-q", "-rA", "-p", "no:cacheprovider", "tests/kernels"]
    command += ["tests/workers/test_on_gpu.py"]
    ended = subprocess.run(command, cwd=bench.ROOT, capture_output=True, text=True, check=False)
    print(ended.stdout[-20000:], ended.stderr[-4000:])
    passed, failed = ended.stdout.count("\nPASSED "), ended.stdout.count("\nFAILED ") + ended.stdout.count("\nERROR ")
    yield Figure(part, "passed", passed, "tests", note=ended.stdout.strip().splitlines()[-1])
    if failed or ended.returncode:
        raise RuntimeError(f"pytest ended with {ended.returncode}, {failed} tests failed")


def kernels(part: str, options: argparse.Namespace) -> Iterator[Figure]:
    import torch
    from bench_kernels import Bench, bench_experts, bench_ffn, bench_masks, bench_merge, bench_mix, bench_route

    timed = Bench("cpu" if options.rehearse else "cuda", 1, 1 if options.rehearse else 9)
    for measure in (bench_merge, bench_route, bench_experts, bench_ffn, bench_masks, bench_mix):
        before = len(timed.rows)
        with torch.inference_mode():
            measure(timed)
        for row in timed.rows[before:]:
            what, took = f"{row['what']}, {row['by']}", float(row["milliseconds"])
            yield Figure(part, what, took, "ms", float(row["limit"]), "copy or product of that size")


def published_model(part: str, options: argparse.Namespace) -> Iterator[Figure]:
    """The lab's verbs on one model, and for a mixture of experts the pace of evaluations."""
    import torch
    from real_size.checkpoint import write_checkpoint
    from real_size.published import SPECS
    from real_size.verbs import DENSE_VERBS, EXPERT_VERBS, EXPORT_VERBS, Session
    from second_device import second_device

    torch.set_num_threads(1)
    changes = NARROW[part] if options.rehearse else {}
    spec = replace(SPECS[part], layers=2 if SPECS[part].retained else 1, changes=changes)
    used: Any = second_device() if options.rehearse else nullcontext()
    with used, tempfile.TemporaryDirectory(prefix="moevolve-gpu-", dir=options.scratch) as scratch:
        started = time.perf_counter()
        model = write_checkpoint(spec, Path(scratch, "model"))
        task = write_texts(Path(scratch, "task"), *((4, 30) if options.rehearse else (128, 420)))
        yield Figure(part, "writing the checkpoint", time.perf_counter() - started, "s", note=spec.scaled)
        session = Session(spec, model, task, BATCH_TOKENS[0])
        yield from verbs(part, session, EXPERT_VERBS if spec.retained else DENSE_VERBS)
        if spec.retained:
            yield from pace(part, session, Card.measured(256 if options.rehearse else 8192))
            # `rows` freezes what it finds, so a model that is still loaded would stay.
            session.worker = None
            yield from verbs(part, session, EXPORT_VERBS)


def write_texts(directory: Path, rows: int, words: int) -> Path:
    """A task of the lab whose questions follow as many words of the reference text that comes with Python."""
    from real_size.verbs import write_task

    text = " ".join(topics.values()).split()
    starts = (row * words % (len(text) - words) for row in range(3 * rows))
    texts = [" ".join(text[start : start + words - row % 16]) for row, start in enumerate(starts)]
    return write_task(directory, texts, rows, max(4, rows // 8))


def verbs(part: str, session: Any, names: Sequence[str]) -> Iterator[Figure]:
    gc.collect()
    # It is kept, so that no verb's time includes it.
    session.estimate(session.config("merge" if session.spec.retained else "load"))
    for row in session.rows(tuple(names)):
        if row.failure is not None:
            yield Figure(part, row.verb, None, "s", note=f"failed: {row.failure}")
            continue
        yield Figure(part, row.verb, row.seconds, "s", note=row.note)
        share = row.peak / row.planned if row.planned else None
        yield Figure(part, f"{row.verb}, peak memory", row.peak / 1e9, "GB", share, "plan")


def pace(part: str, session: Any, card: Card) -> Iterator[Figure]:
    """Evaluations of the full model, and of candidates, beside plain forward passes and the card's limits."""
    import numpy as np

    from moevolve.evaluators.fitness.scoring import run_split, transcribe
    from moevolve.search.running.set_up import set_up
    from moevolve.workers.contract.edits import IdentityEdit
    from moevolve.workers.contract.messages import EvaluationRequest
    from moevolve.workers.engine.engine import GenerationEngine
    from moevolve.workers.families.decoder import decoder_layers

    yield Figure(part, "bf16 product of 8192", card.operations / 1e12, "TFLOP/s")
    yield Figure(part, "copy", card.bytes / 1e9, "GB/s")
    setup = set_up(session.config("full"), "gpu")
    (split,), facts, config = setup.prepared["search"], setup.facts, setup.config
    worker, resident = session.held(), session.held().resident
    # The last candidate's experts are still in the model.
    worker.evaluate(EvaluationRequest(IdentityEdit(), (split.ref,)), (split,))
    tokens = GenerationEngine(resident.model, resident.tokenizer, config.engine).tokens_of(split)
    read = sum(map(len, (*tokens.prompts, *tokens.golds)))
    stored = sum(each.numel() for layer in decoder_layers(resident.model) for each in layer.parameters())
    active = stored - len(facts.moe_layers) * (facts.experts - facts.active) * facts.expert_parameters
    floor = 2 * active * read / card.operations
    limit = f"2 x {active / 1e6:.0f} M active parameters of the layers"
    for size in BATCH_TOKENS:
        engine = GenerationEngine(resident.model, resident.tokenizer, replace(config.engine, batch_tokens=size))
        taken = seconds(partial(run_split, engine, split))
        what = f"evaluation of {read} tokens, {size} at once"
        yield Figure(part, what, read / taken, "tokens/s", floor / taken, limit)

    plain = seconds(plain_passes(resident, tokens, BATCH_TOKENS[0]))
    yield Figure(part, "plain transformers, 4096 at once", read / plain, "tokens/s", floor / plain, limit)

    for verb in ("full", "prune", "merge", "repair"):
        setup = session.setup(verb)
        times = []
        for seed in range(3):
            rng, phase = np.random.default_rng(seed), setup.config.phases[0]
            genome = setup.space.sample(rng, phase).genome
            if verb == "merge":
                genome = setup.space.breed(rng, setup.config.phases[1], (genome,)).genome
            edit = IdentityEdit() if verb == "full" else genome.express()
            reply = worker.evaluate(EvaluationRequest(edit, (split.ref,)), (split,))
            if reply.failure is not None:
                raise RuntimeError(f"{verb}: {reply.failure}")
            times.append(reply.seconds)
        # CUDA loads kernels when a shape first needs them, which takes up to half a second.
        yield Figure(part, f"evaluation: {verb}", min(times), "s", min(times) / plain, "plain forward passes")

    rows, read = split.head(64), sum(each.nbytes for each in resident.model.parameters())
    for size in (BATCH_TOKENS[0], BATCH_TOKENS[-1]):
        engine = GenerationEngine(resident.model, resident.tokenizer, replace(config.engine, batch_tokens=size))
        prompts, answers = (
            seconds(partial(transcribe, engine, replace(rows, max_new_tokens=count, task=f"{count}")), 1)
            for count in (1, 1 + DECODED)
        )
        taken = answers - prompts
        what = f"decoding {len(rows.examples)} rows, {size} at once"
        rate, share = len(rows.examples) * DECODED / taken, DECODED * read / card.bytes / taken
        yield Figure(part, what, rate, "tokens/s", share, "all weights per step")


def plain_passes(resident: Any, tokens: Any, batch_tokens: int) -> Callable[[], None]:
    """A function that runs all prompts with their answers through plain `transformers` with the model's weights."""
    import torch

    from moevolve.workers.checkpoints.state import empty_model, restore_buffers

    loaded = empty_model(type(resident.model), resident.model.config, torch.bfloat16)
    # Routers are wrapped there.
    state = {name.replace(".inner.", "."): tensor for name, tensor in resident.model.state_dict().items()}
    loaded.load_state_dict(state, assign=True)
    restore_buffers(loaded, resident.device)
    texts = sorted(((*prompt, *answer) for prompt, answer in zip(tokens.prompts, tokens.golds, strict=True)), key=len)
    batches: list[list[tuple[int, ...]]] = [[]]
    for text in texts:
        if (len(batches[-1]) + 1) * len(text) > batch_tokens:
            batches.append([])
        batches[-1].append(text)

    @torch.inference_mode()
    def run() -> None:
        for batch in filter(None, batches):
            width = len(batch[-1])
            ids = torch.tensor([[0] * (width - len(text)) + list(text) for text in batch]).to("cuda")
            mask = torch.tensor([[0] * (width - len(text)) + [1] * len(text) for text in batch]).to("cuda")
            loaded(input_ids=ids, attention_mask=mask, use_cache=False, logits_to_keep=4)

    return run


def shrink(part: str, options: argparse.Namespace) -> Iterator[Figure]:
    """A whole search with one layer at a time, and the export of its winner, stage by stage."""
    import torch
    from real_size.checkpoint import write_checkpoint
    from real_size.published import SPECS
    from real_size.whole import shrink as searched
    from second_device import second_device

    torch.set_num_threads(1)
    layers = 2 if options.rehearse else 4
    spec = replace(SPECS["qwen3-30b-a3b"], layers=layers, changes=NARROW[part] if options.rehearse else {})
    used: Any = second_device() if options.rehearse else nullcontext()
    with used, tempfile.TemporaryDirectory(prefix="moevolve-gpu-", dir=options.scratch) as scratch:
        model = write_checkpoint(spec, Path(scratch, "model"))
        task = write_texts(Path(scratch, "task"), *((16, 30) if options.rehearse else (256, 420)))
        for each in searched(model, task, Path(scratch), BATCH_TOKENS[1]):
            yield Figure(part, each.title, sum(each.seconds.values()), "s", note=f"{spec.scaled}; {each.note}")
            for stage, taken in each.seconds.items():
                yield Figure(part, f"{each.title}, {stage} per layer", taken / layers, "s")
            yield Figure(part, f"{each.title}, peak memory", each.peak / 1e9, "GB", each.peak / each.planned, "plan")


PARTS: dict[str, Callable[[str, argparse.Namespace], Iterator[Figure]]] = {
    **dict.fromkeys(LIMITS, published_model),
    "tests": tests,
    "kernels": kernels,
    "shrink": shrink,
}


# -- running them


def main() -> None:
    parser = bench.arguments(__doc__)
    parser.add_argument("--only", nargs="+", choices=LIMITS, default=list(LIMITS))
    parser.add_argument("--rehearse", action="store_true", help="run narrow models on the CPU")
    parser.add_argument(
        "--seconds",
        type=float,
        default=480,
        help="time limit of all parts together; a rehearsal has four times as much",
    )
    parser.add_argument("--out", type=Path, default=Path(".gpu"), help="folder for gpu.json, gpu.md and the logs")
    parser.add_argument("--scratch", type=Path, default=Path(tempfile.gettempdir()), help="has room for 7 GB")
    parser.add_argument("--part", choices=LIMITS, help=argparse.SUPPRESS)
    options = parser.parse_args()
    options.out.mkdir(parents=True, exist_ok=True)
    if options.part:
        run_part(options)
        return
    sys.exit(run_all(options))


def run_all(options: argparse.Namespace) -> int:
    """Run the parts in processes of their own, and write all results after each; returns the exit code."""
    found: dict[str, Any] = {"machine": machine(), "figures": [], "failures": {}, "seconds": {}}
    print(found["machine"], flush=True)
    slower = 4 if options.rehearse else 1
    ends = time.monotonic() + slower * options.seconds
    for part in options.only:
        started = time.monotonic()
        failure, figures = run_process(part, min(slower * LIMITS[part], ends - started), options)
        if failure is None and any(each["value"] is None for each in figures):
            failure = "see the notes"
        if failure is not None:
            found["failures"][part] = failure
        found["figures"] += figures
        found["seconds"][part] = time.monotonic() - started
        (options.out / "gpu.json").write_text(json.dumps(found, indent=1))
        (options.out / "gpu.md").write_text(table(found))
        print("\n".join(line(Figure(**each)) for each in figures))
        print(f"{part}: {found['seconds'][part]:.0f} s {failure or ''}", flush=True)
    return 1 if found["failures"] else 0


def run_process(part: str, limit: float, options: argparse.Namespace) -> tuple[str | None, list[dict[str, Any]]]:
    """Run a part for so many seconds at most; returns why it failed, with the end of its log, and its figures."""
    if limit < 5:
        return "no time was left", []
    log, figures = options.out / f"{part}.log", options.out / f"{part}.jsonl"
    figures.unlink(missing_ok=True)
    command = [sys.executable, "-u", __file__, "--part", part, *["--rehearse"] * options.rehearse]
    command += ["--out", str(options.out), "--scratch", str(options.scratch)]
    environment = os.environ | {"HF_HUB_OFFLINE": "1", "TOKENIZERS_PARALLELISM": "false"}
    with log.open("w") as file:
        try:
            subprocess.run(command, timeout=limit, stdout=file, stderr=file, env=environment, check=True)
            failure = None
        except (subprocess.TimeoutExpired, subprocess.CalledProcessError) as error:
            failure = f"{type(error).__name__} after {limit:.0f} s at most\n"
    made = [json.loads(each) for each in figures.read_text().splitlines()] if figures.exists() else []
    figures.unlink(missing_ok=True)
    return failure and failure + log.read_text(errors="replace")[-3000:], made


def machine() -> str:
    import torch
    import transformers

    name = torch.cuda.get_device_name() if torch.cuda.is_available() else "CPU"
    versions = f"torch {torch.__version__}, transformers {transformers.__version__}"
    return f"{name}, {versions}, Python {sys.version.split()[0]}"


def run_part(options: argparse.Namespace) -> None:
    """In the process of a part: write every figure as it comes."""
    with (options.out / f"{options.part}.jsonl").open("a") as file:
        for figure in PARTS[options.part](options.part, options):
            file.write(json.dumps(asdict(figure)) + "\n")
            file.flush()


def table(found: dict[str, Any]) -> str:
    """All figures, in Markdown."""
    head = f"{found['machine']}\n\n| part | what | | share | of |\n|---|---|---:|---:|---|\n"
    failed = "".join(f"\n{part} failed: {text.splitlines()[0]}\n" for part, text in found["failures"].items())
    return head + "\n".join(line(Figure(**each)) for each in found["figures"]) + "\n" + failed


def line(figure: Figure) -> str:
    value = "failed" if figure.value is None else f"{figure.value:,.4g} {figure.unit}"
    share = "" if figure.share is None else f"{figure.share:.2f}"
    said = figure.yardstick or figure.note[:200]
    return f"| {figure.part} | {figure.what} | {value} | {share} | {said} |"


if __name__ == "__main__":
    main()

"""How much longer do our commands take than a plain script for REAP, and do they write the same bytes?

    python tests/benchmarks/bench_peers.py --layers 2 --tokens 16384 [--experts 32]

It writes a checkpoint of OLMoE-1B-7B's published shape with random weights and runs `reap_peer.py` on it. Then it runs
what a user runs for the same choice on the same tokens, with the experts on the disk: `moevolve launch` with REAP as
the only candidate, and `moevolve export`, first as it is and then with a repair on as many tokens. The tensors of the
peer's checkpoint and of ours without a repair are compared by name, byte for byte.

Ratios are of wall time from the first process's start to the last one's end. So what Python's imports take, Ray's
start, the scores of the full model and the candidate on one window of text, and reading back the export count for us.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from pydoc_data.topics import topics

import bench
import torch
from real_size.checkpoint import write_checkpoint
from real_size.published import Spec
from real_size.watch import Watch
from reap_peer import Files

from moevolve.search.interface.opening import opened_reader
from moevolve.workers.contract.edits import Calibration

COMMAND, PEER = Path(sys.executable).with_name("moevolve"), Path(__file__).with_name("reap_peer.py")
WINDOW = 2048
TASK = {
    "description": "Python's language reference in windows",
    "source": {"files": {"calibration": "calibration.jsonl", "search": "search.jsonl"}},
    "splits": {"calibration": {"from": "calibration"}, "search": {"from": "search"}},
    "prompt": "{{ text }}",
    "fitness": "perplexity",
    "window": WINDOW,
}
# Stages of a launch, by what it prints when one begins; the first begins with the command.
STAGES = {"starting workers": "Ray and a worker start", "calibrating": "calibration", "evaluating": "scores"}


@dataclass(frozen=True)
class Ran:
    """A command that has ended.

    Attributes:
        seconds: Wall time.
        computed: Seconds of processor cores, of all its processes.
        peak: Largest sum of their anonymous memory, in bytes.
        lines: What it printed, each line with the seconds since the start.
    """

    seconds: float
    computed: float
    peak: int
    lines: tuple[tuple[float, str], ...]

    @classmethod
    def of(cls, *command: object) -> Ran:
        """Run a command to its end; SystemExit with what it printed if it fails."""
        started = time.perf_counter()
        arguments = [str(each) for each in command]
        with subprocess.Popen(arguments, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True) as process:
            watch = Watch(process.pid)
            assert process.stdout is not None
            lines = tuple((time.perf_counter() - started, line.rstrip()) for line in process.stdout)
        if process.returncode:
            sys.exit("\n".join(("failed:", " ".join(arguments), *(line for _, line in lines))))
        return cls(time.perf_counter() - started, watch.computed, watch.peak, lines)


def main() -> None:
    parser = bench.arguments(__doc__)
    parser.add_argument("--layers", type=int, default=2, help="of the published 16")
    parser.add_argument("--tokens", type=int, default=16_384, help=f"to observe, in windows of {WINDOW}")
    parser.add_argument("--experts", type=int, default=32, help="how many of 64 every layer keeps")
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--scratch", type=Path, help="has room for the checkpoint, and for half of it three times")
    options = parser.parse_args()
    with tempfile.TemporaryDirectory(prefix="moevolve-peers-", dir=options.scratch) as name:
        compare(Path(name), options)


def compare(folder: Path, options: argparse.Namespace) -> None:
    """Run the peer and our commands, and print what they took."""
    model = write_checkpoint(Spec("olmoe-1b-7b", options.layers), folder / "model")
    write_data(folder, options.tokens)
    asked = ("--experts", options.experts, "--tokens", options.tokens, "--threads", options.threads)
    peer = Ran.of(sys.executable, PEER, model, folder / "calibration.jsonl", folder / "peer", *asked)
    print_row("peer", [peer], peer, f"in its stages: {peer.lines[-1][1]}")
    imports = Ran.of(sys.executable, "-c", "import moevolve.workers.worker, moevolve.search.pools.ray_pool")
    print(f"  imports of one of our three processes, in these figures: {imports.seconds:.1f} s", flush=True)
    for label, repair in (("ours", None), ("ours, repaired", {"tokens": options.tokens})):
        ran = ours(folder, label.replace(", ", "-"), repair, options)
        print_row(label, ran, peer, stages(ran, folder / f"{label.replace(', ', '-')}.db"))
        if repair is None:
            print(f"  {differing(folder / 'peer', folder / label)}", flush=True)


def write_data(folder: Path, tokens: int) -> None:
    """Write the task: running text of as many tokens to calibrate on, and of one window to score."""
    text = "\n\n".join(topics.values())
    pieces = {"calibration": text[: 5 * (tokens + WINDOW)], "search": text[-8 * WINDOW :]}
    for name, piece in pieces.items():
        (folder / f"{name}.jsonl").write_text(json.dumps({"text": piece}) + "\n", encoding="utf-8")
    (folder / "task.yaml").write_text(json.dumps(TASK))


def ours(folder: Path, name: str, repair: dict[str, int] | None, options: argparse.Namespace) -> list[Ran]:
    """Run a launch and an export, as a user would."""
    phase = {"kind": "prune", "evaluations": 1, "initial": 1, "init": ["reap"]}
    tokens = {"calibration_tokens": options.tokens, "calibration_most": options.tokens}
    run = {
        "name": name,
        "model": {"path": str(folder / "model"), "expert_offload": "disk"},
        "tasks": [str(folder / "task.yaml")],
        "genome": {"experts": options.experts, "groups": "per_layer"} | tokens,
        "phases": [phase if repair is None else phase | {"repair": repair}],
        "workers": {"count": 1, "num_cpus": options.threads},
        "engine": {"threads": options.threads},
        "final": {"rerank": 0, "test": False, "random_baselines": 0},
    }
    file, store = folder / f"{name}.yaml", ("--store", f"sqlite:///{folder}/{name}.db")
    file.write_text(json.dumps(run))
    return [
        Ran.of(COMMAND, "launch", file, *store),
        Ran.of(COMMAND, "export", f"{name}:0", folder / name, *store),
    ]


def stages(ran: Sequence[Ran], store: Path) -> str:
    """What a launch and an export took, stage by stage."""
    launch, export = ran
    began = {"imports and checks": 0.0}
    for since, line in launch.lines:
        began |= {title: since for stage, title in STAGES.items() if line.endswith(f": {stage}")}
        if line.endswith("final scores"):
            began["end"] = since
    ends = [*list(began.values())[1:], launch.seconds]
    taken = {title: end - start for (title, start), end in zip(began.items(), ends, strict=True)}
    # The first worker starts while it is asked to calibrate.
    with opened_reader(f"sqlite:///{store}") as opened:
        (measured,) = (
            Calibration.from_bytes(opened.calibration(each) or b"").seconds for each in opened.calibrations()
        )
    taken["Ray and a worker start"] += taken["calibration"] - measured
    taken["calibration"] = measured
    taken["export"] = export.seconds
    return ", ".join(f"{title} {seconds:.1f} s" for title, seconds in taken.items())


def print_row(label: str, ran: Sequence[Ran], peer: Ran, said: str) -> None:
    seconds, computed = sum(each.seconds for each in ran), sum(each.computed for each in ran)
    print(
        f"{label}: {seconds:.0f} s ({seconds / peer.seconds:.2f} of the peer's), {computed:.0f} s of cores "
        f"({computed / peer.computed:.2f}), peak {max(each.peak for each in ran) / 1e9:.1f} GB; {said}",
        flush=True,
    )


def differing(one: Path, two: Path) -> str:
    """Say which tensors of two checkpoints aren't the same bytes."""
    first, second = Files(one).under(""), Files(two).under("")
    if first.keys() != second.keys():
        return f"tensors of other names: {sorted(first.keys() ^ second.keys())[:4]}"
    other = [name for name in first if not torch.equal(first[name].view(torch.uint8), second[name].view(torch.uint8))]
    return f"{len(first) - len(other)} of {len(first)} tensors are the same bytes" + (
        f"; not {other[0]}" if other else ""
    )


if __name__ == "__main__":
    main()

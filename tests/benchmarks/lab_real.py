"""Shrinks a whole model of published shape that is larger than the memory it may take. Not a test: run it by hand.

    make lab-real OPTIONS="--model olmoe-1b-7b --tokens 20000 -- --neurons 50%"

It writes a checkpoint of the published config with all layers and random weights (OLMoE-1B-7B: 13.8 GB; GPT-OSS-20B in
MXFP4: 13 GB), and a file of texts from the manual that Python installs. Then it runs `moevolve shrink` with the options
behind `--`, as a user would, with workers limited by `MOEVOLVE_DEVICE_GB`. Printed are the time of every stage, the
largest anonymous memory of all its processes together and of one of them (pages of mapped files, such as weights that
aren't converted, go where memory is short) beside that of a worker by `plan`, bytes read from the disk, how long
candidates took beside the full model, and the size of the new checkpoint. Checkpoints and the store are deleted at the
end without `--keep`.
"""

from __future__ import annotations

import argparse
import json
import os
import shutil
import subprocess
import sys
import time
from pathlib import Path
from pydoc_data.topics import topics

import bench
from real_size.checkpoint import write_checkpoint
from real_size.published import SPECS, Spec
from real_size.watch import Watch

from moevolve.search.interface.opening import opened_reader
from moevolve.store.records import FULL_MODEL

COMMAND = Path(sys.executable).with_name("moevolve")


def shares(store: str, winner: str) -> list[float]:
    """How long every candidate took on `search`, as shares of the full model's time there; the smallest first."""
    with opened_reader(store) as reader:
        search = reader.individual(winner).search
        rows = [reader.individual(f"{search.name}:{row.index}") for row in reader.history(search.id)]
        scored = [each for row in rows for each in row.evaluations if each.split == "search"]
        tasks = [each.task_fingerprint for each in scored]
        (full,) = reader.evaluations(FULL_MODEL, search.model_fingerprint, search.engine_fingerprint, tasks)
    return sorted(each.seconds / full.seconds for each in scored)


def main() -> None:
    parser = bench.arguments(__doc__)
    parser.add_argument("--model", default="olmoe-1b-7b", choices=("olmoe-1b-7b", "gpt-oss-20b"))
    parser.add_argument("--layers", type=int, help="of the published ones; all by default")
    parser.add_argument("--tokens", type=int, default=20_000, help="roughly, in all splits")
    parser.add_argument("--memory-gb", type=float, default=8.0)
    parser.add_argument("--folder", type=Path, default=Path(".lab"))
    parser.add_argument("--keep", action="store_true", help="leave the checkpoints and the store where they are")
    parser.add_argument("shrink", nargs="*", default=["--neurons", "50%"])
    options = parser.parse_args()
    published = SPECS[options.model].published
    spec = Spec(options.model, options.layers or int(published["num_hidden_layers"]))
    model = options.folder / f"{options.model}-{options.layers or 'whole'}"
    folder = options.folder / f"{options.model}-shrunk"
    remove(folder)
    try:
        if not (model / "model.safetensors.index.json").is_file():
            write_checkpoint(spec, model)
        shrink(model, folder, options)
    finally:
        if not options.keep:
            shutil.rmtree(model)
            remove(folder)


def remove(folder: Path) -> None:
    """Delete what a shrink to a folder makes, if it is there."""
    for made in (folder, folder.with_suffix(".shrink")):
        shutil.rmtree(made, ignore_errors=True)
    for file in folder.parent.glob(f"{folder.name}.db*"):
        file.unlink()


def shrink(model: Path, folder: Path, options: argparse.Namespace) -> None:
    """Run the command, and print what it took; SystemExit if it fails."""
    size = sum(file.stat().st_size for file in model.glob("*.safetensors"))
    data, store = options.folder / "manual.txt", f"sqlite:///{folder}.db"
    # About four characters to a token.
    data.write_text("\n\n".join(topics.values())[: 4 * options.tokens], encoding="utf-8")
    asked = [str(COMMAND), "shrink", str(model), "--data", str(data), *options.shrink, "-o", str(folder), "--force"]
    asked += ["--store", store, "--json"]
    environment = os.environ | {"MOEVOLVE_DEVICE_GB": str(options.memory_gb)}
    print(
        f"{model.name}: {size / 1e9:.1f} GB of weights, {options.memory_gb:g} GB of memory; {' '.join(asked)}",
        flush=True,
    )
    begun = time.monotonic()
    with subprocess.Popen(asked, env=environment, stdout=subprocess.PIPE, text=True) as process:
        watch = Watch(process.pid)
        printed = process.communicate()[0]
    print(
        f"  {time.monotonic() - begun:.0f} s, {watch.computed:.0f} s of cores, {watch.read / 1e9:.1f} GB read; peak "
        f"{watch.peak / 1e9:.2f} GB in all processes, {watch.largest / 1e9:.2f} GB in one"
    )
    run_file = folder.with_suffix(".shrink") / "run.yaml"
    if run_file.is_file():
        plan = subprocess.run(
            [str(COMMAND), "plan", str(run_file), "--json"], capture_output=True, text=True, check=False
        )
        memory = json.loads(plan.stdout)["memory"] if plan.returncode == 0 else {}
        for place, each in memory.items():
            mapped = next(item["device"] for item in each["items"] if item["title"] == "weights outside of experts")
            print(
                f"  with experts on {place} a worker requires {(each['device'] + each['host']) / 1e9:.2f} GB by plan; "
                f"weights mapped from the checkpoint take {mapped / 1e9:.2f} GB of it"
            )
    if process.returncode:
        sys.exit(f"  the command failed with code {process.returncode}")
    record = json.loads(printed)["record"]
    print("  " + ", ".join(f"{stage} {seconds:.0f} s" for stage, seconds in record["seconds"].items()))
    took = shares(store, record["checks"]["winner"])
    print(f"  a candidate took {took[0]:.2f} to {took[-1]:.2f} of the full model's time on `search`")
    print(f"  wrote {record['written']['weight_bytes'] / 1e9:.1f} GB ({record['written']['form']})")


if __name__ == "__main__":
    main()

"""Shrinks a whole model of published shape that is larger than the memory it may take. Not a test: run it by hand.

    make lab-real OPTIONS="--model olmoe-1b-7b --tokens 20000 -- --neurons 50%"

It writes a checkpoint of the published config with all layers and random weights (OLMoE-1B-7B: 13.8 GB; GPT-OSS-20B in
MXFP4: 13 GB), and a file of texts from the manual that Python installs. Then it runs `moevolve shrink` with the options
behind `--`, as a user would, with workers limited by `MOEVOLVE_DEVICE_GB`. Printed are the time of every stage, the
largest anonymous memory of all its processes together (pages of mapped files go where memory is short) beside that of a
worker by `plan`, bytes read from the disk, and the size of the new checkpoint.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import threading
import time
from pathlib import Path
from pydoc_data.topics import topics

import bench
from real_size.checkpoint import write_checkpoint
from real_size.published import SPECS, Spec

COMMAND = Path(sys.executable).with_name("moevolve")


class Watch:
    """The memory and reading of a process and its descendants.

    Attributes:
        peak: Largest sum of their anonymous memory so far, in bytes.
    """

    def __init__(self, pid: int) -> None:
        self._pid, self.peak = pid, 0
        self._read: dict[int, int] = {}
        threading.Thread(target=self._look, daemon=True).start()

    @property
    def read(self) -> int:
        """Bytes that they have read from the disk."""
        return sum(self._read.values())

    def _look(self) -> None:
        while Path(f"/proc/{self._pid}").exists():
            held = 0
            for process in self._family():
                try:
                    status = Path(f"/proc/{process}/status").read_text()
                    io = Path(f"/proc/{process}/io").read_text()
                except OSError:  # it has ended
                    continue
                held += sum(int(line.split()[1]) << 10 for line in status.splitlines() if line.startswith("RssAnon"))
                self._read[process] = int(io.split("\nread_bytes:")[1].split()[0])
            self.peak = max(self.peak, held)
            time.sleep(0.2)

    def _family(self) -> list[int]:
        # Ray's processes have parents of their own; all of the command's carry its session or are its descendants.
        found = subprocess.run(["ps", "-eo", "pid,sid,args"], capture_output=True, text=True, check=True).stdout
        rows = [line.split(None, 2) for line in found.splitlines()[1:]]
        return [int(pid) for pid, sid, args in rows if int(sid) == self._pid or args.startswith("ray::")]


def main() -> None:
    parser = bench.arguments(__doc__)
    parser.add_argument("--model", default="olmoe-1b-7b", choices=("olmoe-1b-7b", "gpt-oss-20b"))
    parser.add_argument("--tokens", type=int, default=20_000, help="roughly, in all splits")
    parser.add_argument("--memory-gb", type=float, default=8.0)
    parser.add_argument("--folder", type=Path, default=Path(".lab"))
    parser.add_argument("shrink", nargs="*", default=["--neurons", "50%"])
    options = parser.parse_args()
    published = SPECS[options.model].published
    spec = Spec(options.model, int(published["num_hidden_layers"]))
    model, folder = options.folder / f"{options.model}-whole", options.folder / f"{options.model}-shrunk"
    if not (model / "model.safetensors.index.json").is_file():
        write_checkpoint(spec, model)
    size = sum(file.stat().st_size for file in model.glob("*.safetensors"))
    data = options.folder / "manual.txt"
    # About four characters to a token.
    data.write_text("\n\n".join(topics.values())[: 4 * options.tokens], encoding="utf-8")
    asked = [str(COMMAND), "shrink", str(model), "--data", str(data), *options.shrink, "-o", str(folder), "--force"]
    asked += ["--store", f"sqlite:///{folder}.db", "--json"]
    environment = os.environ | {"MOEVOLVE_DEVICE_GB": str(options.memory_gb)}
    print(
        f"{options.model}: {size / 1e9:.1f} GB of weights, {options.memory_gb:g} GB of memory; {' '.join(asked)}",
        flush=True,
    )
    begun = time.monotonic()
    with subprocess.Popen(asked, env=environment, stdout=subprocess.PIPE, text=True, start_new_session=True) as process:
        watch = Watch(process.pid)
        printed = process.communicate()[0]
    taken = time.monotonic() - begun
    print(f"  {taken:.0f} s, peak {watch.peak / 1e9:.2f} GB in all processes, {watch.read / 1e9:.1f} GB read")
    run_file = folder.with_suffix(".shrink") / "run.yaml"
    if run_file.is_file():
        plan = subprocess.run(
            [str(COMMAND), "plan", str(run_file), "--json"], capture_output=True, text=True, check=False
        )
        memory = json.loads(plan.stdout)["memory"] if plan.returncode == 0 else {}
        for place, each in memory.items():
            print(f"  plan of a worker, experts on {place}: {(each['device'] + each['host']) / 1e9:.2f} GB")
    if process.returncode:
        sys.exit(f"  the command failed with code {process.returncode}")
    record = json.loads(printed)["record"]
    print("  " + ", ".join(f"{stage} {seconds:.0f} s" for stage, seconds in record["seconds"].items()))
    print(f"  wrote {record['written']['weight_bytes'] / 1e9:.1f} GB ({record['written']['form']})")


if __name__ == "__main__":
    main()

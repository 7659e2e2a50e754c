"""What a server loads to answer: never torch or transformers, whatever it is asked."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from waiting import PATIENT_S

from moevolve.store.repository import Store

PROGRAM = """
import json, os, signal, sys, threading
from pathlib import Path
from starlette.testclient import TestClient
from moevolve.search.server.app import make_routes
from moevolve.search.server.settings import ServerSettings
from moevolve.store.repository import Store

def megabytes():
    status = Path("/proc/self/status").read_text()
    return int(status.split("VmRSS:")[1].split()[0]) // 1024

url, runs = sys.argv[1:]
here = {"search": "lab", "ref": "lab:40", "individual": "lab:40", "task": "one"}
answers = {}
with Store.open(url) as store:
    app = make_routes(store, ServerSettings(store=url, configurations=(runs,)))
    client = TestClient(app, "http://localhost", headers={"accept": "text/html", "x-moevolve": "1"})
    paths = [path for path, methods in app.openapi()["paths"].items() if "get" in methods]
    paths += ["/", "/searches/{search}", "/individuals/{ref}", "/individuals/{ref}/lineage", "/best"]
    paths += ["/individuals/{ref}/genome", "/individuals/{ref}/genome.svg", "/launch?configuration=small", "/metrics"]
    paths += ["/searches/{search}/standings", "/searches/{search}/checkpoint", "/shrink"]
    for path in paths:
        if path != "/api/news" and "{name}" not in path:  # the former has no end, and there is no shrink
            path += {"/api/pareto": "?task=one", "/api/compare": "?searches=lab"}.get(path, "")
            answers[path] = client.get(path.format(**here)).status_code
    before = megabytes()
    check = client.post("/api/searches/check", json={"configuration": "small"})
    grown = megabytes() - before
    wrong = client.post("/api/searches/check", json={"configuration": "small", "overrides": {"genome.experts": 99}})
    children = [pid for each in Path("/proc/self/task").glob("*/children") for pid in each.read_text().split()]
    for pid in children:  # one that had ended before the request would be started anew
        os.kill(int(pid), signal.SIGSTOP)
        threading.Timer(0.5, os.kill, (int(pid), signal.SIGKILL)).start()
    lost = client.post("/api/searches/check", json={"configuration": "small"})
print(json.dumps({
    "answers": answers,
    "loaded": [name for name in ("torch", "transformers", "tokenizers", "scipy.stats") if name in sys.modules],
    "check": check.json(),
    "grown": grown,
    "children": len(children),
    "refused": [wrong.json()["detail"], lost.json()["detail"]],
}))
"""


@pytest.mark.slow
def test_no_request_loads_a_model_stack(lab_store: Store, tiny: Any, tmp_path: Path) -> None:
    """Genomes are read with the facts stored at the launch, from a store whose model is nowhere."""
    tiny.write_run(tmp_path / "small.yaml", "calm")
    command = [sys.executable, "-c", PROGRAM, lab_store.url, str(tmp_path)]
    done = subprocess.run(command, capture_output=True, text=True, check=True, timeout=PATIENT_S)
    found = json.loads(done.stdout)
    assert set(found["answers"].values()) == {200}, found["answers"]
    assert len(found["answers"]) > 30 and found["loaded"] == []
    assert found["check"]["takes"]["memory"]["device"]["device"] > 0
    assert found["grown"] < 20, "in a process of its own"
    wrong, lost = found["refused"]
    assert found["children"] == 1 and "99 is more than the model's 4 experts" in wrong and "process was killed" in lost

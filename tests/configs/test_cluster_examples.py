"""Starting points for clusters: YAML that parses, commands that exist, a run that is one."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import typer.main
import yaml

from moevolve.search.cli.app import app
from moevolve.search.config.files import load_run_config

FOLDER = Path(__file__).parents[2] / "configs" / "cluster"


def parsed(name: str) -> list[dict[str, Any]]:
    return list(yaml.safe_load_all((FOLDER / name).read_text(encoding="utf-8")))


def commands(text: str) -> list[list[str]]:
    """What follows `moevolve` in commands, those in comments too."""
    joined = re.sub(r"\\\n#?", " ", text)
    found = re.findall(r"(?<![\w\"'/-])moevolve ([a-z][a-z-]*\b.*)", joined)
    return [line.split() for line in found]


def test_commands_and_options_exist() -> None:
    group: Any = typer.main.get_command(app)
    for file in FOLDER.glob("*.yaml"):
        found = commands(file.read_text(encoding="utf-8"))
        assert found, file
        for name, *words in found:
            options = {option for parameter in group.commands[name].params for option in parameter.opts}
            assert {word for word in words if word.startswith("--")} <= options, f"{name} {words}"


def test_containers_belong_together() -> None:
    (compose,) = parsed("compose.yaml")
    services = compose["services"]
    assert services.keys() == {"postgres", "head", "worker", "server"}
    assert all(set(each.get("depends_on", ())) <= services.keys() for each in services.values())
    published = [port for each in services.values() for port in each.get("ports", ())]
    assert published and all(port.startswith("127.0.0.1:") for port in published)
    for name in ("head", "worker", "server"):
        assert services[name]["environment"]["RAY_AUTH_MODE"] == "token" and services[name]["image"]
    assert "@postgres/" in services["server"]["environment"]["MOEVOLVE_STORE"]


def test_the_job_runs_what_stands_beside_it(tmp_path: Path) -> None:
    settings, job = parsed("rayjob.yaml")
    assert (settings["kind"], job["kind"]) == ("ConfigMap", "RayJob")
    (name,) = settings["data"]
    (tmp_path / name).write_text(settings["data"][name], encoding="utf-8")
    config = load_run_config(tmp_path / name)
    assert "--or-resume" in job["spec"]["entrypoint"], "a search that was stopped would be begun again"
    assert config.workers.count == "auto" and f"/runs/{name}" in job["spec"]["entrypoint"]
    cluster = job["spec"]["rayClusterSpec"]
    (group,) = cluster["workerGroupSpecs"]
    groups = [cluster["headGroupSpec"], group]
    for spec in (each["template"]["spec"] for each in groups):
        volumes = {volume["name"] for volume in spec["volumes"]}
        for container in spec["containers"]:
            assert {mount["name"] for mount in container["volumeMounts"]} <= volumes
    limits = group["template"]["spec"]["containers"][0]["resources"]["limits"]
    assert (
        float(limits["nvidia.com/gpu"]) >= config.workers.num_gpus and float(limits["cpu"]) >= config.workers.num_cpus
    )
    assert group["maxReplicas"] == config.window and cluster["authOptions"]["mode"] == "token"

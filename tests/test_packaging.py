"""The folders as one import package: the list in pyproject.toml, the wheel, and names that we must not take."""

from __future__ import annotations

import importlib.metadata
import importlib.util
import os
import shutil
import subprocess
import sys
import tomllib
import zipfile
from pathlib import Path
from typing import Any

import pytest
import yaml
from packaging.requirements import Requirement
from waiting import PATIENT_S

ROOT = Path(__file__).parents[1]
PARTS = ("configs", "evaluators", "kernels", "search", "store", "workers")
SURFACE = Path("search", "api")
"""The folder that is the package `moevolve` itself."""
TOP_LEVEL = {*PARTS, "tests", "pyproject.toml", "README.md", "Makefile"}


def folders_on_disk() -> set[str]:
    """Packages: the parts, and the folders below them with an `__init__.py`."""
    below = {path.parent.relative_to(ROOT) for part in PARTS for path in (ROOT / part).rglob("__init__.py")} - {SURFACE}
    names = {".".join(("moevolve", *folder.parts)) for folder in below}
    return {"moevolve", *names, *(f"moevolve.{part}" for part in PARTS)}


def files_on_disk() -> set[str]:
    """What a wheel must hold: every file of the parts, in its place."""
    found = {path for part in PARTS for path in (ROOT / part).rglob("*") if path.is_file()}
    kept = {path for path in found if "__pycache__" not in path.parts and not path.name.startswith(".")}
    surface = ROOT / SURFACE
    return {path.relative_to(surface if path.is_relative_to(surface) else ROOT).as_posix() for path in kept}


def settings() -> dict[str, object]:
    setuptools: dict[str, object] = tomllib.loads((ROOT / "pyproject.toml").read_text())["tool"]["setuptools"]
    return setuptools


def test_every_package_is_listed() -> None:
    listed = settings()["packages"]
    assert isinstance(listed, list)
    assert len(set(listed)) == len(listed)
    assert set(listed) == folders_on_disk()


@pytest.mark.skipif(shutil.which("git") is None or not (ROOT / ".git").exists(), reason="not a git checkout")
def test_nothing_else_stands_at_the_top_of_the_repository() -> None:
    listed = subprocess.run(["git", "ls-files"], cwd=ROOT, capture_output=True, text=True, check=True).stdout
    entries = {line.split("/")[0] for line in listed.splitlines()}
    assert {entry for entry in entries if not entry.startswith(".")} <= TOP_LEVEL


def test_kernels_is_no_regular_package() -> None:
    # One found in the working directory would shadow the package `kernels` that transformers imports.
    assert not (ROOT / "kernels" / "__init__.py").exists()
    assert importlib.util.find_spec("moevolve.kernels.routing") is not None


def run(program: str, folder: Path, path: Path | None = None) -> str:
    env = {**os.environ, **({} if path is None else {"PYTHONPATH": str(path)})}
    done = subprocess.run(
        [sys.executable, "-c", program], cwd=folder, env=env, capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stderr
    return done.stdout.strip()


WHOSE = (
    "import importlib.util as u\n"
    f"specs = [u.find_spec(name) for name in {PARTS!r}]\n"
    "print(*[p for s in specs if s for p in [s.origin or '', *(s.submodule_search_locations or [])]], sep='\\n')"
)
"""Prints where the parts' bare names are found."""


def test_bare_names_are_not_ours(tmp_path: Path) -> None:
    assert str(ROOT) not in run(WHOSE, tmp_path)


def test_a_package_called_kernels_is_found_even_from_the_checkout(tmp_path: Path) -> None:
    (tmp_path / "kernels").mkdir()
    (tmp_path / "kernels" / "__init__.py").write_text("whose = 'theirs'\n")
    program = "import kernels, moevolve.kernels.routing as ours; print(kernels.whose, ours.__name__)"
    assert run(program, ROOT, tmp_path) == "theirs moevolve.kernels.routing"


@pytest.fixture(scope="module")
def checkout(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A copy of the checkout, so that no stale build folder gets into what is built of it."""
    if importlib.util.find_spec("setuptools") is None:
        pytest.skip("setuptools is needed to build a wheel here")
    copy = tmp_path_factory.mktemp("wheel") / "checkout"
    copy.mkdir()
    for part in PARTS:
        shutil.copytree(ROOT / part, copy / part, ignore=shutil.ignore_patterns("__pycache__"))
    for name in ("pyproject.toml", "README.md"):
        shutil.copy(ROOT / name, copy / name)
    return copy


def build(checkout: Path, what: str) -> Path:
    """The wheel that the build system's function `build_{what}` makes, as pip would call it."""
    program = f"import sys, setuptools.build_meta as backend; backend.build_{what}(sys.argv[1])"
    folder = checkout.parent / f"built-{what}"
    folder.mkdir()
    command = [sys.executable, "-W", "ignore", "-c", program, str(folder)]
    done = subprocess.run(command, cwd=checkout, capture_output=True, text=True, timeout=PATIENT_S, check=False)
    assert done.returncode == 0, done.stderr
    (wheel,) = folder.glob("*.whl")
    return wheel


@pytest.fixture(scope="module")
def built(checkout: Path) -> Path:
    return build(checkout, "wheel")


@pytest.fixture(scope="module")
def wheel(built: Path) -> list[str]:
    """Names in the wheel."""
    with zipfile.ZipFile(built) as archive:
        return archive.namelist()


def test_the_wheel_installs_one_package_only(wheel: list[str]) -> None:
    top = {name.split("/")[0] for name in wheel}
    assert {name for name in top if not name.endswith(".dist-info")} == {"moevolve"}


def test_the_wheel_holds_every_file_of_the_parts(wheel: list[str]) -> None:
    held = {name.removeprefix("moevolve/") for name in wheel if name.startswith("moevolve/")}
    assert held == files_on_disk()


@pytest.fixture(scope="module")
def installed(built: Path) -> Path:
    """A folder into which the wheel is unpacked."""
    return unpacked(built)


def unpacked(wheel: Path) -> Path:
    folder = wheel.parent / "installed"
    with zipfile.ZipFile(wheel) as archive:
        archive.extractall(folder)
    return folder


@pytest.fixture(scope="module")
def editable(checkout: Path) -> Path:
    """A folder into which the copy of the checkout is installed editable."""
    return unpacked(build(checkout, "editable"))


def run_installed(folder: Path, program: str, cwd: Path | None = None) -> list[str]:
    """What a program prints where moevolve is installed in `folder` alone; dependencies are those of this process."""
    begin = (
        "import site, sys\n"
        f"sys.path.insert(0, {str(folder)!r}); site.addsitedir({str(folder)!r})\n"
        f"sys.path += {[path for path in sys.path if path.endswith('site-packages')]!r}\n"
    )
    env = {name: value for name, value in os.environ.items() if name != "PYTHONPATH"}
    # Without `site` this process's own install of moevolve isn't found.
    command = [sys.executable, "-S", "-c", begin + program]
    done = subprocess.run(command, cwd=cwd or folder, env=env, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    return done.stdout.split()


USE = (
    "import moevolve, moevolve.kernels.routing as kernel, moevolve.search.cli.app as app\n"
    "print(moevolve.__file__, kernel.__file__, app.__file__)\n"
    "print(moevolve.UserError.__module__, [task.name for task in moevolve.tasks()].count('boolq'))\n"
    "try:\n    import moevolve.search.api\nexcept ImportError as error:\n    print(type(error).__name__)\n"
)


SHRINK = (
    "import sys, torch\n"  # without torch in this process another one would describe the model, by its own moevolve
    "from moevolve.search.cli import main\n"
    "from moevolve.search.shrink.guard import general_set\n"
    "print(len(general_set()))\n"
    "for arguments in ('--help', '--experts 50% --data chats.jsonl --task demo-count --dry-run'):\n"
    "    sys.argv = ['moevolve', 'shrink', 'model', *arguments.split()]\n"
    "    try:\n        main()\n    except SystemExit as end:\n        assert not end.code, end.code\n"
)


def test_the_wheel_works_installed(installed: Path, tmp_path: Path) -> None:
    """With the command line, presets, tasks and guard of `shrink`, on a checkpoint and chats somewhere else."""
    shutil.copytree(ROOT / "configs" / "demo" / "model", tmp_path / "model")
    turns = '{"messages": [{"role": "user", "content": "question %d"}, {"role": "assistant", "content": "yes"}]}\n'
    (tmp_path / "chats.jsonl").write_text("".join(turns % number for number in range(200)))
    surface, kernel, app, module, tasks, refused, *said = run_installed(installed, USE + SHRINK, tmp_path)
    assert Path(surface) == installed / "moevolve" / "__init__.py"
    assert Path(kernel) == installed / "moevolve" / "kernels" / "routing.py"
    assert Path(app) == installed / "moevolve" / "search" / "cli" / "app.py"
    assert (module, tasks) == ("moevolve.evaluators.errors", "1")
    assert refused == "ModuleNotFoundError"
    assert said[0] == "5" and "--experts" in said
    run_file = tmp_path / "model-50pct.shrink" / "run.yaml"
    chats = run_file.with_name("tasks") / "chats.yaml"
    settings = yaml.safe_load(run_file.read_text())
    assert settings["genome"]["experts"] == 4 and settings["preset"] == "best"
    assert [task["name"] for task in settings["tasks"]] == ["demo-count", str(chats)]
    assert said[-1] == str(run_file.relative_to(tmp_path))


def test_an_editable_install_works(editable: Path, checkout: Path) -> None:
    surface, kernel, app, module, tasks, refused = run_installed(editable, USE)
    assert Path(surface) == checkout / SURFACE / "__init__.py"
    assert Path(kernel) == checkout / "kernels" / "routing.py"
    assert Path(app) == checkout / "search" / "cli" / "app.py"
    assert (module, tasks) == ("moevolve.evaluators.errors", "1")
    assert refused == "ImportError", "it would be a second copy of the package"


def test_bare_names_are_not_ours_in_an_editable_install_either(editable: Path, checkout: Path) -> None:
    found = run_installed(editable, f"import moevolve\n{WHOSE}")
    assert not [path for path in found if path.startswith(str(checkout))]


@pytest.mark.parametrize(
    ("name", "lowest", "highest", "beyond"),
    [("transformers", "5.19.0", "5.23.0", ("5.18.0", "5.24.0")), ("ray", "2.56.0", "2.60.0", ("2.55.1", "2.61.0"))],
)
def test_versions_are_bounded_to_what_was_tried(name: str, lowest: str, highest: str, beyond: tuple[str, str]) -> None:
    """Both ends were run: loading, unpacking, templates and families with the one, pools of workers with the other."""
    project: Any = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    listed = [
        *project["dependencies"],
        *(each for extra in project["optional-dependencies"].values() for each in extra),
    ]
    wanted = [each for each in map(Requirement, listed) if each.name == name]
    assert wanted
    for each in wanted:
        assert each.specifier.contains(lowest) and each.specifier.contains(highest)
        assert not any(map(each.specifier.contains, beyond))
        assert each.specifier.contains(importlib.metadata.version(name)), "the installed one"

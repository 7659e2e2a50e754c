"""The folders as one import package: the list in pyproject.toml, the wheel, and names that we must not take."""

from __future__ import annotations

import importlib
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
from packaging.requirements import Requirement

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


def test_every_package_is_listed() -> None:
    listed = tomllib.loads((ROOT / "pyproject.toml").read_text())["tool"]["setuptools"]["packages"]
    assert sorted(listed) == sorted(folders_on_disk())


@pytest.mark.skipif(shutil.which("git") is None or not (ROOT / ".git").exists(), reason="not a git checkout")
def test_nothing_else_stands_at_the_top_of_the_repository() -> None:
    listed = subprocess.run(["git", "ls-files"], cwd=ROOT, capture_output=True, text=True, check=True).stdout
    entries = {line.split("/")[0] for line in listed.splitlines()}
    assert {entry for entry in entries if not entry.startswith(".")} <= TOP_LEVEL


def run(program: str, folder: Path, path: Path | None = None) -> str:
    env = {**os.environ, **({} if path is None else {"PYTHONPATH": f"{path}:{os.environ.get('PYTHONPATH', '')}"})}
    done = subprocess.run(
        [sys.executable, "-c", program], cwd=folder, env=env, capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stderr
    return done.stdout.strip()


def test_bare_names_are_not_ours_and_the_surface_is_no_second_package(tmp_path: Path) -> None:
    """Where the tests run, which is in an editable install."""
    program = (
        "import importlib.util as u\n"
        f"specs = [u.find_spec(name) for name in {PARTS!r}]\n"
        "print(*[p for s in specs if s for p in [s.origin or '', *(s.submodule_search_locations or [])]], sep='\\n')"
    )
    assert str(ROOT) not in run(program, tmp_path)
    with pytest.raises(ImportError):
        importlib.import_module("moevolve.search.api")


def test_a_package_called_kernels_is_found_even_from_the_checkout(tmp_path: Path) -> None:
    """Transformers imports one; a regular package in the working directory would shadow it."""
    assert not (ROOT / "kernels" / "__init__.py").exists()
    (tmp_path / "kernels").mkdir()
    (tmp_path / "kernels" / "__init__.py").write_text("whose = 'theirs'\n")
    program = "import kernels, moevolve.kernels.routing_rule as ours; print(kernels.whose, ours.__name__)"
    assert run(program, ROOT, tmp_path) == "theirs moevolve.kernels.routing_rule"


@pytest.fixture(scope="module")
def built(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The wheel that the build system makes, as pip would call it, of a copy without stale build folders."""
    if importlib.util.find_spec("setuptools") is None:
        pytest.skip("setuptools is needed to build a wheel here")
    folder = tmp_path_factory.mktemp("wheel")
    for part in PARTS:
        shutil.copytree(ROOT / part, folder / "checkout" / part, ignore=shutil.ignore_patterns("__pycache__"))
    for name in ("pyproject.toml", "README.md"):
        shutil.copy(ROOT / name, folder / "checkout" / name)
    program = "import sys, setuptools.build_meta as backend; backend.build_wheel(sys.argv[1])"
    command = [sys.executable, "-W", "ignore", "-c", program, str(folder)]
    done = subprocess.run(command, cwd=folder / "checkout", capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    (wheel,) = folder.glob("*.whl")
    return wheel


def test_the_wheel_holds_every_file_of_the_parts_in_one_package(built: Path) -> None:
    with zipfile.ZipFile(built) as archive:
        names = archive.namelist()
    assert {top for top in (name.split("/")[0] for name in names) if not top.endswith(".dist-info")} == {"moevolve"}
    assert {name.removeprefix("moevolve/") for name in names if name.startswith("moevolve/")} == files_on_disk()


USE = """
import moevolve, moevolve.search.cli.app as app, moevolve.kernels.routing_rule as kernel
from moevolve.search.config.files import presets
from moevolve.search.shrink.guard import general_set
print(moevolve.__file__, kernel.__file__, app.__file__)
print(len(presets()), [task.name for task in moevolve.tasks()].count('boolq'), len(general_set()))
sys.argv = ['moevolve', 'shrink', '--help']
app.app()
"""


def test_the_wheel_works_installed(built: Path) -> None:
    """The command line with its presets, tasks and the guard's prompts."""
    folder = built.parent / "installed"
    with zipfile.ZipFile(built) as archive:
        archive.extractall(folder)
    # Without `site` this process's own install of moevolve isn't found; dependencies are those of this process.
    packages = [path for path in sys.path if path.endswith("site-packages")]
    program = f"import sys; sys.path[:0] = [{str(folder)!r}]; sys.path += {packages!r}\n{USE}"
    env = {name: value for name, value in os.environ.items() if name != "PYTHONPATH"}
    command = [sys.executable, "-S", "-c", program]
    done = subprocess.run(command, cwd=folder, env=env, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    surface, kernel, app, presets, tasks, guard, *said = done.stdout.split()
    assert Path(surface) == folder / "moevolve" / "__init__.py"
    assert Path(kernel) == folder / "moevolve" / "kernels" / "routing_rule.py"
    assert Path(app) == folder / "moevolve" / "search" / "cli" / "app.py"
    files = list((ROOT / "configs" / "presets").glob("*.yaml"))
    assert (presets, tasks, guard) == (str(len(files)), "1", "5") and "--experts" in said


@pytest.mark.parametrize(
    ("name", "lowest", "highest", "beyond"),
    [("transformers", "5.19.0", "5.24.0", ("5.18.0", "5.25.0")), ("ray", "2.56.0", "2.60.0", ("2.55.1", "2.61.0"))],
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

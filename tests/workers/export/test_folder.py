"""Folders of exports: what killed ones leave is removed, what others write isn't, and no place is taken for free."""

from __future__ import annotations

import shutil
import signal
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace

import pytest

from moevolve.evaluators.errors import UserError
from moevolve.workers.export.folder import check_room, check_target, new_checkpoint

KILLED = """
import os, signal, sys
from pathlib import Path
from moevolve.workers.export.folder import new_checkpoint
with new_checkpoint(Path(sys.argv[1]), "it") as part:
    (part / "model.safetensors").write_text("half")
    os.kill(os.getpid(), signal.SIGKILL)
"""


def test_what_a_killed_export_left_is_removed_when_it_is_repeated(tmp_path: Path) -> None:
    target = tmp_path / "small [1]"
    done = subprocess.run([sys.executable, "-c", KILLED, str(target)], check=False)
    (left,) = tmp_path.iterdir()
    assert done.returncode == -signal.SIGKILL and (left / "model.safetensors").exists()
    elsewhere = tmp_path / f".{target.name}.part-another.host-1"
    elsewhere.mkdir()
    with new_checkpoint(target, "it") as part:
        assert not left.exists()
        with new_checkpoint(target, "the same at the same time"):
            assert part.exists()
        shutil.rmtree(target)
    assert set(tmp_path.iterdir()) == {target, elsewhere}


def test_a_link_to_nothing_is_no_place_for_an_export(tmp_path: Path) -> None:
    (tmp_path / "link").symlink_to(tmp_path / "nothing")
    with pytest.raises(UserError, match=r"link is a link to nothing; give a folder's name"):
        check_target(tmp_path / "link")


def test_a_lack_of_room_is_told_in_numbers_that_differ(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(shutil, "disk_usage", lambda _: SimpleNamespace(free=900_000))
    with pytest.raises(UserError, match=r"no room for the export: 6\.1 MB needed, 0\.9 MB free"):
        check_room(tmp_path, 5_000_000)

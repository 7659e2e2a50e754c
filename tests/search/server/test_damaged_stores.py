"""Damaged stores: the check names the damage, and the server never fails by it."""

from __future__ import annotations

from pathlib import Path

import pytest
from damaged_stores import KINDS, faults, write_sound

ASKED = ("flipped_bits", "other_type", "nulls", "foreign_keys", "malformed_json", "no_numbers", "unknown_words")


@pytest.fixture(scope="module")
def sound(tmp_path_factory: pytest.TempPathFactory) -> Path:
    file = tmp_path_factory.mktemp("sound") / "sound.db"
    write_sound(file)
    return file


@pytest.mark.parametrize("kind", ASKED)
def test_damage_is_named_and_is_no_failure_of_the_server(sound: Path, tmp_path: Path, kind: str) -> None:
    assert faults(sound, tmp_path, [one.__name__ for one in KINDS].index(kind)) == []

"""A small task on disk, written with changes."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import yaml

ROWS = [{"text": f"text {i}", "topic": "xy"[i % 2], "label": bool(i % 3)} for i in range(12)]
TASK: dict[str, Any] = {
    "source": {"files": {"all": "rows.jsonl"}},
    "splits": {
        "search": {"from": "all", "seed": 1, "count": 4},
        "dev": {"from": "all", "seed": 1, "offset": 4, "count": 3},
        "test": {"from": "all", "seed": 1, "offset": 7},
    },
    "labels": {"label": {"true": "A", "false": "B"}},
    "prompt": "{{ text }}\nA. Yes\nB. No\nAnswer:",
    "answer": "{{ label }}",
    "choices": ["A", "B"],
    "matching": {"kind": "option"},
}

WriteTask = Callable[..., Path]


@pytest.fixture
def write_task(tmp_path: Path) -> WriteTask:
    """Write `rows.jsonl` and `<stem>.yaml`; keyword arguments replace keys of the task, None removes one."""

    def write(stem: str = "small", rows: list[dict[str, Any]] | str = ROWS, **changes: Any) -> Path:
        text = rows if isinstance(rows, str) else "".join(json.dumps(row) + "\n" for row in rows)
        (tmp_path / "rows.jsonl").write_text(text, encoding="utf-8")
        path = tmp_path / f"{stem}.yaml"
        task = {key: value for key, value in (TASK | changes).items() if value is not None}
        path.write_text(yaml.safe_dump(task, sort_keys=False), encoding="utf-8")
        return path

    return write

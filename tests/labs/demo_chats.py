"""A file of chats of the demo's tasks."""

from __future__ import annotations

import json
from pathlib import Path

_DEMO = Path(__file__).parents[2] / "configs" / "demo"


def write_chats(path: Path, rows: int) -> None:
    """Questions of the demo about spans of days, as chats with short answers."""
    lines = (_DEMO / "data" / "span" / "search.jsonl").read_text().splitlines()[:rows]
    with path.open("w") as file:
        for row in map(json.loads, lines):
            asked = {"role": "user", "content": f"{row['passage']}\nQuestion: {row['question']}\nAnswer:"}
            file.write(json.dumps({"messages": [asked, {"role": "assistant", "content": row["answer"]}]}) + "\n")

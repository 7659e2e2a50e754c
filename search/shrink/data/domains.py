"""Files of requests as tasks: each is a domain with four splits.

Rows are scored by their answers, or by the full model's.
"""

from __future__ import annotations

import hashlib
import json
import logging
import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from itertools import accumulate
from pathlib import Path
from typing import TYPE_CHECKING

import yaml

from moevolve.evaluators.errors import UserError
from moevolve.evaluators.types import SPLITS, Split
from moevolve.search.shrink.data.columns import Columns, read_columns
from moevolve.search.shrink.data.files import DataFile, checked, is_short, read_data
from moevolve.search.shrink.data.messages import Chat
from moevolve.search.shrink.data.rows import DataRow

if TYPE_CHECKING:
    from moevolve.search.config.run import RunConfig

_LOG = logging.getLogger(__name__)

# Prompts and answers of chats; see `render_chats`.
Render = Callable[[tuple[Chat, ...]], tuple[tuple[str, str | None], ...] | None]

_SHARES: dict[Split, float] = {"calibration": 0.25, "search": 0.35, "dev": 0.15, "test": 0.25}
DEV_ROWS = 192
# Most rows of a split that a search uses: the first ones by their hash.
_MOST: dict[Split, int] = {"calibration": 4096, "search": 256, "dev": DEV_ROWS, "test": 1024}
# Fewest different conversations in a file: fewer leave `dev` too small to choose by.
LEAST_ROWS = 64
# Fewest documents in a folder: each has several rows, and all of them are in one split.
LEAST_DOCUMENTS = 16
_LEAST_IN_SPLIT = 4

# Most tokens of an answer that is generated.
_MOST_TOKENS = 512
# Tokens of the full model's own answers where the data has none.
_OWN_TOKENS = 64


@dataclass(frozen=True)
class Domain:
    """A file of requests as a task.

    Attributes:
        name: Name of the task: the file's, without what task names can't have.
        settings: Content of the task's file, without its source.
    """

    name: str
    settings: Mapping[str, object]
    rows: Mapping[Split, Sequence[DataRow]] = field(repr=False)


def read_domains(
    paths: Sequence[Path],
    render: Render | None = None,
    columns: Columns | None = None,
    metric: Mapping[str, str] | None = None,
    dev_rows: int = DEV_ROWS,
) -> list[Domain]:
    """Read files of requests and divide each into splits.

    All rows of a conversation, and equal prompts, are in one split, also of different files.

    Args:
        paths: The files.
        render: Writes chats with tools or thoughts in the model's chat template. None if there can't be any.
        columns: The files' columns by their field; None if their names tell the fields.
        metric: Settings of the tasks' `matching` with a function that scores answers, if any.
        dev_rows: Most rows of `dev`.

    Raises:
        UserError: A file can't be read or has too few rows, its chats can't be rendered, or two files have one name.
    """
    domains = [_domain(_rendered(checked(read_data(path, columns)), render), metric, dev_rows) for path in paths]
    names = [domain.name for domain in domains]
    for name in names:
        if names.count(name) > 1:
            raise UserError(f"--data: two files are called {name}; rename one, since a task is called like its file")
    return domains


def write_tasks(domains: Iterable[Domain], folder: Path) -> list[Path]:
    """Write the task file of each domain, and its rows, into a folder; returns the task files."""
    written = []
    for domain in domains:
        rows = folder / domain.name
        rows.mkdir(parents=True, exist_ok=True)
        for split, chosen in domain.rows.items():
            lines = []
            for row in chosen:
                content: dict[str, object] = {"prompt": row.prompt}
                if row.answer is not None:
                    content["answer"] = row.answer
                if row.choices:
                    content["choices"] = list(row.choices)
                content["turns"] = [{"role": role, "content": text} for role, text in row.turns]
                lines.append(json.dumps(content, ensure_ascii=False) + "\n")
            (rows / f"{split}.jsonl").write_text("".join(lines), encoding="utf-8")
        source = {"files": {split: f"{domain.name}/{split}.jsonl" for split in domain.rows}}
        task = {"source": source, "splits": {split: {"from": split} for split in domain.rows}, **domain.settings}
        path = folder / f"{domain.name}.yaml"
        path.write_text(yaml.safe_dump(task, sort_keys=False, allow_unicode=True), encoding="utf-8")
        written.append(path)
    return written


def _rendered(data: DataFile, render: Render | None) -> DataFile:
    """Replace chats with tools or thoughts, if a file has some, by prompts and answers in the model's template."""
    chats = tuple(row.chat for row in data.rows if row.chat is not None)
    if not chats:
        return data
    assert render is not None and len(chats) == len(data.rows)
    texts = render(chats)
    if texts is None:
        if any(chat.has_thoughts for chat in chats):
            _LOG.warning("%s: thoughts aren't used, since the model has no chat template to write them", data.path)
        return replace(data, rows=tuple(replace(row, chat=None) for row in data.rows))
    written = list(zip(chats, texts, strict=True))
    thoughts = sum(chat.thoughts not in (answer or "") for chat, (_, answer) in written)
    tools = sum(any(tool["function"]["name"] not in prompt for tool in chat.tools) for chat, (prompt, _) in written)
    for count, what in ((thoughts, "thoughts of answers"), (tools, "`tools`")):
        if count:
            unable = "the model's chat template can't render them"
            _LOG.warning("%s: left out %s of %d rows: %s", data.path, what, count, unable)
    pairs = zip(data.rows, texts, strict=True)
    rows = (replace(row, prompt=prompt, answer=answer, turns=()) for row, (prompt, answer) in pairs)
    return replace(data, rows=tuple(rows))


def render_chats(config: RunConfig, chats: tuple[Chat, ...]) -> tuple[tuple[str, str | None], ...] | None:
    """Return the prompt and the answer of every chat, as the model of a run reads them.

    Returns:
        None if these chats need no form of their own: the model has no chat template, or it writes nothing of what only
        these have, and no chat needs one.

    Raises:
        UserError: The model has no chat template and a chat needs one, or it refuses a chat, or reads a field of
            messages that isn't read here.
    """
    from moevolve.workers.checkpoints.loading import load_tokenizer
    from moevolve.workers.engine.chat import chat_template

    tokenizer = load_tokenizer(config.model)
    template = chat_template(tokenizer, config.engine)
    if template is None:
        called = next((chat for chat in chats if chat.needs_template), None)
        if called is None:
            return None
        raise UserError(
            f"{called.place}: model {config.model.path} has no chat template, which calls of tools and a first turn of "
            "the assistant need; leave them out"
        )
    reads = {field: chat for chat in chats for field in chat.further}
    reads = {field: chat for field, chat in reads.items() if template.reads(field)}
    if reads.keys() - {"name"}:
        field = min(reads.keys() - {"name"})
        raise UserError(
            f"{reads[field].place}: messages have `{field}`, which the model's chat template reads and which isn't "
            "passed on; leave these conversations out, or the field"
        )
    if not reads and not any(chat.says_more for chat in chats):
        return None
    rendered = []
    for chat in chats:
        try:
            rendered.append(template.conversation(*chat.as_data()))
        except UserError as error:
            raise UserError(f"{chat.place}: {error}") from None
    return tuple(rendered)


def has_template(config: RunConfig) -> bool:
    """Return whether the model of a run has a chat template, or the run names one."""
    from moevolve.workers.checkpoints.loading import load_tokenizer
    from moevolve.workers.engine.chat import chat_template

    return chat_template(load_tokenizer(config.model), config.engine) is not None


def _domain(data: DataFile, metric: Mapping[str, str] | None, dev_rows: int) -> Domain:
    path, folder = data.path, data.path.is_dir()
    stem = path.resolve().name if folder else path.stem
    name = re.sub(r"[^A-Za-z0-9._-]+", "-", stem).strip("-.") or "data"
    found, least = len({row.first_message for row in data.rows}), LEAST_DOCUMENTS if folder else LEAST_ROWS
    if found < least:
        pieces = "pieces of text between empty lines" if data.is_text else "rows with different first messages"
        what = "documents with different beginnings" if folder else pieces
        raise UserError(f"--data {path}: {found} {what}; give {least} or more, better a few hundred")
    rows: dict[Split, list[DataRow]] = {split: [] for split in SPLITS}
    ends = list(zip(_SHARES, accumulate(_SHARES.values()), strict=True))
    # Parts of long documents, and turns of one conversation, are mixed with those of others.
    for row in sorted(data.rows, key=lambda row: _position(row.prompt)):
        position = _position(row.first_message)
        rows[next((split for split, end in ends if position < end), "test")].append(row)
    small = [split for split in SPLITS if len(rows[split]) < _LEAST_IN_SPLIT]
    if small:
        raise UserError(
            f"--data {path}: only {len(rows[small[0]])} of {len(data.rows)} rows fall into the split {small[0]}, which "
            f"needs {_LEAST_IN_SPLIT}; give more {'documents' if folder else 'rows'}"
        )
    most = _MOST | {"dev": dev_rows}
    return Domain(name, _settings(data, metric), {split: chosen[: most[split]] for split, chosen in rows.items()})


def _position(message: str) -> float:
    """A number in [0, 1) that depends on the text alone, so that a row stays in its split when the file grows."""
    return int.from_bytes(hashlib.sha256(message.strip().encode()).digest()[:7], "big") / 2**56


def _settings(data: DataFile, metric: Mapping[str, str] | None) -> dict[str, object]:
    """Return the settings of the task that suits a file's rows."""
    if metric is not None and (data.rows[0].chat is not None or any(row.answer is None for row in data.rows)):
        raise UserError(
            f"--data {data.path}: --metric compares answers with expected ones, which this file hasn't, or has only as "
            "a model's template writes them; leave --metric out, or the file"
        )
    if data.is_text:
        return {"prompt": "{{ prompt }}", "fitness": "agreement", "positions": "text"}
    found: dict[str, object] = {"prompt": "{{ prompt }}"}
    if data.rows[0].chat is not None:
        found |= {"chat": "rendered", "answer_prefix": ""}  # the template is part of the prompts
    if any(row.turns for row in data.rows):
        found["turns"] = "turns"
    answers = [row.answer for row in data.rows if row.answer is not None]
    if not answers:
        return found | {"fitness": "agreement", "matching": {"stop": []}, "max_new_tokens": _OWN_TOKENS}
    # No tokenizer makes more tokens than bytes; decoding stops sooner, when the answer is decided.
    most = min(_MOST_TOKENS, max(len(answer.encode()) for answer in answers) + 1)
    stop = [] if any("\n" in answer for answer in answers) else ["\n"]
    found |= {"answer": "{{ answer }}", "max_new_tokens": most}
    if metric is not None:
        return found | {"fitness": "generate", "matching": {**metric, "stop": stop}}
    if data.rows[0].choices:
        return found | {"choices": "choices", "fitness": "rank"}
    if data.rows[0].chat is None and all(map(is_short, answers)):
        return found | {"fitness": "generate", "matching": {"kind": "exact"}}
    return found | {"fitness": "agreement", "matching": {"stop": stop}}


def usable_rows(path: Path, columns: str | None = None) -> int:
    """Return the number of rows in a file of requests that can become a task; `columns` is the value of --columns.

    Raises:
        UserError: See `read_data`; or it has too few rows, or `columns` is malformed.
    """
    data = checked(read_data(path, None if columns is None else read_columns(columns)))
    _domain(data, None, DEV_ROWS)
    return len(data.rows)

"""Files of requests as people have them, as tasks: each is a domain with four splits.

Files are JSON, tables (CSV, parquet), running text, folders of texts, and data sets of the hub, which may have other
columns beside those of `rows.py`. Rows are scored by their answers, or by the full model's.
"""

from __future__ import annotations

import hashlib
import json
import logging
import re
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from itertools import accumulate
from pathlib import Path
from typing import TYPE_CHECKING

import yaml

from moevolve.evaluators.errors import UserError, first_line, one_line
from moevolve.evaluators.text_files import MOST_FAULTS, ROW_FILES, read_lines, read_rows, refuse_faults
from moevolve.evaluators.types import SPLITS, Split
from moevolve.search.shrink.columns import IGNORED, OFTEN, Columns, Unread, read_columns
from moevolve.search.shrink.rows import Chat, DataRow, LeftOutError, read_row, without_nulls

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

# Largest answer that is compared as text. Longer ones are worded in more than one right way.
_SHORT_WORDS, _SHORT_CHARACTERS = 6, 48
# Most tokens of an answer that is generated.
_MOST_TOKENS = 512
# Tokens of the full model's own answers where the data has none.
_OWN_TOKENS = 64

# Rows as plain data, or what is wrong with them, each with its place for error messages.
Places = Iterator[tuple[str, Mapping[str, object] | UserError]]
# What tells a row's form: the column that has the question, whether there is an answer, and choices.
_Form = tuple[str, bool, bool]
# Names of files of running text end in one of these.
TEXT_FILES = (".txt", ".md")
DATA_FILES = (*ROW_FILES, ".parquet", *TEXT_FILES)
_HUB_ID = re.compile(r"[\w.-]+/[\w.-]+")
# Most rows of a data set of the hub that are read: the first ones. A search uses a few thousand.
_HUB_ROWS = 20_000

# Marks of turns that chat templates write, and text written into prompts for the same end.
_TURN_MARKS = re.compile(
    r"<\|im_start\|>|<\|start_header_id\|>|<\|start_of_role\|>|<start_of_turn>|\[/INST\]|<\|(?:user|assistant)\|>"
    r"|<｜(?:User|Assistant)｜>|<\|start\|>|^\s*(?:### ?)?Human: .*?\n\s*(?:### ?)?Assistant: ?\S",
    re.IGNORECASE | re.DOTALL,
)
# What may follow the whole example in a text.
_END_MARKS = re.compile(r"(?:[\s.]|<[^<>\s]{1,24}>|### ?End)+\Z")

# Fewest characters of a row of running text. Paragraphs are joined up to that, since single lines say little.
_TEXT_CHARACTERS = 400


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
    domains = [_domain(_rendered(_checked(read_data(path, columns)), render), metric, dev_rows) for path in paths]
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
        None if the chats are written as any others: the model has no chat template, or it writes nothing of what only
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
    if not reads and not any(chat.needs_template or chat.has_thoughts for chat in chats):
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
    if data.rows[0].chat is None and all(map(_is_short, answers)):
        return found | {"fitness": "generate", "matching": {"kind": "exact"}}
    return found | {"fitness": "agreement", "matching": {"stop": stop}}


def _is_short(answer: str) -> bool:
    return "\n" not in answer and len(answer) <= _SHORT_CHARACTERS and len(answer.split()) <= _SHORT_WORDS


def usable_rows(path: Path, columns: str | None = None) -> int:
    """Return the number of rows in a file of requests that can become a task; `columns` is the value of --columns.

    Raises:
        UserError: See `read_data`; or it has too few rows, or `columns` is malformed.
    """
    data = _checked(read_data(path, None if columns is None else read_columns(columns)))
    _domain(data, None, DEV_ROWS)
    return len(data.rows)


@dataclass(frozen=True, slots=True)
class DataFile:
    """The rows of one file, all of one form, or of a folder of documents.

    Attributes:
        is_text: True for running text, which has no answers and isn't put into a chat template.
    """

    path: Path
    is_text: bool
    rows: tuple[DataRow, ...]


def read_data(path: Path, columns: Columns | None = None) -> DataFile:
    """Read a file of requests, a folder of documents, or the split `train` of a data set of the hub.

    Raises:
        UserError: The file is missing, empty or of a form that isn't read, or rows are malformed or of another form
            than the first. The message counts them, and names file and line of the first three.
    """
    suffix = path.suffix.lower()
    if path.is_dir():
        return DataFile(path, True, tuple(_documents(path)))
    if suffix in TEXT_FILES:
        rows = list(_paragraphs(read_lines(path)))
    elif suffix == ".parquet":
        rows = _rows(path, _parquet(path), columns)
    elif suffix in ROW_FILES:
        rows = _rows(path, read_rows(path), columns)
    elif path.exists() or not _HUB_ID.fullmatch(str(path)):
        raise UserError(f"--data {path}: the name must end in one of {', '.join(DATA_FILES)}, or be a folder's")
    else:
        rows = _rows(path, _hub(str(path), columns), columns)
    if not rows:
        raise UserError(f"{path}: the file is empty")
    # If one row has tools, thoughts, a greeting or names, all keep their chats, so that they are rendered alike.
    chats = (row.chat for row in rows if row.chat is not None)
    if not any(chat.needs_template or chat.has_thoughts or chat.further for chat in chats):
        rows = [replace(row, chat=None) for row in rows]
    return DataFile(path, suffix in TEXT_FILES, tuple(rows))


def _checked(data: DataFile) -> DataFile:
    """Refuse a file whose prompts are chats as a template wrote them, or have their own answers.

    Another template would be put around the former. The latter happens where the column of whole examples is read as
    the prompt. Short answers are rightly in a passage or among options, but not at the end of nearly all prompts.
    """
    if data.is_text:
        return data
    marks = [found for row in data.rows if (found := _TURN_MARKS.search(row.prompt)) is not None]
    if len(marks) > OFTEN * len(data.rows):
        raise UserError(
            f"{data.path}: {len(marks):,} of {len(data.rows):,} rows are chats that a template has written "
            f"(`{one_line(marks[0][0], 24)}`); give their turns as `messages`, since the model's is put around prompts"
        )
    pairs = []
    for row in data.rows:
        answer = row.answer if row.chat is None or row.chat.answer is None else row.chat.answer.content
        if answer and answer.strip() and not row.choices:
            asked = [text for role, text in row.turns if role != "assistant"]
            pairs.append(("\n".join((*asked, row.prompt)), answer.strip()))
    inside = sum(answer in asked for asked, answer in pairs if not _is_short(answer))
    ends = ((asked[-len(answer) - 200 :], answer) for asked, answer in pairs if _is_short(answer))
    bare = ((_END_MARKS.sub("", asked), _END_MARKS.sub("", answer)) for asked, answer in ends)
    ending = sum(bool(answer) and asked.endswith(answer) for asked, answer in bare)
    if inside > OFTEN * len(pairs) or ending > (1 - OFTEN) * len(pairs):
        raise UserError(
            f"{data.path}: {max(inside, ending):,} of {len(pairs):,} answers stand in their own prompts; name with "
            "--columns a column that has the question alone, as in --columns prompt=question,answer=response"
        )
    return data


def _documents(folder: Path) -> Iterator[DataRow]:
    """Return the rows of all texts in a folder and the folders below it, each with the beginning of its document."""
    paths = sorted(path for path in folder.rglob("*") if path.suffix.lower() in TEXT_FILES and path.is_file())
    if not paths:
        raise UserError(f"--data {folder}: the folder has no .txt or .md files; name files of other forms one by one")
    for path in paths:
        rows = list(_paragraphs(read_lines(path)))
        yield from (replace(row, first_message=rows[0].prompt) for row in rows)


def _parquet(path: Path) -> Places:
    import pyarrow as pa
    from pyarrow import parquet

    try:
        rows = parquet.read_table(path).to_pylist()
    except FileNotFoundError:
        raise UserError(f"{path}: no such file") from None
    except (OSError, pa.ArrowException) as error:
        raise UserError(f"{path}: can't be read as a parquet file: {first_line(error)}") from None
    for number, row in enumerate(rows, start=1):
        yield f"{path}: row {number}", without_nulls(row)


def _hub(name: str, columns: Columns | None) -> Places:
    """Return the rows of a data set of the hub, without the columns that --columns ignores."""
    from moevolve.evaluators.tasks.config import Source
    from moevolve.evaluators.tasks.datasets import load_table

    ignored = [column for column, field_name in (columns or {}).items() if field_name == IGNORED]
    table = load_table(Source(hub=name), "train").without(ignored)
    for number in range(min(len(table), _HUB_ROWS)):
        yield table.place(number), without_nulls(table.row(number))


def _paragraphs(text: Iterable[str]) -> Iterator[DataRow]:
    """Return the rows of running text: whole paragraphs, joined up to `_TEXT_CHARACTERS`."""
    lines: list[str] = []
    for line in (*text, ""):
        if line.strip():
            lines.append(line)
            continue
        joined = "\n".join(lines).strip()
        if len(joined) >= _TEXT_CHARACTERS:
            yield DataRow(joined, joined)
            lines = []
        elif lines:
            lines.append("")
    rest = "\n".join(lines).strip()
    if rest:
        yield DataRow(rest, rest)


def _rows(path: Path, read: Places, columns: Columns | None) -> list[DataRow]:
    """Return the rows of a file, all of one form.

    Few rows without an answer are left out, as trainers do, and all that are marked as bad or are empty texts.
    """
    given, unread = list(read), Unread()
    every = tuple(dict.fromkeys(name for _, found in given if not isinstance(found, UserError) for name in found))
    done, faults, left_out = list[tuple[str, _Form, DataRow]](), dict[str, str](), Counter[str]()
    for place, found in given:
        try:
            if isinstance(found, UserError):
                raise found
            each = read_row(found, place, columns, every)
            unread.add(place, each.unread, each.texts)
            done.append((place, (each.key, each.row.answer is not None, bool(each.row.choices)), each.row))
        except LeftOutError as error:
            left_out[str(error)] += 1
        except UserError as error:
            faults[place] = str(error)  # not the error, which would keep what the row was read into
            if len(faults) == MOST_FAULTS:
                break
    for reason, count in left_out.items():
        _LOG.warning("%s: left out %d of %d rows: %s", path, count, len(given), reason)
    tried, done = len(done) + len(faults), _answered(path, done)
    for place, form, _ in done:
        if form != done[0][1]:
            words = f"{_form_words(form)}, but {_form_words(done[0][1])} at {done[0][0]}"
            faults[place] = f"{place}: {words}; put rows of each form into a file"
    refuse_faults(path, [(place, faults[place]) for place, _ in given if place in faults], tried)
    unread.refuse(every)
    return [row for _, _, row in done]


def _answered(path: Path, rows: list[tuple[str, _Form, DataRow]]) -> list[tuple[str, _Form, DataRow]]:
    """Leave out rows without answers if they are few."""
    answered = [(place, form, row) for place, form, row in rows if form[1]]
    silent = len(rows) - len(answered)
    if silent > OFTEN * len(rows):
        return rows
    if silent:
        _LOG.warning("%s: left out %d of %d rows: they have no answer, or an empty one", path, silent, len(rows))
    return answered


def _form_words(form: _Form) -> str:
    key, answered, chosen = form
    with_answer = "with an answer" if answered else "without an answer, or with an empty one"
    return f"a row with `{key}`, {with_answer}{' and choices' if chosen else ''}"

"""Commands that run models: their scores, answers and expert usage."""

from __future__ import annotations

from typing import TYPE_CHECKING, Annotated

import typer
from rich.text import Text

import moevolve
from moevolve.evaluators.preparation.registry import split_fitness
from moevolve.evaluators.scales import SCALES, Scale
from moevolve.search.cli._requests import DEFAULT_STORE, JsonOption, StoreOption, asked, shows, takes
from moevolve.search.cli.output.console import output, print_json, print_table
from moevolve.search.interface.answers import AnswersRequest
from moevolve.search.interface.evaluate import EvaluateRequest
from moevolve.search.interface.individuals import AnalyseRequest

if TYPE_CHECKING:
    from moevolve import Analysis, Answers, Evaluations
    from moevolve.evaluators.fitness.scoring import Answer
    from moevolve.search.interface.answers import AnswerFilter

# Characters of a prompt that are shown without `--whole`, half from its beginning and half from its end.
_LONGEST = 480


@shows(EvaluateRequest)
def evaluate(found: Evaluations, _: EvaluateRequest) -> None:
    rows = [list(found.cells(model).values()) for model in found.models]
    print_table(found.title, " | >".join(found.cells(found.models[0])), rows)
    if found.note:
        output.print(found.note, soft_wrap=True)
    if any(each.failure is not None for model in found.models for each in model.records):
        raise typer.Exit(1)


@takes(AnswersRequest)
def answers(
    request: AnswersRequest,
    whole: Annotated[bool, typer.Option("--whole", help="Show long prompts from beginning to end.")] = False,
    prompts: Annotated[
        bool,
        typer.Option(
            "--prompts",
            help="Show prompts and scored answers as the model reads them, with special tokens; run nothing.",
        ),
    ] = False,
    store: StoreOption = DEFAULT_STORE,
    as_json: JsonOption = False,
) -> None:
    if prompts:
        _answer_prompts(request, whole, store, as_json)
    else:
        found = asked(store, request)
        if as_json:
            print_json(found)
            return
        scale, pairs = SCALES[found.scale], zip(found.models, found.scores, strict=True)
        scores = ", ".join(f"{name} {scale.phrase(value)}" for name, value in pairs)
        rows = f"{'' if request.rows else 'first '}{found.examined} rows"
        title = f"{found.task} ({found.split}), {found.fitness}, {rows}: {scores}"
        _print_answered(title, found, request.only, whole)
        answered = [row for row in found.rows if row.references]
        if answered and all(answer.text is None for row in answered for answer in row.answers):
            task = split_fitness(request.task)[0]
            output.print(
                f"{found.fitness} generates nothing; see the beginnings of answers with --task {task}@generate",
                soft_wrap=True,
            )


def _answer_prompts(request: AnswersRequest, whole: bool, store: str, as_json: bool) -> None:
    same = {name: getattr(request, name) for name in ("task", "split", "limit", "search", "model")}
    shown = moevolve.prompts(store, request.individuals[0], **same)
    if as_json:
        print_json(shown)
        return
    cells = [
        [str(row.row), row.prompt if whole else _abridged(row.prompt), "\n".join(row.choices) or row.gold or "-"]
        for row in shown
    ]
    print_table(f"{request.task} ({request.split})", ">row | prompt | scored", cells, range(len(cells)))


@takes(AnalyseRequest)
def analyse(request: AnalyseRequest, store: StoreOption = DEFAULT_STORE, as_json: JsonOption = False) -> None:
    analysis = moevolve.ask(store, request)
    if as_json:
        print_json(analysis)
        return
    _print_layers(analysis)
    # The expert that most tokens of each frequent word chose, in some layers (ToMoE, Tab. 4, 8 and 9).
    usage = analysis.after
    layers = [usage.routed[place] for place in sorted({0, len(usage.routed) // 2, len(usage.routed) - 1})]
    rows = [
        [repr(word), *(f"{counts.argmax()}: {100 * counts.max() / max(1, counts.sum()):.0f} %" for counts in each)]
        for word, *each in zip(usage.words, *(layer.by_word for layer in layers), strict=True)
    ]
    headings = " | ".join(["word", *(f">layer {layer.layer}" for layer in layers)])
    print_table("the expert that a word's tokens chose most, and its share", headings, rows)


def _print_answered(title: str, found: Answers, only: AnswerFilter | None, whole: bool) -> None:
    if not found.rows:
        output.print(f"{title}; no row is {only}", soft_wrap=True)
        return
    lines: list[list[str | Text]] = []
    ends = []
    # Where all models answer alike there is least to see.
    rows = sorted(found.rows, key=lambda row: len({(each.outcome, each.text) for each in row.answers}) == 1)
    for row in rows:
        lines.append([str(row.row), "prompt", "", row.prompt if whole else _abridged(row.prompt)])
        lines.append(["", "right", "", " | ".join(row.references) or "-"])
        for name, answer in zip(found.models, row.answers, strict=True):
            lines.append(["", name, _mark(answer.outcome, SCALES[found.scale]), _answer_text(answer, row.choices)])
        ends.append(len(lines) - 1)
    print_table(title, ">row |  |  | text", lines, ends)


def _answer_text(answer: Answer, choices: tuple[str, ...]) -> str:
    if not answer.logprobs:
        return "-" if answer.text is None else answer.text
    best = max(answer.logprobs)
    pairs = zip(answer.logprobs, choices, strict=True)
    return "\n".join(f"{'>' if value == best else ' '} {value:8.3f}  {choice}" for value, choice in pairs)


def _mark(outcome: float, scale: Scale) -> Text:
    if scale.is_reciprocal:
        return Text(scale.text(outcome))
    return Text(*{1.0: ("right", "green"), 0.0: ("wrong", "red")}.get(outcome, (scale.text(outcome), "")))


def _abridged(text: str) -> str:
    half = _LONGEST // 2
    left_out = len(text) - 2 * half
    if left_out <= half // 4:
        return text
    return f"{text[:half]} [... {left_out:,} characters ...] {text[-half:]}"


def _print_layers(analysis: Analysis) -> None:
    after, before = analysis.after, analysis.before
    title = f"{analysis.ref} on {analysis.task} ({analysis.split}): {after.tokens:,} tokens"
    headings = ">layer | >experts | >unused | most used | >evenly used as"
    headings += " | >before" if before is not None else ""
    rows = []
    for position, layer in enumerate(after.routed):
        top = int(layer.counts.argmax())
        share = f"{100 * layer.counts[top] / after.tokens:.0f} % of tokens"
        name = layer.origins[top] if layer.origins else top
        row = [str(layer.layer), str(layer.experts), str(int((layer.counts == 0).sum())), f"{name}: {share}"]
        row.append(f"{layer.effective:.1f}")
        row += [f"{before.routed[position].effective:.1f}"] if before is not None else []
        rows.append(row)
    print_table(f"{title}, {after.active:.2f} active experts per token", headings, rows)

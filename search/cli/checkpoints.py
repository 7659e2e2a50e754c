"""`evaluate`, `export` and `import-eep`: what loads a model or a file of coefficients."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Literal

import typer

from moevolve.evaluators.errors import UserError
from moevolve.search.cli._console import (
    DEFAULT_STORE,
    JsonOption,
    ModelOption,
    StoreOption,
    output,
    percent,
    print_json,
    print_table,
)


def register(app: typer.Typer) -> None:
    app.command()(evaluate)
    app.command()(export)
    app.command(name="import-eep")(import_eep)


def evaluate(
    individual: Annotated[str, typer.Argument(metavar="INDIVIDUAL|full", help="SEARCH:INDEX, or the unedited model.")],
    task: Annotated[
        str, typer.Option("--task", help="Any task, or NAME@FITNESS; also one that the search did not use.")
    ],
    split: Annotated[Literal["search", "dev", "test"], typer.Option("--split", help="Which split.")] = "test",
    search: Annotated[str | None, typer.Option("--search", help="Whose full model (with `full`).")] = None,
    model: ModelOption = None,
    store: StoreOption = DEFAULT_STORE,
    as_json: JsonOption = False,
) -> None:
    """Score an individual, or the full model, on one split of a task, in this process. The result is stored."""
    from moevolve.search.loop.scores import interval
    from moevolve.search.service.evaluate import evaluate_subject, find_subject
    from moevolve.store.repository import Store

    with Store.open(store, create=False) as opened:
        subject = find_subject(opened, individual, search, model)
        record = evaluate_subject(opened, subject, task, split)
    bounds = None if record.score is None else interval(record)
    if as_json:
        print_json(
            {
                "id": individual,
                "task": record.task,
                "split": record.split,
                "score": record.score,
                "interval": bounds,
                "gold_logprob": record.gold_logprob,
                "examples": record.examples_seen,
                "failure": record.failure,
                "seconds": record.seconds,
            }
        )
        return
    if record.score is None or bounds is None:
        output.print(f"{individual} failed on {record.task} ({record.split}): {record.failure}", markup=False)
        raise typer.Exit(1)
    columns = [
        ("individual", False),
        ("task", False),
        ("split", False),
        ("score", True),
        ("95 % interval", True),
        ("examples", True),
    ]
    shown = f"{percent(bounds[0])} - {percent(bounds[1])}"
    print_table(
        None,
        columns,
        [[individual, record.task, record.split, percent(record.score), shown, str(record.examples_seen)]],
    )


def export(
    individual: Annotated[str, typer.Argument(metavar="INDIVIDUAL", help="SEARCH:INDEX.")],
    target: Annotated[Path, typer.Argument(metavar="DIR", help="New folder of the checkpoint (or a .pth file).")],
    form: Annotated[
        Literal["stock", "native"] | None,
        typer.Option("--form", help="Plain transformers, or with its own code; default: stock where that is exact."),
    ] = None,
    model: ModelOption = None,
    store: StoreOption = DEFAULT_STORE,
    as_json: JsonOption = False,
) -> None:
    """Write an individual as a checkpoint that `transformers` loads; verified by loading it again.

    A target that ends in .pth gets the EEP authors' coefficient file instead.
    """
    from moevolve.search.genomes.registry import parts_of
    from moevolve.search.service.export import export_coefficients, export_individual
    from moevolve.store.repository import Store

    with Store.open(store, create=False) as opened:
        if target.suffix == ".pth":
            if form is not None:
                raise UserError(f"--form {form}: a coefficient file has no form; leave it out")
            if model is not None:
                raise UserError(f"--model {model}: a coefficient file needs no weights; leave it out")
            export_coefficients(opened, individual, target)
            if as_json:
                print_json({"file": target})
            else:
                output.print(f"wrote {target}", highlight=False)
            return
        report = export_individual(opened, individual, target, form, model)
        parts = parts_of([opened.individual(individual).search.genome_kind])
    if as_json:
        print_json(report)
        return
    output.print(
        f"wrote {report.directory} ({report.form} checkpoint, {report.experts} {parts}, {report.active} active, "
        f"{report.parameters:,} parameters, {report.size_bytes / 2**20:.1f} MiB); reloaded, its logits agree within "
        f"{report.agreement.accepted_difference:.2g}",
        highlight=False,
        soft_wrap=True,
    )
    remote = ", trust_remote_code=True" if report.form == "native" else ""
    output.print(
        f'load it with: AutoModelForCausalLM.from_pretrained("{report.directory}"{remote})',
        highlight=False,
        markup=False,
        soft_wrap=True,
    )


def import_eep(
    files: Annotated[list[Path], typer.Argument(metavar="FILE...", help="The EEP authors' coefficient files (.pth).")],
    experts_of: Annotated[
        str,
        typer.Option(
            "--experts-of",
            metavar="MODEL_OR_CONFIG",
            help="What they are for: a checkpoint, a folder with its config.json, or a run configuration.",
        ),
    ],
    active: Annotated[
        int | None, typer.Option("--active", min=1, help="Experts per token; default: the model's.")
    ] = None,
    router_space: Annotated[Literal["probs", "logits"], typer.Option("--router-space")] = "probs",
    store: StoreOption = DEFAULT_STORE,
    as_json: JsonOption = False,
) -> None:
    """Store coefficient files as individuals, one search per file, ready to be shown, evaluated and exported.

    No weights are needed before an individual is run: name them then, with --model.
    """
    from moevolve.search.service.import_eep import import_files

    imported = import_files(files, experts_of, active, router_space, store)
    if as_json:
        print_json(imported)
        return
    rows = [[item.ref, str(item.path), str(item.experts), str(item.groups), item.summary] for item in imported]
    columns = [("individual", False), ("file", False), ("experts", True), ("groups", True), ("genome", False)]
    print_table(None, columns, rows)

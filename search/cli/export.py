"""`export`."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Literal

import typer

import moevolve
from moevolve.search.cli._console import output, print_json
from moevolve.search.cli._options import DEFAULT_STORE, IndividualArgument, JsonOption, ModelOption, StoreOption
from moevolve.search.genomes.registry import parts_of


def export(
    individual: IndividualArgument,
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
    if target.suffix == ".pth":
        if form is not None:
            raise moevolve.UserError(f"--form {form}: a coefficient file has no form; leave it out")
        if model is not None:
            raise moevolve.UserError(f"--model {model}: a coefficient file needs no weights; leave it out")
        moevolve.export_coefficients(individual, target, store=store)
        if as_json:
            print_json({"file": target})
        else:
            output.print(f"wrote {target}")
        return
    report = moevolve.export(individual, target, form=form, model=model, store=store)
    if as_json:
        print_json(report)
        return
    parts = parts_of([moevolve.show(individual, store=store).search.genome_kind])
    output.print(
        f"wrote {report.directory} ({report.form} checkpoint, {report.experts} {parts}, {report.active} active, "
        f"{report.parameters:,} parameters, {report.size_bytes / 2**20:.1f} MiB); reloaded, its logits agree within "
        f"{report.agreement.accepted_difference:.2g}",
        soft_wrap=True,
    )
    remote = ", trust_remote_code=True" if report.form == "native" else ""
    output.print(
        f'load it with: AutoModelForCausalLM.from_pretrained("{report.directory}"{remote})',
        soft_wrap=True,
    )

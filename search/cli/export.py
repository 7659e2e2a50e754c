"""`export`."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Literal

import typer

import moevolve
from moevolve.search.cli._console import output, print_json, told_in_a_line
from moevolve.search.cli._options import (
    DEFAULT_STORE,
    DeviceOption,
    DtypeOption,
    IndividualArgument,
    JsonOption,
    ModelOption,
    StoreOption,
)
from moevolve.search.genomes.registry import parts_of


def export(
    individual: IndividualArgument,
    target: Annotated[Path, typer.Argument(metavar="DIR", help="New folder of the checkpoint (or a .pth file).")],
    form: Annotated[
        Literal["stock", "native"] | None,
        typer.Option("--form", help="Plain transformers, or with its own code; default: stock where that is exact."),
    ] = None,
    model: ModelOption = None,
    device: DeviceOption = None,
    dtype: DtypeOption = None,
    store: StoreOption = DEFAULT_STORE,
    as_json: JsonOption = False,
) -> None:
    """Write an individual as a checkpoint that `transformers` loads; verified layer by layer, from its files.

    A target that ends in .pth gets the EEP authors' coefficient file instead.
    """
    if target.suffix == ".pth":
        if form is not None:
            raise moevolve.UserError(f"--form {form}: a coefficient file has no form; leave it out")
        for option, given in (("model", model), ("device", device), ("dtype", dtype)):
            if given is not None:
                raise moevolve.UserError(f"--{option} {given}: a coefficient file needs no weights; leave it out")
        moevolve.export_coefficients(individual, target, store=store)
        if as_json:
            print_json({"file": target})
        else:
            output.print(f"wrote {target}")
        return
    with told_in_a_line("interrupted; nothing was written", moevolve.ExportError):
        report = moevolve.export(individual, target, form=form, model=model, device=device, dtype=dtype, store=store)
    if as_json:
        print_json(report)
        return
    parts = parts_of([moevolve.show(individual, store=store).search.genome_kind])
    output.print(
        f"wrote {report.directory} ({report.form} checkpoint, {report.experts} {parts}, {report.active} active, "
        f"{report.parameters:,} parameters, {report.size_bytes / 2**20:.1f} MiB); read from its files, all "
        f"{report.agreement.parts} parts agree with the model within {report.agreement.accepted_difference:.2g} "
        f"(most differs: {report.agreement.worst_part})",
        soft_wrap=True,
    )
    remote = ", trust_remote_code=True" if report.form == "native" else ""
    output.print(
        f'load it with: AutoModelForCausalLM.from_pretrained("{report.directory}"{remote})',
        soft_wrap=True,
    )

"""What searches found: asked for, run again, written as checkpoints, drawn."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

from moevolve._arguments import Overrides, asked_of, override_lines, reader_of, store_of

if TYPE_CHECKING:
    from moevolve.evaluators.tasks.config import TaskConfig
    from moevolve.search.loop.standings import Standings
    from moevolve.search.service.analyse import Analysis
    from moevolve.search.service.answers import Answers
    from moevolve.search.service.evaluate import Evaluation
    from moevolve.search.service.import_eep import Imported
    from moevolve.search.service.prompts import AskedRow
    from moevolve.store.reader import StoreReader
    from moevolve.store.records import BestRow, IndividualDetail, LineageGraph, SearchSummary
    from moevolve.store.repository import Store
    from moevolve.workers.export.card import ExportReport
    from moevolve.workers.profiling.report import ProfileReport


def searches(store: str | StoreReader) -> list[SearchSummary]:
    """All searches of a store, oldest first.

    Raises:
        StoreError: no such store.
    """
    with asked_of(store) as opened:
        return opened.searches()


def best(
    store: str | StoreReader,
    *,
    task: str | None = None,
    experts: int | None = None,
    active: int | None = None,
    search: str | None = None,
    by: Literal["dev", "search", "test"] = "dev",
    limit: int = 10,
) -> list[BestRow]:
    """The best configurations per task.

    Args:
        store: where to look.
        task: rank for this task; None ranks for every one.
        experts: only with this many experts, or blocks.
        active: only with this many of them active.
        search: only from this search.
        by: split that ranks; `dev` falls back to `search` for what was not re-ranked.
        limit: rows per task.

    Raises:
        StoreError: no such store or search.

    Example:
        >>> moevolve.best("sqlite:///demo.db", task="demo-calendar", experts=4)[0].ref
        'demo:78'
    """
    with asked_of(store) as opened:
        return opened.best(task, experts=experts, active=active, search=search, limit=limit, by=by)


def show(individual: str, *, store: str | StoreReader) -> IndividualDetail:
    """Everything the store knows of one individual.

    Raises:
        StoreError: no such store or individual.
    """
    with asked_of(store) as opened:
        return opened.individual(individual)


def lineage(
    individual: str, *, store: str | StoreReader, descendants: bool = False, depth: int | None = None
) -> LineageGraph:
    """Where an individual comes from: its ancestors, back to those without parents; or its descendants.

    Args:
        individual: `SEARCH:INDEX`.
        store: where it is.
        descendants: children instead of ancestors.
        depth: at most this many generations.

    Raises:
        StoreError: no such store or individual.
    """
    with asked_of(store) as opened:
        return (opened.descendants if descendants else opened.ancestors)(individual, depth)


def tasks() -> list[TaskConfig]:
    """The tasks that can be named in a configuration, by name.

    Raises:
        UserError: a folder in `MOEVOLVE_TASKS` doesn't exist, or a task's file is wrong.
    """
    from moevolve.evaluators.tasks.registry import list_tasks, load_task

    return [load_task(name) for name in list_tasks()]


def evaluate(
    individual: str,
    task: str,
    *,
    store: str | Store,
    split: Literal["search", "dev", "test"] = "test",
    search: str | None = None,
    model: str | None = None,
    overrides: Overrides = (),
) -> Evaluation:
    """Score an individual, or a full model, on one split of a task, in this process. The result is stored.

    Args:
        individual: `SEARCH:INDEX`, or `full`.
        task: any task, or `NAME@FITNESS`; also one that the search did not use.
        store: where the individual is.
        split: which split.
        search: whose full model, with `full`.
        model: the search's checkpoint (folder or hub id), if it isn't where the store says.
        overrides: of the search's settings of the model and the engine, `KEY=VALUE` or a mapping, for this once. Under
            other settings the store has another evaluation.

    Raises:
        UserError: no such task or split, a bad override, or the model can't be had.
        StoreError: no such store, search or individual.

    Example:
        >>> moevolve.evaluate("demo:78", "demo-count", store="sqlite:///demo.db").interval
        (0.612, 0.695)
    """
    from moevolve.search.service import evaluate as service

    with store_of(store) as opened:
        return service.evaluate(opened, individual, task, split, search, model, override_lines(overrides))


def answers(
    *individuals: str,
    task: str,
    store: str | StoreReader,
    split: Literal["search", "dev", "test"] = "test",
    limit: int | None = None,
    only: Literal["differing", "wrong", "lost", "gained"] | None = None,
    search: str | None = None,
    model: str | None = None,
    device: Literal["auto", "cpu", "cuda"] | None = None,
    dtype: Literal["float32", "bfloat16", "float16"] | None = None,
) -> Answers:
    """What individuals and their full model answer to a task's prompts, whole and side by side. Nothing is stored.

    Args:
        individuals: `SEARCH:INDEX` of one model; or `full` alone.
        task: any task, or `NAME@FITNESS`; also one that the search did not use.
        store: where the individuals are.
        split: which split.
        limit: most rows; without `only`, no more than these are run.
        only: rows where an individual says something else than the full model (`differing`), isn't wholly right
            (`wrong`), or is worth less (`lost`) or more (`gained`) than the full model.
        search: whose full model, with `full`.
        model: the search's checkpoint, if it isn't where the store says.
        device: where to run; None takes the search's, or the CPU if that was a GPU and there is none.
        dtype: of the parameters; None takes the search's.

    Raises:
        UserError: no such task or split, individuals of different models, or one that can't be run.
        StoreError: no such store or individual.

    Example:
        >>> found = moevolve.answers("demo:1", task="demo-calendar", store="sqlite:///demo.db", only="lost")
        >>> [answer.text for answer in found.rows[0].answers]
        ['March', 'December']
    """
    from moevolve.search.service import answers as service

    with reader_of(store) as opened:
        return service.answers(opened, individuals, task, split, limit, only, search, model, device, dtype)


def prompts(
    individual: str,
    task: str,
    *,
    store: str | StoreReader,
    split: Literal["search", "dev", "test"] = "test",
    limit: int | None = None,
    search: str | None = None,
    model: str | None = None,
) -> list[AskedRow]:
    """What a model is asked and what is scored of its answers, chat template and special tokens included.

    No weights are needed, and nothing is run.

    Args:
        individual: `SEARCH:INDEX`, or `full`.
        task: any task, or `NAME@FITNESS`; also one that the search did not use.
        store: where the individual is.
        split: which split.
        limit: most rows.
        search: whose full model, with `full`.
        model: the search's checkpoint, if it isn't where the store says.

    Raises:
        UserError: no such task or split, or the model's config or tokenizer can't be had.
        StoreError: no such store or individual.

    Example:
        >>> moevolve.prompts("demo:1", "demo-calendar", store="sqlite:///demo.db", limit=1)[0].gold
        ' March'
    """
    from moevolve.search.service import prompts as service

    with reader_of(store) as opened:
        return service.prompts(opened, individual, task, split, limit, search, model)


def analyse(
    individual: str,
    task: str,
    *,
    store: str | StoreReader,
    split: Literal["search", "dev", "test"] = "dev",
    tokens: int | None = None,
    model: str | None = None,
) -> Analysis:
    """Count which experts a task's prompts activate, with which weights and which together, before and after.

    Args:
        individual: `SEARCH:INDEX`.
        task: whose prompts to run.
        store: where the individual is.
        split: which split.
        tokens: stop after about so many tokens; None runs all.
        model: the search's checkpoint, if it isn't where the store says.

    Raises:
        UserError: no such task or split, or the individual can't be run.
        StoreError: no such store or individual.
    """
    from moevolve.search.service.analyse import analyse_individual

    with reader_of(store) as opened:
        return analyse_individual(opened, individual, task, split, tokens, model)


def write_analysis(analysis: Analysis, folder: str | Path) -> list[Path]:
    """Write an analysis and its figures into a folder, which is made if need be; `analysis.json` is the first file.

    Raises:
        UserError: the folder can't be written.
    """
    from moevolve.search.service import analyse as service

    return service.write_analysis(analysis, Path(folder))


def profile(
    *models: str,
    store: str | StoreReader | None = None,
    batch_sizes: Sequence[int] = (1, 8, 32),
    prompt_tokens: int | None = None,
    new_tokens: int | None = None,
    task: str | None = None,
    split: Literal["search", "dev", "test"] = "test",
    repeats: int = 5,
    device: Literal["auto", "cpu", "cuda"] = "auto",
    threads: int | None = None,
    search: str | None = None,
    model: str | None = None,
    trust_remote_code: bool = False,
    apart: bool | None = None,
    dtype: Literal["float32", "bfloat16", "float16"] | None = None,
    on_stage: Callable[[str], None] = lambda _: None,
) -> ProfileReport:
    """Measure size, memory and speed of models as plain `transformers` runs them, beside the full model.

    Individuals are exported to a temporary folder first. Nothing is stored.

    Args:
        models: individuals (`SEARCH:INDEX`), `full`, and folders of checkpoints.
        store: where the individuals are; folders need none.
        batch_sizes: sequences at once, ascending.
        prompt_tokens: of arbitrary prompts; None takes half of the model's positions, at most 512.
        new_tokens: decoding steps after the prompt; None takes the task's `max_new_tokens`, or 32 without one.
        task: whose prompts to run, with or without `@FITNESS`; None takes arbitrary tokens.
        split: of the task.
        repeats: timed runs per batch size; medians count.
        device: where to run.
        threads: of torch on the CPU; None takes its own.
        search: whose full model, with `full`.
        model: the search's checkpoint, if it isn't where the store says.
        trust_remote_code: let modelling code in a checkpoint's folder run.
        apart: one model in memory at a time; then drift isn't shared. None does so unless there is ample room for all.
        dtype: of the parameters; None takes the search's, or that of each folder where there are no others.
        on_stage: told what happens meanwhile.

    Raises:
        UserError: a folder is none, models are of different searches' models, or can't be profiled like that.
        StoreError: no such store, search or individual.
        ProfileError: a model's process died, or an export isn't what was measured.
    """
    from moevolve.search.service import profile as service

    request = service.ProfileRequest(
        models,
        tuple(batch_sizes),
        prompt_tokens,
        new_tokens,
        repeats,
        task,
        split,
        search,
        device,
        threads,
        trust_remote_code,
        apart,
        model,
        dtype,
    )
    if not request.stored:
        return service.profile(request, None, on_stage)
    if store is None:
        from moevolve.evaluators.errors import UserError

        raise UserError(f"{request.stored[0]}: say in which store it is")
    with reader_of(store) as opened:
        return service.profile(request, opened, on_stage)


def export(
    individual: str,
    directory: str | Path,
    *,
    store: str | Store,
    form: Literal["stock", "native"] | None = None,
    model: str | None = None,
    device: Literal["auto", "cpu", "cuda"] | None = None,
    dtype: Literal["float32", "bfloat16", "float16"] | None = None,
) -> ExportReport:
    """Write an individual as a checkpoint that `transformers` loads; verified layer by layer, from its files.

    Args:
        individual: `SEARCH:INDEX`.
        directory: new folder of the checkpoint.
        store: where the individual is; the export is recorded there.
        form: plain transformers, or with its own code; None takes `stock` where that is exact.
        model: the search's checkpoint, if it isn't where the store says.
        device: where the model is held meanwhile; None takes the search's, or the CPU if that was a GPU and there is
            none.
        dtype: of the checkpoint; None takes the search's.

    Raises:
        ExportError: the checkpoint failed its verification; its files are kept as `DIRECTORY.unverified`.
        UserError: the folder is taken, the model can't be had, or the form can't express the individual.
        StoreError: no such store or individual.

    Example:
        >>> moevolve.export("demo:78", "./smaller", store="sqlite:///demo.db").form
        'stock'
    """
    from moevolve.search.service.export import export_individual

    with store_of(store) as opened:
        return export_individual(opened, individual, Path(directory), form, model, device, dtype)


def export_coefficients(individual: str, path: str | Path, *, store: str | StoreReader) -> None:
    """Write an EEP individual as a coefficient file (.pth) of the EEP authors' format.

    Raises:
        UserError: the file exists, or the individual can't be said in one.
        StoreError: no such store or individual.
    """
    from moevolve.search.service import export as service

    with reader_of(store) as opened:
        service.export_coefficients(opened, individual, Path(path))


def import_eep(
    *files: str | Path,
    experts_of: str,
    store: str | Store,
    active: int | None = None,
    router_space: Literal["probs", "logits"] = "probs",
    overrides: Overrides = (),
) -> list[Imported]:
    """Store the EEP authors' coefficient files as individuals, one search per file. A bad file leaves the store alone.

    Args:
        files: coefficient files (.pth).
        experts_of: what they are for: a checkpoint, a folder with its config.json, or a run configuration.
        store: where to, made if need be.
        active: experts per token; None keeps the model's.
        router_space: whether the router mappings are meant for probabilities or logits.
        overrides: of settings of the model and the engine that the individuals are evaluated with, `KEY=VALUE` or a
            mapping. Without a run configuration the originals stay on the host, in the checkpoint's dtype, and prompts
            for a Mixtral are wrapped as the authors do it.

    Raises:
        UserError: a file can't be read or doesn't fit the model.
        StoreError: the store can't be opened.
    """
    from moevolve.search.service.import_eep import read_files, store_files

    read = read_files([Path(file) for file in files], experts_of, active, router_space, override_lines(overrides))
    with store_of(store, create=True) as opened:
        return store_files(opened, read)


def plot(search: str, path: str | Path, *, store: str | StoreReader, individual: str | None = None) -> None:
    """Draw a search: score over evaluations, and what was searched of an individual.

    Args:
        search: name or id.
        path: picture to write (.png, .svg, .pdf).
        store: where the search is.
        individual: whose genome to draw; None takes the search's best.

    Raises:
        UserError: there is nothing to draw yet, or the file can't be written.
        StoreError: no such store, search or individual.
    """
    from moevolve.store.reader import StoreReader

    with asked_of(store) as opened:
        if not isinstance(opened, StoreReader):
            opened.plot(search, Path(path), individual)
            return
        from moevolve.search.service.plot import plot_stored

        plot_stored(opened, search, Path(path), individual)


def report(
    search: str,
    path: str | Path,
    *,
    store: str | StoreReader,
    limit: int = 5,
    analysis: Analysis | str | Path | None = None,
) -> Standings:
    """Write a page about a search: scores, figures, lineage, cost, how to do it again. Evaluates nothing.

    Args:
        search: name or id.
        path: HTML file to write.
        store: where the search is.
        limit: how many of the best are listed.
        analysis: of one of its individuals, or the folder that `write_analysis` wrote, to be shown too.

    Returns:
        The final table as the page has it; its `gaps` are what isn't measured.

    Raises:
        UserError: the analysis is of another search, or the file can't be written.
        StoreError: no such store or search.
    """
    from moevolve.store.reader import StoreReader

    with asked_of(store) as opened:
        if not isinstance(opened, StoreReader):
            return opened.report(search, Path(path), limit, analysis)
        from moevolve.search.report.contents import gather
        from moevolve.search.report.page import write_page
        from moevolve.search.service.analyse import read_analysis

        found = read_analysis(Path(analysis)) if isinstance(analysis, str | Path) else analysis
        contents = gather(opened, search, limit, found)
    write_page(contents, Path(path))
    return contents.standings


def as_data(record: Any) -> Any:
    """A record, or a collection of them, as what JSON knows: what the command of the same name prints with `--json`."""
    from moevolve.search.service import data

    return data.as_data(record)

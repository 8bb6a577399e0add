"""`ffedit harness`: general tasks of lm-evaluation-harness, before an edit and after it."""

from __future__ import annotations

from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

import rich_click as click
from click import get_current_context

import ffedit
from ffedit.cli.evaluate import UNLIKE
from ffedit.cli.options import COUNT, FILE, LoadModel, Surface, asking_options, output_options
from ffedit.errors import EditError
from ffedit.files.atomic import check_free

if TYPE_CHECKING:
    from ffedit.benchmark.lm_harness import Harness, Measured
    from ffedit.model.editable import Editable


@click.command()
@output_options
@click.argument("edited", metavar="EDIT|CHECKPOINT")
@click.option("--tasks", required=True, help="Tasks, groups, tags or YAML files, separated by commas.")
@click.option("--include-path", type=FILE, metavar="DIR", help="Folder with your own tasks.")
@click.option("--limit", type=COUNT, help="Number of examples of each task.")
@click.option("--batch-size", default=8, type=COUNT, help="Number of examples in a batch.")
@asking_options
@click.option("--out", type=FILE, metavar="DIR", help="Folder for report.json and report.md.")
@click.option("--force", is_flag=True, help="Replace DIR.")
def harness(
    edited: str,
    tasks: str,
    load_model: LoadModel,
    out: Path | None,
    force: bool,
    surface: Surface,
    **how: Any,
) -> None:
    """Run tasks of lm-evaluation-harness on a model without and with EDIT, or on CHECKPOINT and its base."""
    if out is not None:
        check_free(out, force)

    from ffedit.benchmark.lm_harness import Harness
    from ffedit.display.terminal.lm_harness import figures_table, write_report

    prepared = Harness([name.strip() for name in tasks.split(",") if name.strip()], quiet=surface.quiet, **how)
    measured = _measured(prepared, edited, load_model, surface)
    surface.show(figures_table(measured))
    if out is not None:
        write_report(measured, out, force)
        surface.show(f"Written to {out}.")
    surface.write_json(measured.to_dict())


def _measured(prepared: Harness, edited: str, load_model: LoadModel, surface: Surface) -> Measured:
    """Run the tasks on the base and on the edited model; of two checkpoints, one is in memory at a time."""
    from ffedit.benchmark.lm_harness import Measured
    from ffedit.exporter import history
    from ffedit.loading.load import local_folder

    is_edit = (Path(edited) / "edit.safetensors").is_file()
    edits = [ffedit.Edit.load(Path(edited))] if is_edit else history(local_folder(edited))
    if not edits and get_current_context().params["model"] is None:
        raise EditError(f"{edited}: holds no edit that names its base; give the base with --model")
    base = load_model(edits[0] if edits else None, show=False)
    if any(edit.in_chat for edit in edits) and not base.chat:
        surface.show(UNLIKE)
    if is_edit:
        return prepared.compare(base, edits[0])
    load_model(other=edited, by=partial(_check_tokenizer, base))
    name, before = base.name, prepared.measure(base)
    del base
    return Measured(name, edited, before, prepared.measure(load_model(other=edited)), prepared.limit)


def _check_tokenizer(base: Editable, edited: str, revision: str | None, trust_remote_code: bool, **_: Any) -> None:
    """Check, before either model is run, that a checkpoint has the base's tokenizer."""
    from ffedit.evaluator.evaluate import check_tokenizers
    from ffedit.loading.load import opened, read_tokenizer

    checkpoint = opened(edited, revision, trust_remote_code)
    check_tokenizers(base, checkpoint.name, read_tokenizer(checkpoint), checkpoint.config)

"""`ffedit inspect model`: all memories of a model, in one pass over a text."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING

import rich_click as click
from rich.text import Text

from ffedit.cli.inspecting import corpus_options, stack_options
from ffedit.cli.options import COUNT, FILE, Surface, html_option, output_options

if TYPE_CHECKING:
    from ffedit.inference.corpus import Corpus
    from ffedit.model.editable import Stack


@click.command()
@output_options
@click.argument("folders", nargs=-1, type=FILE, metavar="[FOLDER...]")
@click.option("--out", type=FILE, required=True, metavar="FOLDER", help="Triggers and report; a pass there goes on.")
@click.option("--top", default=50, type=COUNT, help="Triggers of each key.")
@click.option("--positions", default=1000, type=COUNT, help="Positions looked at closely.")
@click.option("--removing", nargs=2, default=(20, 10), type=COUNT, help="Keys, triggers of each.")
@click.option("--merge", is_flag=True, help="Report on what FOLDERs hold together, passes over different texts.")
@click.option("--force", is_flag=True, help="Begin anew, whatever FOLDER holds.")
@corpus_options
@stack_options
@html_option
def model(
    folders: tuple[Path, ...],
    out: Path,
    top: int,
    positions: int,
    removing: tuple[int, int],
    merge: bool,
    force: bool,
    corpus: Corpus,
    load_stack: Callable[[], Stack],
    html: Path | None,
    surface: Surface,
) -> None:
    """Inspect all memories: triggers of every key, what values say, and how layers compose them."""
    if merge != bool(folders):
        raise click.UsageError("--merge and the FOLDERs to merge belong together")

    from ffedit.display.html import save_page
    from ffedit.display.model_folder import prepare, write_report
    from ffedit.display.terminal import model_view
    from ffedit.display.terminal.model_table import model_line
    from ffedit.inspector.memory_pass import Settings, merge_passes
    from ffedit.inspector.model_view import Removing, analyse, inspect_model

    if not merge:
        prepare(out, force)
    stack = load_stack()
    surface.show(model_line(stack))
    with surface.progress() as progress:
        if merge:
            report = analyse(stack, *merge_passes(stack, folders, out, force), Removing(*removing), progress)
        else:
            settings = Settings(top, positions, corpus.seed)
            try:
                report = inspect_model(stack, corpus, out, settings, Removing(*removing), progress)
            except KeyboardInterrupt as interrupt:
                command = "the same command without --force" if force else "the same command"
                raise click.Abort(f"interrupted: {out} keeps what was run; {command} goes on") from interrupt
    written = write_report(out, report)
    surface.show(model_view.model_view(report))
    if html is not None:
        save_page(html, report)
    surface.show(Text(f"Wrote {', '.join(path.name for path in written)} to {out}"))
    surface.write_json(report.to_dict())

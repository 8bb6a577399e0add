"""`ffedit bench`: comparison of editing methods on one model and one data set."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import rich_click as click

import ffedit
from ffedit.cli import options
from ffedit.cli.fact_options import Reading, reading_options
from ffedit.editor.names import check_method_name, method_names
from ffedit.errors import EditError, FactError
from ffedit.facts.fact import Fact
from ffedit.facts.text import counted
from ffedit.files.atomic import write_text

if TYPE_CHECKING:
    from ffedit.benchmark import Mode
    from ffedit.editor.config import EditConfig
    from ffedit.model.editable import Editable


@click.command()
@options.output_options
@click.argument("sources", nargs=-1, required=True, metavar="FACTS...")
@reading_options
@click.option("--methods", default=",".join(method_names()), help="Methods to compare, separated by commas.")
@click.option("--mode", default="single", help="single (facts one by one), batch:N or sequential[:N].")
@click.option(
    "--out",
    type=options.FILE,
    required=True,
    metavar="DIR",
    help="Folder for the results; a run there is resumed.",
)
@click.option("--limit", type=options.COUNT, help="Use the first N facts only.")
@click.option("--where", metavar="NAME=VALUE", help="Use only records in which this field has this value.")
@click.option("--layers", "--layer", default="auto", help="auto, or one layer (4).")
@options.solving_options
@click.option("--text", type=options.FILE, help="Text for drift and perplexity.  [default: sampled text]")
@click.option("--full/--no-full", default=True, help="Also measure sampled text, which takes longest.")
@click.option("--force", is_flag=True, help="Replace the results of another run.")
@options.asking_options
@options.html_option
def bench(
    sources: tuple[str, ...],
    reading: Reading,
    methods: str,
    mode: str,
    out: Path,
    limit: int | None,
    where: str | None,
    layers: str,
    spread: int,
    solving: options.Solving,
    load_model: options.LoadModel,
    html: Path | None,
    surface: options.Surface,
    **how: Any,
) -> None:
    """Write the facts of FACTS into a model by several methods, and measure each before and after."""
    names = [check_method_name(name.strip()) for name in methods.split(",")]

    from ffedit.benchmark import Mode
    from ffedit.benchmark.settings import most_subjects
    from ffedit.benchmark.tables import headline
    from ffedit.display.terminal.model_table import model_line
    from ffedit.display.terminal.scores import headline_table

    configs = {name: solving.config(name) for name in names}
    workers, parsed = options.join(surface), Mode.parse(mode)
    field, _, value = (where or "").partition("=")
    sifted = reading.sift(
        sources,
        surface,
        together=parsed.name != "single",
        in_sequence=parsed.name == "sequential",
        where=None if where is None else (field, value),
    )
    facts = sifted.facts[:limit]
    text = solving.text(most_subjects(facts, parsed))
    editable = load_model(show=False)
    chosen = _highest_and_below(layers, spread, len(editable.layers))
    surface.show(model_line(editable))
    if not surface.quiet:
        surface.show(_expected(editable, facts, configs, parsed, chosen, workers.size))
    try:
        with surface.progress() as progress:
            report = ffedit.bench(
                editable,
                facts,
                names,
                mode,
                out,
                layers=chosen,
                spread=spread,
                config=configs,
                stats=solving.stats(text, editable),
                process_group=workers,
                progress=progress,
                unusable=[{"record": number, "reason": reason} for number, reason in sifted.left_out],
                **how,
            )
    except KeyboardInterrupt as interrupt:
        raise click.Abort(
            f"interrupted: {out} keeps the results so far; the same command resumes the run"
        ) from interrupt
    missing = len(report.failures) + len(report.unusable)
    reasons = f"; {missing} could not be measured, for reasons that it gives" if missing else ""
    surface.show(headline_table(headline(report)), f"{out / 'report.md'} has all tables{reasons}")
    told = report.to_dict()
    surface.write_json({**told, "left_out": [*told["left_out"], *(kind.to_dict() for kind in sifted.by_kind)]})
    if html is not None and workers.first:
        from ffedit.cli.result import command_line
        from ffedit.display.html.bench import bench_page

        write_text(html, bench_page(report, command_line()))
    workers.disband()


def _expected(
    editable: Editable,
    facts: Sequence[Fact],
    configs: Mapping[str, EditConfig],
    mode: Mode,
    layers: Sequence[int] | None,
    processes: int,
) -> str | None:
    """Say how long the run takes, where nothing of it is there yet; facts that do not fit the model are left to it."""
    from ffedit.benchmark.estimate import bench_seconds
    from ffedit.display.terminal.tables import duration

    try:
        seconds = bench_seconds(editable, facts, configs, mode, layers or ()) / processes
    except FactError:
        return None
    of = f"{counted(len(facts), 'fact')} by {', '.join(configs)}"
    return f"About {duration(seconds)} for {of}, estimated from timed passes; an interrupted run is resumed."


def _highest_and_below(text: str, spread: int, depth: int) -> range | None:
    """Parse `--layers` and `--spread` into one layer and those below it; None for `auto`."""
    if text == "auto":
        return None
    if len(layers := options.parse_layers(text, depth)) > 1 or text in ("sweep", "trace"):
        raise EditError(f"--layers {text}: all facts are written to one layer, and --spread below it; give auto or one")
    from ffedit.layer_choice.choose import spread_below

    return spread_below(layers[0], spread)

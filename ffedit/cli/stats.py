"""`ffedit stats`: second moments of keys, collected once for many edits."""

from __future__ import annotations

from dataclasses import fields
from pathlib import Path
from typing import TYPE_CHECKING, Any

import rich_click as click

import ffedit
from ffedit.cli import options
from ffedit.cli.options import FILE, SEED, LoadModel, Surface, model_options, output_options, parse_layers
from ffedit.errors import EditError
from ffedit.files.atomic import check_free
from ffedit.inference.corpus import Corpus

if TYPE_CHECKING:
    from ffedit.model.editable import Editable

POSITIVE = click.FloatRange(0, min_open=True)


@click.command()
@output_options
@click.argument("folders", nargs=-1, type=FILE, metavar="[FOLDER...]")
@click.option(
    "--corpus",
    help="Text file, .jsonl, .json, dataset NAME[:CONFIG[:SPLIT]], or `sampled` from the model.  [default: neutral]",
)
@click.option("--tokens", default=16_384, type=click.IntRange(2), help="Most tokens of the text to read.")
@click.option("--layers", default="auto", help="auto (the layer that `apply` edits), one layer (4) or a range (3-8).")
@click.option(
    "--tolerance", type=POSITIVE, help="Stop when more text would spare other text at most this share of an edit."
)
@click.option("--weighting", type=click.Choice(["types", "tokens"]), default="tokens")
@click.option("--seed", default=0, type=SEED, help="Seed of the sampled text.")
@click.option("--merge", is_flag=True, help="Add up the statistics in FOLDERs, collected on different texts.")
@click.option("--out", type=FILE, metavar="FOLDER", help="Folder for the statistics, to be used with `apply --stats`.")
@click.option("--force", is_flag=True, help="Replace FOLDER.")
@options.PUSH
@model_options
def stats(
    folders: tuple[Path, ...],
    merge: bool,
    layers: str,
    tolerance: float | None,
    out: Path | None,
    force: bool,
    hub: str | None,
    load_model: LoadModel,
    surface: Surface,
    **text: Any,
) -> None:
    """Collect the second moments of the keys of a text at some layers, in one pass over it."""
    if merge != bool(folders) or (merge and out is None):
        raise click.UsageError("--merge, the FOLDERs to add up and --out belong together")
    if hub is not None and out is None:
        raise click.UsageError("--push-to-hub uploads what --out writes; add --out FOLDER")
    if out is not None:
        check_free(out, force)

    from ffedit.display.terminal.statistics import moments_table, shortage

    group = options.join(surface)
    if merge:
        collected, why, short = ffedit.merge_stats(folders), "", None
    else:
        corpus = Corpus(text.pop("corpus"), **text)
        corpus.check()
        editable = load_model()
        chosen, why = _layers(editable, layers)
        with surface.progress() as progress:
            collected = ffedit.collect_stats(
                editable, chosen, corpus=corpus, tolerance=tolerance, progress=progress, process_group=group
            )
        short = shortage(collected, corpus, tolerance)
    group.disband()
    if not group.first:
        return
    if out is not None:
        ffedit.save_stats(collected, out, force=force)
    surface.show(moments_table(collected, why, out), short)
    names = [field.name for field in fields(ffedit.KeyMoments) if field.init and field.name not in ("sum", "probes")]
    rows = [{name: getattr(moments, name) for name in names} for moments in collected.values()]
    surface.write_json({"layers": rows})
    surface.show(options.pushed(out, hub))


def _layers(editable: Editable, asked: str) -> tuple[list[int], str]:
    """Return the layers to collect and the reason."""
    if asked in ("sweep", "trace"):
        raise EditError(f"--layers {asked} needs facts; for statistics give auto, one layer (4) or a range (3-8)")
    if asked != "auto":
        return [*parse_layers(asked, len(editable.layers))], f"Layers {asked}, as asked"

    from ffedit.layer_choice.published import auto_layer

    auto = auto_layer(editable)
    return [auto.layer], f"Layer {auto.layer}: {auto.why}"

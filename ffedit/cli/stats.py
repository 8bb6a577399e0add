"""`ffedit stats`: second moments of keys, collected once for many edits."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import rich_click as click

from ffedit.cli import work
from ffedit.cli.options import FILE, SEED, model_options, output_options
from ffedit.files.atomic import check_free
from ffedit.inference.corpus import Corpus


@click.command()
@output_options
@click.option(
    "--corpus",
    help="Text file, .jsonl, .json, dataset NAME[:CONFIG[:SPLIT]], or `sampled` from the model.  [default: neutral]",
)
@click.option("--tokens", default=16_384, type=click.IntRange(2), help="Number of tokens to read, at most.")
@click.option("--layers", default="auto", help="auto (the layer that `apply` edits), one layer (4) or a range (3-8).")
@click.option("--seed", default=0, type=SEED, help="Seed of the sampled text.")
@click.option("--out", type=FILE, metavar="FOLDER", help="Folder for the statistics, to be used with `apply --stats`.")
@click.option("--force", is_flag=True, help="Replace FOLDER.")
@model_options
def stats(corpus: str | None, tokens: int, seed: int, out: Path | None, force: bool, **kwargs: Any) -> None:
    """Collect the second moments of a text's keys at one or several layers, in one pass."""
    text = Corpus(corpus, tokens, seed)
    text.check()
    if out is not None:
        check_free(out, force, folder=True)
    work.stats(corpus=text, out=out, force=force, **kwargs)

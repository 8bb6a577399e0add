"""`ffedit locate`: causal tracing of facts."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import rich_click as click

from ffedit.cli import options, work
from ffedit.cli.fact_options import fact_options
from ffedit.display.figures.saving import check_plot
from ffedit.errors import EditError
from ffedit.facts.fact import Fact

KINDS = {
    "feed-forward": ("feed_forward",),
    "state": ("state",),
    "attention": ("attention",),
    "all": ("state", "feed_forward", "attention"),
}
SEVERS = {
    "none": (None,),
    "feed-forward": ("feed_forward",),
    "attention": ("attention",),
    "all": (None, "feed_forward", "attention"),
}


@click.command()
@options.output_options
@fact_options
@options.asking_options
@click.option("--layers", default="all", help="Layers to restore: all, N, or A-B.")
@click.option("--kind", default="feed-forward", type=click.Choice(list(KINDS)), help="Outputs to restore.")
@click.option(
    "--window", type=options.COUNT, help="Layers restored together.  [default: a third of the depth, 3 to 10]"
)
@click.option(
    "--sever", default="none", type=click.Choice(list(SEVERS)), help="Keep this module at its corrupted output."
)
@click.option(
    "--corruption",
    default="gaussian",
    type=click.Choice(["gaussian", "covariance", "uniform", "replacement"]),
    help="Noise added to the subject's embeddings, or replacement by another subject.",
)
@click.option(
    "--noise", default=3.0, type=click.FloatRange(0, min_open=True), help="Size of the noise, in σ of the embeddings."
)
@click.option(
    "--noise-scale",
    default="vocabulary",
    type=click.Choice(["vocabulary", "subjects"]),
    help="Embeddings from which σ is estimated: the whole vocabulary, or the subjects in FACTS, as in ROME's code.",
)
@click.option("--samples", default=10, type=options.COUNT, help="Number of corrupted runs.")
@click.option(
    "--metric",
    default="probability",
    type=click.Choice(["probability", "log-probability", "logit-difference"]),
    help="Measure of the answer.",
)
@click.option(
    "--leak", is_flag=True, help="Map how far an edit of one fact at each site reaches, and leaks to other names."
)
@click.option("--aggregate", "averaged", is_flag=True, help="Average over facts by the role of the token.")
@options.number_options
@click.option("--plot", type=options.FILE, help="Draw the traces as PNG, SVG or PDF.")
def locate(
    facts: list[Fact],
    *,
    layers: str,
    kind: str,
    sever: str,
    corruption: str,
    noise: float,
    noise_scale: str,
    metric: str,
    leak: bool,
    averaged: bool,
    solving: options.Solving,
    plot: Path | None,
    **kwargs: Any,
) -> None:
    """Trace where a model recalls the facts of FACTS (files of any shape, a data set, or -)."""
    measurements: Any = [(restored, severed) for restored in KINDS[kind] for severed in SEVERS[sever]]
    if plot is not None:
        check_plot(plot)
    if layers != "all" and averaged:
        raise EditError("--aggregate takes all layers; leave --layers out")
    if leak and (averaged or len(facts) != 1):
        raise EditError(f"--leak takes one fact, found {len(facts)}; name one, without --aggregate")
    if not leak and (solving.settings or solving.preset_name != "default"):
        raise EditError("--set and --preset apply to the edits of a leak map; add --leak")
    corrupted = f"{corruption}:{noise}:{noise_scale}"
    metric = metric.replace("-", "_")
    kwargs |= {"corruption": corrupted, "metric": metric, "averaged": averaged, "leak": leak, "solving": solving}
    work.locate(facts, measurements, layers=layers, plot=plot, **kwargs)

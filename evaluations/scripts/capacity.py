"""Measure how many facts one layer holds: the first facts of a batch, as more are written beside them.

    python evaluations/scripts/capacity.py RUN [--counts 50,100,200,400,600,800,1000] [--out FILE.json]
        [--plot FILE.png]

RUN is the folder of `ffedit bench FACTS --mode batch:N` with `memit` at one layer. Its values depend neither on the
method nor on other facts, so for each count each method solves anew for that many keys and values, from the first on.
The first `WATCHED` facts are measured each time, and the tasks of `collateral.py`.
"""

from __future__ import annotations

import json
from bisect import bisect_left
from collections.abc import Iterator, Mapping, Sequence
from itertools import accumulate
from pathlib import Path
from typing import Any

import click
from collateral import Collateral
from common import keep
from one_by_one import written

import ffedit
from ffedit.algebra.key_moments import KeyMoments
from ffedit.algebra.low_rank import LowRank
from ffedit.display.figures.saving import save_figure
from ffedit.editor.job import Problem
from ffedit.editor.key import LayerKeys, build_prompts, read_keys, without_sinks
from ffedit.editor.methods import METHODS, config_from_dict
from ffedit.editor.name_keys import name_moments
from ffedit.editor.protect import beginning_keys
from ffedit.evaluator import Evaluation, FactScores, mean_scores
from ffedit.facts.fact import by_subject

WATCHED = 50
SHOWN = ("efficacy", "paraphrase", "specificity", "generation")
METHODS_COMPARED = ("memit", "alphaedit")


def solutions(
    editable: ffedit.Editable, values: ffedit.Edit, stats: Mapping[ffedit.Address, KeyMoments], counts: Sequence[int]
) -> Iterator[tuple[int, str, dict[ffedit.Address, LowRank], float]]:
    """Solve for the first facts by each method; a subject's facts stay together.

    Yields:
        number of facts, method, update by address, and ‖Δ‖ / ‖W‖.
    """
    ((at, keys),) = values.keys.items()
    ff, config = editable.feed_forward[at.layer], config_from_dict(values.provenance["config"])
    groups = by_subject(values.facts)
    assert [group[0].subject for group in groups] == values.subjects(at)
    all_keys = read_keys(editable, ff, without_sinks(editable, ff, build_prompts(editable, groups, config)))
    moments = name_moments(editable, [ff], values.subjects(at), config.key)
    names = moments.get(at.layer)
    kept = beginning_keys(editable, [ff])[at.layer] if config.key.keep_beginning else keys[:, :0]
    ends = list(accumulate(len(group) for group in groups))
    for count in counts:
        n = min(bisect_left(ends, count) + 1, len(groups))
        K, V = keys[:, :n].double(), values.values[at][:, :n].double()
        layer_keys = LayerKeys(all_keys.K[:, :n], all_keys.streams[:, :n], all_keys.same[:n], all_keys.shares[:n])
        spread = layer_keys.context_spread(config.key.context_weight)
        for method in METHODS_COMPARED:
            names_counted = names if METHODS[method].names else None
            problem = Problem(ff.matrix, K, V, [stats[at]], spread, kept.double(), config, names_counted)
            delta = METHODS[method].solve(problem)
            yield ends[n - 1], method, {at: delta}, delta.norm() / float(ff.matrix.norm())


def draw(rows: Sequence[dict[str, Any]], title: str) -> Any:
    """Draw one panel for each score and task, with a line for each method."""
    from matplotlib.figure import Figure

    names = ("efficacy", "paraphrase", "specificity", "agreement", "sequences", "perplexity")
    figure = Figure(figsize=(9.6, 5.2), layout="constrained")
    panels = figure.subplots(2, 3, sharex=True)
    for panel, name in zip(panels.flat, names, strict=True):
        for method, colour in zip(METHODS_COMPARED, ("#0072b2", "#d55e00"), strict=True):
            points = [row for row in rows if row["method"] == method]
            panel.plot([p["facts"] for p in points], [p[name] for p in points], "o-", color=colour, label=method)
        panel.axhline(rows[0][name], color="#000000", linestyle=":", label="before")
        panel.set_title(name, fontsize="medium")
        panel.grid(alpha=0.3)
        panel.spines[["top", "right"]].set_visible(False)
    for panel in panels[1]:
        panel.set_xlabel("facts written")
    panels[0, 0].legend(frameon=False, fontsize="small")
    figure.suptitle(title, fontsize="medium")
    return figure


@click.command(help=__doc__)
@click.argument("run", type=click.Path(exists=True, file_okay=False, path_type=Path))
@click.option("--counts", default="50,100,200,400,600,800,1000", show_default=True)
@click.option("--out", type=click.Path(path_type=Path), help="Results as JSON.")
@click.option("--plot", type=click.Path(path_type=Path), help="The curves.")
def main(run: Path, counts: str, out: Path | None, plot: Path | None) -> None:
    """Solve, measure, show."""
    setup = json.loads((run / "manifest.json").read_text(encoding="utf-8"))["run"]
    name = setup["model"]["name"]
    (folder,) = (run / "edits").glob("values-*/00000")
    values = ffedit.Edit.load(folder)
    (layer,) = values.layers
    editable = ffedit.load(name)
    stats = ffedit.collect_stats(editable, layer, corpus=ffedit.Corpus(tokens=setup["statistics"][str(layer)]["count"]))
    watched = [fact for group in by_subject(values.facts) for fact in group][:WATCHED]
    evaluation, collateral = Evaluation(editable, watched), Collateral(editable)
    rows = [{"method": "before", "facts": 0, **scores_of(evaluation.before), **collateral.measure()}]
    numbers = [int(count) for count in counts.split(",")]
    for facts, method, updates, ratio in solutions(editable, values, stats, numbers):
        with written(editable, updates):
            row = {"method": method, "facts": facts, "norm_ratio": ratio, **scores_of(evaluation.scores())}
            rows.append({**row, **collateral.measure()})
        print(
            "  ".join(f"{name} {v if isinstance(v, str) else f'{v:.4g}'}" for name, v in rows[-1].items()), flush=True
        )
    if out is not None:
        keep(out, {"model": name, "layer": layer, "watched": WATCHED, "rows": rows})
    if plot is not None:
        plot.parent.mkdir(parents=True, exist_ok=True)
        title = f"{name}, layer {layer}: the first {WATCHED} facts, as more are written"
        save_figure(plot, lambda: draw(rows, title))


def scores_of(scored: Sequence[FactScores]) -> dict[str, float | None]:
    """Return the means of the shown scores."""
    means = mean_scores(fact.scores for fact in scored)
    return {name: getattr(means, name) for name in SHOWN}


if __name__ == "__main__":
    main()

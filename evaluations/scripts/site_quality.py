"""Test whether a site's effect, reach or leak predicts the quality of edits made there.

    python evaluations/scripts/site_quality.py run --models DIR --out OUT [--model NAME ...] [--set NAME=VALUE ...]
    python evaluations/scripts/site_quality.py report --out OUT [--out OUT ...] [--into FILE.md]

A site is a token and a layer. Development facts of each model of `MODELS` are traced (`ffedit.locate`) and mapped
(`ffedit.site_map`, which does not get the neighbors that are asked afterwards), then edited at several layers, at the
subject's last token and, if it is another one, at the token with the largest effect; each edit is undone before the
next. Quality is by what greedy generation says (`one_by_one.FOUR`): the mean of a fact's four rates, and their harmonic
mean, which is 0 if one of them is 0.

Hase et al. (2023, arXiv 2301.04213) found no correlation of the traced effect with the success of edits, over layers at
the subject's last token. The report gives Spearman's rank correlation of quality with the effect, with minus the
distance from a quarter of the depth, with reach, with minus the leak, and with a linear function of the share of the
total effect, reach and the logarithm of the leak, fitted on the first model and tested on the others. Per fact: over
the sites of a fact, mean over facts; pooled: over the sites of all facts. Intervals are over subjects. Then it gives
the quality of edits at the site of each fact that is best by each of these predictors. Each model's results are a
journal in OUT; a second run resumes.
"""

from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from statistics import fmean, harmonic_mean
from typing import Any

import click
import numpy as np
from common import DATA_FOLDER
from numpy.typing import ArrayLike
from one_by_one import DRAWS, FOUR, SEED, Columns, Examiner, facts_in, interval, name_of, named, shown, timed

import ffedit
from ffedit import Editable, EditConfig, Fact
from ffedit.algebra import bootstrap
from ffedit.benchmark.settings import held_out
from ffedit.editor.methods import set_numbers
from ffedit.editor.statistics import text_for
from ffedit.evaluator import generations
from ffedit.files.resuming import Journal, read_journal
from ffedit.layer_choice.calibrate import in_turn


@dataclass(frozen=True)
class Model:
    """A real model, its development facts, and the layers to compare."""

    facts: str  # a file of `evaluations/data`
    layers: tuple[int, ...]
    limit: int  # number of facts
    depth: int


MODELS = {
    "smollm2": Model("smollm2-counterfact.json", (2, 5, 8, 11, 14, 17), 12, 30),
    "gemma3-270m": Model("gemma-counterfact.json", (1, 3, 4, 6, 8, 10), 8, 18),
    "qwen2.5-1.5b": Model("qwen-counterfact.json", (3, 5, 7, 9, 12, 16), 15, 28),
}
SAMPLES = 10  # corrupted runs of a trace
MEASURED = ("reach", "reach_least", "leak", "leak_high", "leak_look_alikes")
FITTED = ("share of the effect", "reach", "log leak")
Row = Mapping[str, Any]


@click.group(help=__doc__)
def main() -> None:
    """Edit at many sites, and compare predictors of the quality."""


# Run ----------------------------------------------------------------------------------------------


@main.command()
@click.option("--models", type=click.Path(exists=True, path_type=Path), required=True, help="Folder of gguf/NAME.gguf.")
@click.option("--model", "chosen", multiple=True, type=click.Choice(list(MODELS)), help="Only these.")
@click.option("--layer", "layers", type=int, multiple=True, help="Only these layers, of one model.")
@click.option("--limit", type=int, help="Number of facts, instead of the model's own.")
@click.option("--share", nargs=2, type=int, default=(0, 1), help="I N: every N-th of these facts, from the I-th.")
@click.option("--set", "settings", multiple=True, metavar="NAME=VALUE", help="A setting of the edits.")
@click.option("--out", type=click.Path(path_type=Path), required=True, help="Folder of the results.")
def run(
    models: Path,
    chosen: tuple[str, ...],
    layers: tuple[int, ...],
    limit: int | None,
    share: tuple[int, int],
    settings: tuple[str, ...],
    out: Path,
) -> None:
    """Trace, map and edit."""
    config = set_numbers(ffedit.EditConfig(), settings)
    for name in chosen or tuple(MODELS):
        model = MODELS[name]
        model = replace(model, layers=layers or model.layers, limit=limit or model.limit)
        editable = ffedit.load(models / "gguf" / f"{name}.gguf")
        text = text_for(editable, 1, config.seed)
        header = {"model": name, "layers": model.layers, "samples": SAMPLES, "tokens": text.tokens}
        journal = Journal(out / f"{name}.jsonl", {**header, "config": config.to_dict()})
        stats = ffedit.collect_stats(editable, model.layers, corpus=text)
        facts = in_turn(facts_in(DATA_FOLDER / model.facts, "development", probed=True))[: model.limit]
        for fact in facts[share[0] :: share[1]]:
            lines = [line for line in journal.lines if line["fact"] == name_of(fact)]
            if not lines or len(lines) < lines[0]["sites"]:
                edit_at_sites(editable, fact, model.layers, config, stats, journal)
            print(name, name_of(fact), len(journal.lines), flush=True)


def edit_at_sites(
    editable: Editable,
    fact: Fact,
    layers: Sequence[int],
    config: EditConfig,
    stats: Mapping[ffedit.Address, Any],
    journal: Journal,
) -> None:
    """Edit one fact at each site that is not in the journal yet, and write a line for each."""
    finished = {(line["layer"], line["token"]) for line in journal.lines if line["fact"] == name_of(fact)}
    trace = ffedit.locate(editable, fact, layers=layers, tokens="subject_and_last", samples=SAMPLES)
    mapped = ffedit.site_map(editable, replace(fact, neighbors=()), layers=layers, config=config, stats=stats)
    effects = trace.effects[:, slice(*trace.subject)]
    peak = int(np.nanargmax(np.nanmax(effects, 0))) - effects.shape[1]  # from −1 at the subject's end
    # A token that an edit cannot name is not measured.
    tokens = [
        token for token in dict.fromkeys((-1, peak)) if not np.isnan(mapped.leak[layers[0], trace.subject[1] + token])
    ]
    sites, examiner = [(token, layer) for token in tokens for layer in layers], Examiner(editable)
    for token, layer in sites:
        position = trace.subject[1] + token
        if (layer, token) in finished:
            continue
        numbers = replace(config, key=replace(config.key, fact_token=token))
        spent: dict[str, float] = {}
        with timed(spent):
            try:
                updates = ffedit.edit(
                    editable, [fact], "memit", layers=[layer], config=held_out(numbers, [fact]), stats=stats
                ).updates
            except ffedit.EditError:
                updates = {}  # counts as an edit that changes nothing
        ((before, after, says),) = examiner.scores([fact], updates)
        journal.add(
            {
                **{**named(fact), "layer": layer, "token": token, "peak": token == peak, "last": token == -1},
                "sites": len(sites),
                **{"effect": trace.effects[layer, position], "total": trace.total, "known": trace.known},
                **{name: float(getattr(mapped, name)[layer, position]) for name in MEASURED},
                **{"hits": mapped.hits(layer, position), "before": before, "after": after, "says": says, **spent},
            }
        )


# Report -------------------------------------------------------------------------------------------


@main.command()
@click.option("--out", "outs", type=click.Path(exists=True, path_type=Path), multiple=True, required=True)
@click.option("--into", type=click.Path(path_type=Path), help="A Markdown file to write the tables to, too.")
def report(outs: tuple[Path, ...], into: Path | None) -> None:
    """Show how well each predictor tells the quality of a site; --out for each folder of results."""
    files = {name: [path for out in outs if (path := out / f"{name}.jsonl").exists()] for name in MODELS}
    rows = {name: [row for path in paths for row in rows_of(path, MODELS[name])] for name, paths in files.items()}
    rows = {name: model_rows for name, model_rows in rows.items() if model_rows}
    weights = fitted(next(iter(rows.values())))
    text = "\n".join(tables(rows, weights))
    print(text)
    if into is not None:
        into.write_text(text + "\n", encoding="utf-8")


def rows_of(path: Path, model: Model) -> list[Row]:
    """Read the sites of one model's finished facts, with their predictors and their quality."""
    rows, lines = [], read_journal(path)[1:]
    done = Counter(line["fact"] for line in lines)
    for line in (line for line in lines if done[line["fact"]] == line["sites"]):
        rates = [line["after"][name] for name in FOUR if line["after"][name] is not None]
        leak = max(line["leak_look_alikes"], 1e-3)
        numbers = {
            "share of the effect": line["effect"] / line["total"],
            "reach": line["reach"],
            "log leak": np.log(leak),
        }
        quality = {name: line["after"][name] for name in FOUR}
        quality |= {"mean": fmean(rates), "harmonic": harmonic_mean(rates)}
        quarter = -abs(line["layer"] - model.depth / 4)
        rows.append({**line, "numbers": numbers, "quality": quality, "quarter": quarter})
    return rows


def fitted(rows: Sequence[Row]) -> np.ndarray[Any, Any]:
    """Fit the mean quality of the sites of a fact, less the fact's own mean, by least squares; return the weights."""
    X, y = within(rows, lambda row: [row["numbers"][name] for name in FITTED]), within(rows, quality("mean"))
    return np.linalg.lstsq(X, y, rcond=None)[0]


def quality(name: str) -> Callable[[Row], Any]:
    """Return a function that gives a row's quality of this name."""
    return lambda row: row["quality"][name]


def within(rows: Sequence[Row], value: Callable[[Row], Any]) -> np.ndarray[Any, Any]:
    """Return the values of rows, each less the mean over the sites of its fact."""
    values, facts = np.array([value(row) for row in rows], float), np.array([row["fact"] for row in rows])
    for fact in set(facts.tolist()):
        values[facts == fact] -= values[facts == fact].mean(0)
    return values


def predictors(weights: np.ndarray[Any, Any]) -> dict[str, Callable[[Row], float]]:
    """Return the predictors of a site's quality, each signed so that more should be better."""
    return {
        "effect": lambda row: row["effect"],
        "near a quarter of the depth": lambda row: row["quarter"],
        "reach": lambda row: row["reach"],
        "little leak to look-alikes": lambda row: -row["leak_look_alikes"],
        "little leak to other names (95th percentile)": lambda row: -row["leak_high"],
        "fitted": lambda row: float(weights @ [row["numbers"][name] for name in FITTED]),
    }


def tables(rows_by_model: Mapping[str, Sequence[Row]], weights: np.ndarray[Any, Any]) -> Iterator[str]:
    """Yield the lines of the report, Markdown."""
    first = next(iter(rows_by_model))
    words = ", ".join(f"{weight:+.3f} · {name}" for weight, name in zip(weights, FITTED, strict=True))
    yield f"Fitted on {first}: {words} (quality as the mean of the four rates, within facts).\n"
    for model, sites in rows_by_model.items():
        for which, rows in (("all sites", sites), ("the subject's last token", [row for row in sites if row["last"]])):
            facts, subjects = len({row["fact"] for row in rows}), len({row["subject"] for row in rows})
            yield f"**{model}, {which}**: {len(rows)} edits of {facts} facts, {subjects} subjects.\n"
            yield "| rank correlation with the quality of edits | per fact, mean | per fact, harmonic | pooled, mean |"
            yield "| --- | --- | --- | --- |"
            for name, predict in predictors(weights).items():
                cells = [per_fact(rows, predict, quality("mean")), per_fact(rows, predict, quality("harmonic"))]
                cells.append(pooled(rows, predict, quality("mean")))
                note = " (in sample)" if name == "fitted" and model == first else ""
                yield f"| {name}{note} | {' | '.join(shown(cell, True, 2) for cell in cells)} |"
            yield ""
        yield from by_layer(model, sites)
        yield from by_rate(model, sites, weights)
        yield from taken(model, sites, weights)


def by_layer(model: str, rows: Sequence[Row]) -> Iterator[str]:
    """Yield the quality of edits at the subject's last token by layer, with predictors and paired differences."""
    last = [row for row in rows if row["last"]]
    layers = {layer: [row for row in last if row["layer"] == layer] for layer in sorted({row["layer"] for row in last})}
    yield f"**{model}, the subject's last token**, by layer; means over facts.\n"
    cues = {"share of the effect": lambda row: row["numbers"]["share of the effect"], "reach": lambda row: row["reach"]}
    cues |= {"leak to look-alikes": lambda row: row["leak_look_alikes"]}
    yield f"| layer | {' | '.join(FOUR)} | harmonic mean of these | {' | '.join(cues)} |"
    yield f"|{' --- |' * (len(FOUR) + len(cues) + 2)}"
    for layer, layer_rows in layers.items():
        rates = [rate_mean(layer_rows, rate) for rate in FOUR]
        cells = [*rates, harmonic_mean(rates), *(fmean(value(row) for row in layer_rows) for value in cues.values())]
        yield f"| {layer} | {' | '.join(f'{cell:.2f}' for cell in cells)} |"
    yield ""
    rule = max(last, key=lambda row: (row["quarter"], row["layer"]))["layer"]
    against = columns(layers[rule])
    yield f"**{model}**, the same less layer {rule}, nearest to a quarter of the depth; paired by fact.\n"
    yield f"| layer | {' | '.join(FOUR)} | harmonic mean of these |"
    yield f"|{' --- |' * (len(FOUR) + 2)}"
    for layer, layer_rows in layers.items():
        differences = [interval(columns(layer_rows), name, against) for name in (*FOUR, "harmonic")]
        yield f"| {layer} | {' | '.join(shown(difference, True, 2) for difference in differences)} |"
    yield ""


def columns(rows: Sequence[Row]) -> Columns:
    """Return the rates, subjects and seconds of rows, as `one_by_one.interval` takes them."""
    rates = {name: [row["after"][name] for row in rows] for name in FOUR}
    return {**rates, "subject": [row["subject"] for row in rows], "seconds": [row["seconds"] for row in rows]}


def by_rate(model: str, rows: Sequence[Row], weights: np.ndarray[Any, Any]) -> Iterator[str]:
    """Yield the correlations per fact with each of the four rates."""
    yield f"**{model}, all sites**, per fact, by rate.\n"
    yield f"| | {' | '.join(FOUR)} |"
    yield f"|{' --- |' * (len(FOUR) + 1)}"
    for name, predict in predictors(weights).items():
        yield f"| {name} | {' | '.join(shown(per_fact(rows, predict, quality(rate)), True, 2) for rate in FOUR)} |"
    yield ""


def rank_correlation(first: ArrayLike, second: ArrayLike) -> float | None:
    """Compute Spearman's rank correlation, ties with their mean rank; None if one side is constant."""
    ranks = []
    for values in (first, second):
        _, rank_of, counts = np.unique(np.asarray(values, float), return_inverse=True, return_counts=True)
        ranks.append((np.cumsum(counts) - (counts - 1) / 2)[rank_of])
    if any(np.ptp(rank) == 0 for rank in ranks):
        return None
    return float(np.corrcoef(ranks[0], ranks[1])[0, 1])


def taken(model: str, rows: Sequence[Row], weights: np.ndarray[Any, Any]) -> Iterator[str]:
    """Yield the quality of edits at each fact's best site by each predictor."""
    ways = {**predictors(weights), "the best, by its own scores": lambda row: row["quality"]["mean"]}
    facts = list(dict.fromkeys(row["fact"] for row in rows))
    yield f"**{model}**: what the site brings that is best for a fact by this number, of all, or at the last token.\n"
    yield f"| | {' | '.join(FOUR)} | harmonic mean of these | the same, last token |"
    yield f"|{' --- |' * (len(FOUR) + 3)}"
    for name, predict in ways.items():
        chosen, last = (
            [max((row for row in sites if row["fact"] == fact), key=predict) for fact in facts]
            for sites in (rows, [row for row in rows if row["last"]])
        )
        rates = [rate_mean(chosen, rate) for rate in FOUR]
        at_last = [rate_mean(last, rate) for rate in FOUR]
        cells = [f"{rate:.2f}" for rate in (*rates, harmonic_mean(rates), harmonic_mean(at_last))]
        yield f"| {name} | {' | '.join(cells)} |"
    yield ""


def rate_mean(rows: Sequence[Row], rate: str) -> float:
    """Return the mean of a rate over the rows where it was measured."""
    return fmean(row["after"][rate] for row in rows if row["after"][rate] is not None)


def per_fact(
    rows: Sequence[Row], predict: Callable[[Row], float], quality: Callable[[Row], float | None]
) -> bootstrap.Interval | None:
    """Return the mean over facts of the rank correlation over a fact's sites, which needs sites that differ."""
    correlations = []
    for fact in dict.fromkeys(row["fact"] for row in rows):
        sites = [row for row in rows if row["fact"] == fact and quality(row) is not None]
        rho = rank_correlation([predict(s) for s in sites], [quality(s) for s in sites]) if len(sites) > 2 else None
        correlations += [(sites[0]["subject"], rho)] if rho is not None else []
    if not correlations:
        return None
    subjects, rhos = zip(*correlations, strict=True)
    drawn = np.concatenate(list(bootstrap.draws(len(rhos), SEED, DRAWS, bootstrap.clusters_of(subjects))))
    return bootstrap.percentile_interval(fmean(rhos), drawn @ np.array(rhos) / drawn.sum(1))


def pooled(
    rows: Sequence[Row], predict: Callable[[Row], float], quality: Callable[[Row], float]
) -> bootstrap.Interval | None:
    """Return the rank correlation over all sites, with an interval over subjects."""
    x, y = (np.array([value(row) for row in rows], float) for value in (predict, quality))
    drawn = np.concatenate(
        list(bootstrap.draws(len(rows), SEED, DRAWS, bootstrap.clusters_of([row["subject"] for row in rows])))
    )
    rhos = [rank_correlation(np.repeat(x, times), np.repeat(y, times)) for times in drawn.astype(int)]
    whole = rank_correlation(x, y)
    if whole is None:
        return None
    return bootstrap.percentile_interval(whole, np.array([np.nan if rho is None else rho for rho in rhos], float))


if __name__ == "__main__":
    generations.TEXT_TOKENS = generations.SAID_TOKENS  # whether the text after the object breaks is not measured
    try:
        main()
    except ffedit.FFEditError as error:
        raise SystemExit(str(error)) from error

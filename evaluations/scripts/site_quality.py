"""Find what tells where an edit is good: a site's effect, reach and leak beside the quality of edits made there.

    python evaluations/scripts/site_quality.py run --models DIR --out OUT [--model NAME ...] [--set NAME=VALUE ...]
    python evaluations/scripts/site_quality.py report --out OUT [--out OUT ...] [--into FILE.md]

A site is a token and a layer. Development facts of each model of `MODELS` are traced (`ffedit.locate`) and mapped
(`ffedit.site_map`, which is not given the neighbors that are asked afterwards), then edited at each of some layers at
the subject's last token and, where it is another, at the token of the largest effect; each edit is undone before the
next. Quality is by what greedy generation says (`one_by_one.FOUR`): the mean of the four rates of a fact, and their
harmonic mean, which is 0 where one of them is.

Hase et al. (2023, arXiv 2301.04213) found no correlation of the traced effect with the success of edits, over layers at
the subject's last token. The report gives Spearman's rank correlation of quality with the effect, with minus the
distance from a quarter of the depth, with reach, with minus the leak, and with a number that is linear in the share of
the total effect, reach and the logarithm of the leak, fitted on the first model and tested on the others. Per fact:
over the sites of a fact, mean over facts; pooled: over the sites of all facts. Intervals are over subjects. Then it
gives the quality that taking the best site of a fact by each of these brings. Each model's results are a journal in
OUT; a second run goes on where the first stopped.
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
from ffedit.evaluator import generations
from ffedit.files.resuming import Journal, read_journal
from ffedit.layer_choice.calibrate import in_turn


@dataclass(frozen=True)
class Model:
    """A real model, its development facts, and the layers that are compared."""

    facts: str  # a file of `evaluations/data`
    layers: tuple[int, ...]
    limit: int  # facts
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
    """Edit at many sites, and compare what tells them apart."""


# Run ----------------------------------------------------------------------------------------------


@main.command()
@click.option("--models", type=click.Path(exists=True, path_type=Path), required=True, help="Folder of gguf/NAME.gguf.")
@click.option("--model", "chosen", multiple=True, type=click.Choice(list(MODELS)), help="Only these.")
@click.option("--layer", "layers", type=int, multiple=True, help="Only these, of one model.")
@click.option("--limit", type=int, help="Another number of facts than the model's own.")
@click.option("--share", nargs=2, type=int, default=(0, 1), help="I N: of these every N-th, from the I-th on.")
@click.option("--set", "settings", multiple=True, metavar="NAME=VALUE", help="Another number of the edits.")
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
        about = {"model": name, "layers": model.layers, "samples": SAMPLES, "config": config.to_dict()}
        journal, stats = Journal(out / f"{name}.jsonl", about), ffedit.collect_stats(editable, model.layers)
        facts = in_turn(facts_in(DATA_FOLDER / model.facts, "development", probed=True))[: model.limit]
        for fact in facts[share[0] :: share[1]]:
            done = [line for line in journal.lines if line["fact"] == name_of(fact)]
            if not done or len(done) < done[0]["sites"]:
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
    """Edit one fact at each site that is not done yet, and write a line for it."""
    done = {(line["layer"], line["token"]) for line in journal.lines if line["fact"] == name_of(fact)}
    trace = ffedit.locate(editable, fact, layers=layers, tokens="subject_and_last", samples=SAMPLES)
    mapped = ffedit.site_map(editable, replace(fact, neighbors=()), layers=layers, config=config, stats=stats)
    own = trace.effects[:, slice(*trace.subject)]
    peak = int(np.nanargmax(np.nanmax(own, 0))) - own.shape[1]  # from −1 at the subject's end
    # A token that an edit cannot name is not measured.
    tokens = [
        token for token in dict.fromkeys((-1, peak)) if not np.isnan(mapped.leak[layers[0], trace.subject[1] + token])
    ]
    sites, examiner = [(token, layer) for token in tokens for layer in layers], Examiner(editable)
    for token, layer in sites:
        position = trace.subject[1] + token
        if (layer, token) in done:
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
    """Show how far each number tells where an edit is good; --out for each folder of results."""
    files = {name: [path for out in outs if (path := out / f"{name}.jsonl").exists()] for name in MODELS}
    rows = {name: [row for path in own for row in rows_of(path, MODELS[name])] for name, own in files.items()}
    rows = {name: own for name, own in rows.items() if own}
    weights = fitted(next(iter(rows.values())))
    text = "\n".join(tables(rows, weights))
    print(text)
    if into is not None:
        into.write_text(text + "\n", encoding="utf-8")


def rows_of(path: Path, model: Model) -> list[Row]:
    """Read the sites of facts of one model that are done, with what may tell them apart and with their quality."""
    rows, lines = [], read_journal(path)[1:]
    done = Counter(line["fact"] for line in lines)
    for line in (line for line in lines if done[line["fact"]] == line["sites"]):
        rates = [line["after"][name] for name in FOUR if line["after"][name] is not None]
        leak = max(line["leak_look_alikes"], 1e-3)
        known = {
            "share of the effect": line["effect"] / line["total"],
            "reach": line["reach"],
            "log leak": np.log(leak),
        }
        quality = {name: line["after"][name] for name in FOUR}
        quality |= {"mean": fmean(rates), "harmonic": harmonic_mean(rates)}
        quarter = -abs(line["layer"] - model.depth / 4)
        rows.append({**line, "numbers": known, "quality": quality, "quarter": quarter})
    return rows


def fitted(rows: Sequence[Row]) -> np.ndarray[Any, Any]:
    """Fit the mean quality of the sites of a fact, less the fact's own mean, by least squares; return the weights."""
    X, y = within(rows, lambda row: [row["numbers"][name] for name in FITTED]), within(rows, quality("mean"))
    return np.linalg.lstsq(X, y, rcond=None)[0]


def quality(name: str) -> Callable[[Row], Any]:
    """Return a function of a row: its quality of this name."""
    return lambda row: row["quality"][name]


def within(rows: Sequence[Row], value: Callable[[Row], Any]) -> np.ndarray[Any, Any]:
    """Return the values of rows, each less the mean over the sites of its fact."""
    values, facts = np.array([value(row) for row in rows], float), np.array([row["fact"] for row in rows])
    for fact in set(facts.tolist()):
        values[facts == fact] -= values[facts == fact].mean(0)
    return values


def predictors(weights: np.ndarray[Any, Any]) -> dict[str, Callable[[Row], float]]:
    """Return what may tell where an edit is good, each so that more should be better."""
    return {
        "effect": lambda row: row["effect"],
        "near a quarter of the depth": lambda row: row["quarter"],
        "reach": lambda row: row["reach"],
        "little leak to look-alikes": lambda row: -row["leak_look_alikes"],
        "little leak to other names (95th percentile)": lambda row: -row["leak_high"],
        "fitted": lambda row: float(weights @ [row["numbers"][name] for name in FITTED]),
    }


def tables(found: Mapping[str, Sequence[Row]], weights: np.ndarray[Any, Any]) -> Iterator[str]:
    """Yield the lines of the report, Markdown."""
    first = next(iter(found))
    words = ", ".join(f"{weight:+.3f} · {name}" for weight, name in zip(weights, FITTED, strict=True))
    yield f"Fitted on {first}: {words} (quality as the mean of the four rates, within facts).\n"
    for model, every in found.items():
        for which, rows in (("all sites", every), ("the subject's last token", [row for row in every if row["last"]])):
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
        yield from by_layer(model, every)
        yield from by_rate(model, every, weights)
        yield from taken(model, every, weights)


def by_layer(model: str, rows: Sequence[Row]) -> Iterator[str]:
    """Yield the quality of edits at the subject's last token by layer, beside what should tell it, and paired."""
    last = [row for row in rows if row["last"]]
    layers = {layer: [row for row in last if row["layer"] == layer] for layer in sorted({row["layer"] for row in last})}
    yield f"**{model}, the subject's last token**, by layer; means over facts.\n"
    told = {"share of the effect": lambda row: row["numbers"]["share of the effect"], "reach": lambda row: row["reach"]}
    told |= {"leak to look-alikes": lambda row: row["leak_look_alikes"]}
    yield f"| layer | {' | '.join(FOUR)} | harmonic mean of these | {' | '.join(told)} |"
    yield f"|{' --- |' * (len(FOUR) + len(told) + 2)}"
    for layer, own in layers.items():
        rates = [rate_mean(own, rate) for rate in FOUR]
        cells = [*rates, harmonic_mean(rates), *(fmean(of(row) for row in own) for of in told.values())]
        yield f"| {layer} | {' | '.join(f'{cell:.2f}' for cell in cells)} |"
    yield ""
    rule = max(last, key=lambda row: (row["quarter"], row["layer"]))["layer"]
    against = columns(layers[rule])
    yield f"**{model}**, the same less layer {rule}, nearest to a quarter of the depth; paired by fact.\n"
    yield f"| layer | {' | '.join(FOUR)} | harmonic mean of these |"
    yield f"|{' --- |' * (len(FOUR) + 2)}"
    for layer, own in layers.items():
        found = [interval(columns(own), name, against) for name in (*FOUR, "harmonic")]
        yield f"| {layer} | {' | '.join(shown(one, True, 2) for one in found)} |"
    yield ""


def columns(rows: Sequence[Row]) -> Columns:
    """Return the rates of some rows, their subjects and seconds, as `one_by_one.interval` takes them."""
    found = {name: [row["after"][name] for row in rows] for name in FOUR}
    return {**found, "subject": [row["subject"] for row in rows], "seconds": [row["seconds"] for row in rows]}


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
    """Yield the quality that taking each fact's best site by a number brings."""
    ways = {**predictors(weights), "the best, by its own scores": lambda row: row["quality"]["mean"]}
    facts = list(dict.fromkeys(row["fact"] for row in rows))
    yield f"**{model}**: what the site brings that is best for a fact by this number, of all, or at the last token.\n"
    yield f"| | {' | '.join(FOUR)} | harmonic mean of these | the same, last token |"
    yield f"|{' --- |' * (len(FOUR) + 3)}"
    for name, predict in ways.items():
        chosen, last = (
            [max((row for row in own if row["fact"] == fact), key=predict) for fact in facts]
            for own in (rows, [row for row in rows if row["last"]])
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
    """Return the mean over facts of the rank correlation over its sites; alike sites have none."""
    found = []
    for fact in dict.fromkeys(row["fact"] for row in rows):
        own = [row for row in rows if row["fact"] == fact and quality(row) is not None]
        rho = rank_correlation([predict(row) for row in own], [quality(row) for row in own]) if len(own) > 2 else None
        found += [(own[0]["subject"], rho)] if rho is not None else []
    if not found:
        return None
    subjects, rhos = zip(*found, strict=True)
    drawn = np.concatenate(list(bootstrap.draws(len(rhos), SEED, DRAWS, bootstrap.clusters_of(subjects))))
    return bootstrap.percentile_interval(fmean(rhos), drawn @ np.array(rhos) / drawn.sum(1))


def pooled(
    rows: Sequence[Row], predict: Callable[[Row], float], quality: Callable[[Row], float]
) -> bootstrap.Interval | None:
    """Return the rank correlation over all sites, with an interval over subjects."""
    x, y = (np.array([of(row) for row in rows], float) for of in (predict, quality))
    drawn = np.concatenate(
        list(bootstrap.draws(len(rows), SEED, DRAWS, bootstrap.clusters_of([row["subject"] for row in rows])))
    )
    rhos = [rank_correlation(np.repeat(x, times), np.repeat(y, times)) for times in drawn.astype(int)]
    whole = rank_correlation(x, y)
    if whole is None:
        return None
    return bootstrap.percentile_interval(whole, np.array([np.nan if rho is None else rho for rho in rhos], float))


if __name__ == "__main__":
    generations.TEXT_TOKENS = generations.SAID_TOKENS  # whether the text behind the object breaks is not asked
    try:
        main()
    except ffedit.FFEditError as error:
        raise SystemExit(str(error)) from error

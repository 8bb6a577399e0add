"""ffedit and its honest rivals on the same facts, one by one: the same layer, the same C, the same questions.

    python evaluations/scripts/compare.py --model smollm2 --data FACTS.json --split reporting --layer 2 --out DIR

Each fact is edited by each way, measured, and undone before the next; DIR holds a file of results for each way, and
report.md and report.json. A second run goes on where the first stopped. Seconds are those of the edit alone, and of
processors, since other work on the machine changes those of the clock: what is done once for a model (key statistics,
prefixes, and ffedit's first edit, which fills its caches) is told beside them.
Differences are ffedit's minus the rival's, paired by fact. --published-rate is Adam's rate of the published procedure,
chosen on development facts as ffedit's numbers are (docs/results.md); with --together N ffedit also writes N facts in
one edit. --way published-code runs the published code itself, from a checkout (evaluations/scripts/published_code.py).
"""

import itertools
import json
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from statistics import median
from typing import Any

import click
import torch
from answers import Answers
from common import keep, sharing
from one_by_one import (
    RATES,
    Columns,
    Examiner,
    columns_of,
    facts_done,
    facts_in,
    interval,
    name_of,
    named,
    shown,
    timed,
)
from published_code import open_checkout, published_code
from rivals import FEW, PUBLISHED, plain_rank_one, published_rome, sampled_prefixes

import ffedit
from ffedit import EditConfig, Fact
from ffedit.benchmark.settings import held_out
from ffedit.cli.options import parse_layers
from ffedit.editor.methods import METHODS, set_numbers
from ffedit.editor.statistics import text_for
from ffedit.files.resuming import Journal, read_journal

SHOWN = (*RATES, "harmonic", "processor_seconds")
WAYS, CODE = ("ffedit", "published", "plain"), "published-code"


@click.command(help=__doc__)
@click.option("--model", required=True)
@click.option("--dtype", default="auto", show_default=True, help="What the model is computed in.")
@click.option("--data", type=click.Path(exists=True, path_type=Path), required=True, help="Facts.")
@click.option("--split", help="Of a file with splits.")
@click.option("--limit", type=int, help="Only the first facts.")
@click.option("--probed", is_flag=True, help="Only facts of whose subject other facts are asked.")
@click.option("--known", is_flag=True, help="Only facts whose prompt the model answers with the old object.")
@click.option("--layer", default="auto", show_default=True, help="Where all write; auto: where ffedit does first.")
@click.option("--layers", help="Where ffedit writes, if not there alone: 1-3.")
@click.option("--method", help="Of ffedit; default: its own.")
@click.option("--set", "numbers", multiple=True, help="Another number: value.steps=20.")
@click.option("--corpus", help="Text for the key statistics; default: ffedit's own.")
@click.option("--tokens", type=int, help="How much of it; default: what an edit of one subject reads.")
@click.option("--way", "ways", multiple=True, type=click.Choice((*WAYS, CODE)), default=WAYS, show_default=True)
@click.option("--published-steps", default=25, show_default=True, help="Of the published procedure, at most.")
@click.option("--plain-identity", is_flag=True, help="The plain editor takes C = I.")
@click.option("--published-rate", default=0.5, show_default=True, help="Adam's, of the published procedure and code.")
@click.option("--published-code", "code", type=click.Path(path_type=Path), help="Its checkout, for that way.")
@click.option("--together", type=int, help="Also let ffedit write so many facts in one edit.")
@click.option("--out", type=click.Path(path_type=Path), required=True, help="Folder of the results.")
def main(
    model: str,
    dtype: str,
    data: Path,
    split: str | None,
    limit: int | None,
    probed: bool,
    known: bool,
    layer: str,
    layers: str | None,
    method: str | None,
    numbers: tuple[str, ...],
    corpus: str | None,
    tokens: int | None,
    ways: tuple[str, ...],
    published_steps: int,
    plain_identity: bool,
    published_rate: float,
    code: Path | None,
    together: int | None,
    out: Path,
) -> None:
    """Edit each fact in each way."""
    if (CODE in ways) != (code is not None):
        raise click.UsageError(f"--way {CODE} and --published-code DIR need each other")
    editable, facts = ffedit.load(model, dtype=dtype), facts_in(data, split, None if known else limit, probed)
    if known:
        asked = [fact for fact in facts if fact.previous]
        said = Answers(editable)([(fact.text, fact.previous) for fact in asked])
        facts = list(itertools.compress(asked, said))[:limit]
    config, examiner = set_numbers(EditConfig(), numbers), Examiner(editable)
    text = text_for(editable, 1, config.seed, corpus) if tokens is None else ffedit.Corpus(corpus, tokens)

    def write(facts: Sequence[Fact], **given: Any) -> ffedit.Edit:
        named = {} if method is None else {"method": method}
        return ffedit.edit(editable, facts, config=held_out(config, facts), **named, **given)

    once: dict[str, float] = {}

    # Once for a model.
    chosen = None if layer == "auto" else [int(layer)]
    where = chosen if layers is None else parse_layers(layers, len(editable.layers), ("auto",))
    with timed(spent := {}):
        first = write(facts[:1], layers=where, stats=text)
    once["first edit of ffedit, with what it collects"] = spent["seconds"]
    where = where or sorted({address.layer for address in first.updates})
    at = where[-1] if chosen is None else chosen[0]
    with timed(spent := {}):
        stats = ffedit.collect_stats(editable, sorted({*where, at}), corpus=text)
        C = {address.layer: moments.C for address, moments in stats.items()}[at]
    once["key statistics, where they were not there"] = spent["seconds"]
    with timed(spent := {}):
        many = sampled_prefixes(editable, PUBLISHED)
    once["prefixes of the published procedure"] = spent["seconds"]
    few = sampled_prefixes(editable, FEW)
    if code is not None:
        with timed(spent := {}):
            checkout = open_checkout(code)
            C_inverse = torch.linalg.inv(C).float()
        once["import of the published code, and the inverse of C for it"] = spent["seconds"]
    stats = {address: moments for address, moments in stats.items() if address.layer in where}

    settings = {
        **{"model": Path(editable.name).name, "dtype": dtype, "data": data.name, "split": split, "layer": at},
        **{"corpus": corpus, "tokens": tokens},
    }
    made_by = first.provenance["method"]
    own = {"layers": where, "method": made_by, "config": METHODS[made_by].complete(config).to_dict()}
    told = {
        "ffedit": own,
        "published": {"steps": published_steps, "rate": published_rate},
        "plain": {"C": "identity" if plain_identity else "as the others"},
        CODE: {} if code is None else {"steps": checkout.numbers.v_num_grad_steps, "rate": published_rate},
    }
    journals = {way: Journal(out / f"{way}.jsonl", {**settings, "way": way, **told[way]}) for way in ways}

    def updates_of(make: Callable[..., Any], *given: Any, **named: Any) -> Mapping[ffedit.Address, Any]:
        """Return the updates of an edit; one that cannot be made counts as one that changes nothing."""
        try:
            return make(*given, **named).updates
        except ffedit.FFEditError:
            return {}

    def edited(way: str, fact: Fact) -> Any:
        """Return the edit of one fact in one way: something with `updates`."""
        if way == "ffedit":
            return write([fact], layers=where, stats=stats)
        if way == "plain":
            return plain_rank_one(editable, fact, at, None if plain_identity else C, few)
        if way == CODE:
            return published_code(editable, fact, at, C_inverse, many, checkout, published_rate)
        return published_rome(editable, fact, at, C, many, published_steps, published_rate)

    for i, fact in enumerate(facts):
        for way, journal in journals.items():
            if name_of(fact) in facts_done(journal):
                continue
            with timed(spent := {}):
                updates = updates_of(edited, way, fact)
            ((before, after, says),) = examiner.scores([fact], updates)
            journal.add({**named(fact), "before": before, "after": after, "says": says, **spent})
        examiner.forget()
        print(f"{i + 1}/{len(facts)}", flush=True)
    if together is not None:
        name = f"ffedit, {together} at once"
        journals[name] = Journal(out / f"{name}.jsonl", {**settings, "way": name, **own, "together": together})
        for group in (facts[i : i + together] for i in range(0, len(facts), together)):
            if {name_of(fact) for fact in group} <= facts_done(journals[name]):
                continue
            with timed(spent := {}):
                updates = updates_of(write, group, layers=where, stats=stats)
            each = {key: value / len(group) for key, value in spent.items()}
            for fact, (before, after, says) in zip(group, examiner.scores(group, updates), strict=True):
                journals[name].add({**named(fact), "before": before, "after": after, "says": says, **each})
            examiner.forget()
    found = {path.stem: read_journal(path)[1:] for path in sorted(out.glob("*.jsonl"))}
    text_of, summary = report(found)
    about = f"{data.name}{f' ({split})' if split else ''}, layer {at}"
    heading = f"{settings['model']}, {about}, {own['method']}: {sharing(facts)}."
    costs = "".join(f"- {name}: {seconds:.1f} s\n" for name, seconds in once.items())
    (out / "report.md").write_text(f"{heading}\n\n{text_of}\nOnce, in this run:\n\n{costs}", encoding="utf-8")
    keep(
        out / "report.json",
        {**settings, "facts": sharing(facts), "ffedit": json.loads(json.dumps(own)), "once": once, **summary},
    )
    print((out / "report.md").read_text(encoding="utf-8"))


def report(found: Mapping[str, Sequence[Mapping[str, Any]]]) -> tuple[str, dict[str, Any]]:
    """Tables and figures of results by way: means, and paired differences of ffedit's ways from the others."""
    rows, summary = [["", "facts", *SHOWN, "median of these"]], {"ways": {}, "differences": {}}
    for way in sorted(found, key=lambda name: (not name.startswith("ffedit"), name)):
        names = [line["fact"] for line in found[way]]
        if not names:
            continue
        before, after = (columns_of(found[way], names, when) for when in ("before", "after"))
        if len(rows) == 1:
            rows.append(["before", str(len(names)), *(shown(interval(before, n)) for n in SHOWN[:-1]), "", ""])
        middle = median(after["processor_seconds"])
        rows.append([f"**{way}**", str(len(names)), *_figures(after), f"{middle:.1f}"])
        summary["ways"][way] = {"facts": len(names), "median_processor_seconds": middle, **_numbers(after)}
    second = [["ffedit minus", "facts", *SHOWN, "times as fast"]]
    for mine in (way for way in found if way.startswith("ffedit")):
        for way in (way for way in found if not way.startswith("ffedit")):
            there = {line["fact"] for line in found[way]}
            both = [line["fact"] for line in found[mine] if line["fact"] in there]
            if not both:
                continue
            a, b = columns_of(found[mine], both), columns_of(found[way], both)
            faster = sum(b["processor_seconds"]) / sum(a["processor_seconds"])
            name = way if mine == "ffedit" else f"{way} ({mine.removeprefix('ffedit, ')})"
            second.append([name, str(len(both)), *_figures(a, b), f"{faster:.2f}"])
            numbers = {"facts": len(both), "times_as_fast": faster, **_numbers(a, b)}
            summary["differences"][f"{mine} - {way}"] = numbers
    return f"{_table(rows)}\n{_table(second)}", summary


def _figures(columns: Columns, against: Columns | None = None) -> list[str]:
    places = {"processor_seconds": 1}
    return [shown(interval(columns, n, against), against is not None, places.get(n, 3)) for n in SHOWN]


def _numbers(columns: Columns, against: Columns | None = None) -> dict[str, list[float] | None]:
    """Mean, low, high of each measure."""
    found = {name: interval(columns, name, against) for name in SHOWN}
    return {name: None if one is None else [one.mean, one.low, one.high] for name, one in found.items()}


def _table(rows: Sequence[Sequence[str]]) -> str:
    lines = [rows[0], ["---"] * len(rows[0]), *rows[1:]]
    return "\n".join(f"| {' | '.join(line)} |" for line in lines) + "\n"


if __name__ == "__main__":
    try:
        main()
    except ffedit.FFEditError as error:
        raise SystemExit(str(error)) from error

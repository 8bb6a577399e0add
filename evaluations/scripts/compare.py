"""Compare ffedit with rival editors on the same facts, one by one: the same layer, the same C, the same questions.

    python evaluations/scripts/compare.py --model smollm2 --data FACTS.json --split reporting --layer 2 --out DIR

Each fact is edited in each way, measured, and undone before the next; DIR holds a file of results for each way, and
report.md and report.json. A second run resumes. Seconds are processor seconds of the edit alone, because other work on
the machine lengthens those of the clock. Work that is done once for a model (key statistics, prefixes, and ffedit's
first edit, which fills its caches) is listed separately.
Differences are ffedit's minus the rival's, paired by fact. --published-rate is Adam's rate in the published procedure,
chosen on development facts like ffedit's settings (docs/results.md); with --together N ffedit also writes N facts in
one edit. --way published-code runs the published code itself, from a checkout (evaluations/scripts/published_code.py).
"""

import itertools
import json
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
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
@click.option("--dtype", default="auto", show_default=True, help="Precision of the model.")
@click.option("--data", type=click.Path(exists=True, path_type=Path), required=True, help="Facts.")
@click.option("--split", help="Split to take, of a file with splits.")
@click.option("--limit", type=int, help="Only the first facts.")
@click.option("--probed", is_flag=True, help="Only facts whose subject has other facts to ask.")
@click.option("--known", is_flag=True, help="Only facts whose prompt the model answers with the old object.")
@click.option("--layer", default="auto", show_default=True, help="Layer that all ways edit; auto: ffedit's own.")
@click.option("--layers", help="Layers that ffedit edits instead, such as 1-3.")
@click.option("--method", help="Method of ffedit; default: its own.")
@click.option("--set", "numbers", multiple=True, help="A setting of ffedit: value.steps=20.")
@click.option("--corpus", help="Text for the key statistics; default: ffedit's own.")
@click.option("--tokens", type=int, help="Tokens of that text; default: as an edit of one subject reads.")
@click.option("--way", "ways", multiple=True, type=click.Choice((*WAYS, CODE)), default=WAYS, show_default=True)
@click.option("--published-steps", default=25, show_default=True, help="Most steps of the published procedure.")
@click.option("--plain-identity", is_flag=True, help="The plain editor takes C = I.")
@click.option("--published-rate", default=0.5, show_default=True, help="Adam's, in the published procedure and code.")
@click.option("--published-code", "code", type=click.Path(path_type=Path), help="Checkout of the published code.")
@click.option("--together", type=int, help="Also let ffedit write this many facts in one edit.")
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
        answered = Answers(editable)([(fact.text, fact.previous) for fact in asked])
        facts = list(itertools.compress(asked, answered))[:limit]
    config, examiner = set_numbers(EditConfig(), numbers), Examiner(editable)
    as_edited = text_for(editable, 1, config.seed, corpus, names=config.key.names_weight > 0)
    text = as_edited if tokens is None else ffedit.Corpus(corpus, tokens)

    def write(facts: Sequence[Fact], **options: Any) -> ffedit.Edit:
        method_option = {} if method is None else {"method": method}
        return ffedit.edit(editable, facts, config=held_out(config, facts), **method_option, **options)

    def first_edit() -> ffedit.Edit:
        """Return the edit of the first fact that can be edited."""
        for fact in facts[:-1]:
            with suppress(ffedit.FFEditError):
                return write([fact], layers=edited_layers, stats=text)
        return write(facts[-1:], layers=edited_layers, stats=text)

    once: dict[str, float] = {}

    # Once for a model.
    requested = None if layer == "auto" else [int(layer)]
    edited_layers = requested if layers is None else parse_layers(layers, len(editable.layers), ("auto",))
    with timed(spent := {}):
        first = first_edit()
    once["first edit of ffedit, with what it collects"] = spent["seconds"]
    edited_layers = edited_layers or sorted({address.layer for address in first.updates})
    shared_layer = edited_layers[-1] if requested is None else requested[0]
    with timed(spent := {}):
        stats = ffedit.collect_stats(editable, sorted({*edited_layers, shared_layer}), corpus=text)
        C = {address.layer: moments.C for address, moments in stats.items()}[shared_layer]
    once["key statistics, where they were not there"] = spent["seconds"]
    with timed(spent := {}):
        published_prefixes = sampled_prefixes(editable, PUBLISHED)
    once["prefixes of the published procedure"] = spent["seconds"]
    plain_prefixes = sampled_prefixes(editable, FEW)
    if code is not None:
        with timed(spent := {}):
            checkout = open_checkout(code)
            C_inverse = torch.linalg.inv(C).float()
        once["import of the published code, and the inverse of C for it"] = spent["seconds"]
    stats = {address: moments for address, moments in stats.items() if address.layer in edited_layers}

    settings = {
        **{"model": Path(editable.name).name, "dtype": dtype, "data": data.name, "split": split, "layer": shared_layer},
        **{"corpus": corpus, "tokens": tokens},
    }
    made_by = first.provenance["method"]
    our_settings = {"layers": edited_layers, "method": made_by, "config": METHODS[made_by].complete(config).to_dict()}
    way_settings = {
        "ffedit": our_settings,
        "published": {"steps": published_steps, "rate": published_rate},
        "plain": {"C": "identity" if plain_identity else "as the others"},
        CODE: {} if code is None else {"steps": checkout.numbers.v_num_grad_steps, "rate": published_rate},
    }
    journals = {way: Journal(out / f"{way}.jsonl", {**settings, "way": way, **way_settings[way]}) for way in ways}

    def updates_of(make: Callable[..., Any], *args: Any, **options: Any) -> Mapping[ffedit.Address, Any]:
        """Return the updates of an edit; an edit that cannot be made counts as one that changes nothing."""
        try:
            return make(*args, **options).updates
        except ffedit.FFEditError:
            return {}

    def edited(way: str, fact: Fact) -> Any:
        """Return the edit of one fact in one way, an object with `updates`."""
        if way == "ffedit":
            return write([fact], layers=edited_layers, stats=stats)
        if way == "plain":
            return plain_rank_one(editable, fact, shared_layer, None if plain_identity else C, plain_prefixes)
        if way == CODE:
            return published_code(editable, fact, shared_layer, C_inverse, published_prefixes, checkout, published_rate)
        return published_rome(editable, fact, shared_layer, C, published_prefixes, published_steps, published_rate)

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
        journals[name] = Journal(out / f"{name}.jsonl", {**settings, "way": name, **our_settings, "together": together})
        for group in (facts[i : i + together] for i in range(0, len(facts), together)):
            if {name_of(fact) for fact in group} <= facts_done(journals[name]):
                continue
            with timed(spent := {}):
                updates = updates_of(write, group, layers=edited_layers, stats=stats)
            per_fact = {key: value / len(group) for key, value in spent.items()}
            for fact, (before, after, says) in zip(group, examiner.scores(group, updates), strict=True):
                journals[name].add({**named(fact), "before": before, "after": after, "says": says, **per_fact})
            examiner.forget()
    results = {path.stem: read_journal(path)[1:] for path in sorted(out.glob("*.jsonl"))}
    tables, summary = report(results)
    title = f"{data.name}{f' ({split})' if split else ''}, layer {shared_layer}"
    heading = f"{settings['model']}, {title}, {our_settings['method']}: {sharing(facts)}."
    costs = "".join(f"- {name}: {seconds:.1f} s\n" for name, seconds in once.items())
    (out / "report.md").write_text(f"{heading}\n\n{tables}\nOnce, in this run:\n\n{costs}", encoding="utf-8")
    keep(
        out / "report.json",
        {**settings, "facts": sharing(facts), "ffedit": json.loads(json.dumps(our_settings)), "once": once, **summary},
    )
    print((out / "report.md").read_text(encoding="utf-8"))


def report(results: Mapping[str, Sequence[Mapping[str, Any]]]) -> tuple[str, dict[str, Any]]:
    """Return tables and figures of results by way: means, and paired differences of ffedit's ways from the others."""
    rows, summary = [["", "facts", *SHOWN, "median of these"]], {"ways": {}, "differences": {}}
    for way in sorted(results, key=lambda name: (not name.startswith("ffedit"), name)):
        names = [line["fact"] for line in results[way]]
        if not names:
            continue
        before, after = (columns_of(results[way], names, when) for when in ("before", "after"))
        if len(rows) == 1:
            rows.append(["before", str(len(names)), *(shown(interval(before, n)) for n in SHOWN[:-1]), "", ""])
        median_seconds = median(after["processor_seconds"])
        rows.append([f"**{way}**", str(len(names)), *_figures(after), f"{median_seconds:.1f}"])
        summary["ways"][way] = {"facts": len(names), "median_processor_seconds": median_seconds, **_numbers(after)}
    differences = [["ffedit minus", "facts", *SHOWN, "times as fast"]]
    for our_way in (way for way in results if way.startswith("ffedit")):
        for way in (way for way in results if not way.startswith("ffedit")):
            edited = {line["fact"] for line in results[way]}
            shared = [line["fact"] for line in results[our_way] if line["fact"] in edited]
            if not shared:
                continue
            a, b = columns_of(results[our_way], shared), columns_of(results[way], shared)
            faster = sum(b["processor_seconds"]) / sum(a["processor_seconds"])
            name = way if our_way == "ffedit" else f"{way} ({our_way.removeprefix('ffedit, ')})"
            differences.append([name, str(len(shared)), *_figures(a, b), f"{faster:.2f}"])
            numbers = {"facts": len(shared), "times_as_fast": faster, **_numbers(a, b)}
            summary["differences"][f"{our_way} - {way}"] = numbers
    return f"{_table(rows)}\n{_table(differences)}", summary


def _figures(columns: Columns, against: Columns | None = None) -> list[str]:
    places = {"processor_seconds": 1}
    return [shown(interval(columns, n, against), against is not None, places.get(n, 3)) for n in SHOWN]


def _numbers(columns: Columns, against: Columns | None = None) -> dict[str, list[float] | None]:
    """Return mean, low and high of each measure."""
    values = {name: interval(columns, name, against) for name in SHOWN}
    return {name: None if value is None else [value.mean, value.low, value.high] for name, value in values.items()}


def _table(rows: Sequence[Sequence[str]]) -> str:
    lines = [rows[0], ["---"] * len(rows[0]), *rows[1:]]
    return "\n".join(f"| {' | '.join(line)} |" for line in lines) + "\n"


if __name__ == "__main__":
    try:
        main()
    except ffedit.FFEditError as error:
        raise SystemExit(str(error)) from error

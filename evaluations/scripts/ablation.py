"""Each mechanism on trial: left out of the defaults, and added to the published objective, one at a time.

    python evaluations/scripts/ablation.py run --model smollm2 --data FACTS.json --layer 2 --out DIR [NAME ...]
    python evaluations/scripts/ablation.py table --out DIR

Facts are edited one by one (but where a variant says otherwise), at one layer, with the same statistics, each undone
before the next. Each variant has a file of its own in DIR, so that several processes may run different ones at once; a
second run goes on where the first stopped. The table gives each variant's scores and seconds and their paired
differences from its reference.
"""

import json
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import click
from one_by_one import RATES, Examiner, columns_of, facts_done, facts_in, interval, name_of, named, shown, timed

import ffedit
from ffedit import Editable, EditConfig, Fact
from ffedit.editor.methods import preset, set_number
from ffedit.files.resuming import Journal, read_journal

# What all others are held against: a method with the numbers of a preset.
REFERENCES: dict[str, dict[str, Any]] = {
    "default": {"method": "memit", "preset": ("default", "memit")},
    "published": {"method": "rome", "preset": ("paper", "memit")},
}
# Of which reference, and what is exchanged: dotted names of numbers, "method", "preset", "layer", "weighting" of the
# statistics ("types", "tokens"), "together" (facts in one edit) or "sequence" (one after another, scored at the end).
VARIANTS: dict[str, dict[str, Any]] = {
    "default": {"of": "default"},
    # one left out
    "default - contexts": {"of": "default", "prompts.contexts": 0},
    "default - context_weight": {"of": "default", "key.context_weight": 0.0},
    "default - kl_weight": {"of": "default", "value.kl_weight": 0.0},
    "default - weight_decay": {"of": "default", "value.weight_decay": 0.0},
    "default - penalty_decay": {"of": "default", "value.penalty_decay": 1.0},
    "default - target_probability": {"of": "default", "value.target_probability": 2.0},
    "default - gradient steps": {
        "of": "default",
        "value.optimizer": "adam",
        "value.step_size": 0.5,
        "value.weight_decay": 0.5,
        "value.penalty_decay": 1.0,
    },
    "default - memit_ridge": {"of": "default", "memit.ridge": 0.0},
    # one added
    "default + essence prompts": {"of": "default", "prompts.essence_prompts": ["{} is a", "{}", "{} is known for"]},
    "default + types": {"of": "default", "weighting": "types"},
    "default + contexts": {"of": "default", "prompts.contexts": 20},
    "published": {"of": "published"},
    # what only several facts show: all at once, and one after another
    "default, together": {"of": "default", "together": 1000},
    "default, together - memit_ridge": {"of": "default, together", "memit.ridge": 0.0},
    "default, together - context_weight": {"of": "default, together", "key.context_weight": 0.0},
    "default, sequence": {"of": "default", "method": "alphaedit", "sequence": True},
    "default, sequence - alphaedit_ridge": {"of": "default, sequence", "alphaedit.ridge": 0.0},
}
# Mechanisms that were measured and did not pay, so that EditConfig has them no more. They can be run at commit 1bc1e1a,
# whose `VARIANTS` held them, in its names (there, "fall" is penalty_decay).
ALONE = {"phrasings": 64, "own": 0.0, "keep": 0.0}  # phrasings that nothing is asked of, for what they are to carry
REMOVED_AT = "1bc1e1a"
REMOVED: dict[str, dict[str, Any]] = {
    "default + own": {"of": "default", **ALONE, "own": 1.0},
    "default + keep": {"of": "default", **ALONE, "keep": 12.0},
    "default + own + keep": {"of": "default", **ALONE, "own": 1.0, "keep": 12.0},
    "default + own + keep + swap": {"of": "default", **ALONE, "own": 1.0, "keep": 12.0, "swap": True},
    "default + swap": {"of": "default", "swap": True},
    "default + beside": {"of": "default", "beside": True},
    "default + namesakes": {"of": "default", "namesakes": 4},
    "default + attempts": {"of": "default", "attempts": 6, "fall": 1.0},
    "default + anneal": {"of": "default", "anneal": True},
    "default, together + crowding": {"of": "default, together", "crowding": 28.0},
    "default, sequence + unburdened": {"of": "default, sequence", "unburdened": True},
    "default, sequence + surroundings": {"of": "default, sequence", "surround": True},
}
OTHER = {"method", "preset", "layer", "weighting", "together", "sequence"}
SHOWN = (*RATES, "harmonic", "seconds")


def resolved(name: str, variants: Mapping[str, Mapping[str, Any]]) -> dict[str, Any]:
    """All that a variant says, with what it takes from its reference; that of a reference is the preset's.

    Raises:
        ffedit.FFEditError: it, or a number in it, is not there.
    """
    if name in REMOVED and name not in variants:
        raise ffedit.FFEditError(f"variant {name!r} is of a mechanism that was removed; run it at commit {REMOVED_AT}")
    if name not in variants:
        raise ffedit.FFEditError(f"there is no variant {name!r}; there is {', '.join(variants)}")
    own = {key: value for key, value in variants[name].items() if key != "of"}
    of = variants[name]["of"]
    base = REFERENCES[of] if of == name else resolved(of, variants)
    said = {**base, **own}
    config_of(said)
    return said


def config_of(said: Mapping[str, Any]) -> EditConfig:
    """The numbers of a variant."""
    config = preset(*said["preset"])
    for name in said.keys() - OTHER:
        config = set_number(config, name, said[name])
    return config


@click.group(help=__doc__)
def main() -> None:
    """Run variants, and show what they gave."""


@main.command()
@click.argument("names", nargs=-1)
@click.option("--model", required=True)
@click.option("--data", type=click.Path(exists=True, path_type=Path), required=True, help="Facts.")
@click.option("--split", help="Of a file with splits.")
@click.option("--limit", type=int, help="Only the first facts.")
@click.option("--probed", is_flag=True, help="Only facts of whose subject other facts are asked.")
@click.option("--layer", type=int, required=True)
@click.option("--corpus", help="Text for the key statistics; default: what the model samples.")
@click.option("--tokens", type=int, help="How much of it.")
@click.option("--add", "more", multiple=True, help='A further variant: NAME={"of": "default", "value.steps": 10}.')
@click.option("--out", type=click.Path(path_type=Path), required=True, help="Folder of the results.")
def run(
    names: tuple[str, ...],
    model: str,
    data: Path,
    split: str | None,
    limit: int | None,
    probed: bool,
    layer: int,
    corpus: str | None,
    tokens: int | None,
    more: tuple[str, ...],
    out: Path,
) -> None:
    """Run the variants NAMES; none: all that edit one by one."""
    added = {name: json.loads(said) for name, _, said in (one.partition("=") for one in more)}
    variants = {**VARIANTS, **added}
    one_by_one = [name for name in variants if not {"together", "sequence"} & resolved(name, variants).keys()]
    editable, facts = ffedit.load(model), facts_in(data, split, limit, probed)
    examiner = Examiner(editable)
    for name in names or (*added,) or one_by_one:
        said = {"layer": layer, "weighting": ffedit.Corpus().weighting, **resolved(name, variants)}
        settings = {"variant": name, "of": variants[name]["of"], "model": editable.name, "data": data.name}
        settings |= {"corpus": corpus, "tokens": tokens, "split": split, **said, "config": config_of(said).to_dict()}
        journal = Journal(out / f"{name}.jsonl", settings)
        text = ffedit.Corpus(corpus, weighting=said["weighting"])
        text = text if tokens is None else replace(text, tokens=tokens)
        edit_all(editable, facts, said, ffedit.stats(editable, [said["layer"]], text), examiner, journal)
        columns = columns_of(journal.lines, [line["fact"] for line in journal.lines])
        print(name, len(journal.lines), *(f"{n} {shown(interval(columns, n))}" for n in SHOWN), sep="  ", flush=True)


def edit_all(
    editable: Editable,
    facts: Sequence[Fact],
    said: Mapping[str, Any],
    stats: Mapping[ffedit.Address, Any],
    examiner: Examiner,
    journal: Journal,
) -> None:
    """Edit and score what the journal does not hold yet."""
    config, layers = config_of(said), [said["layer"]]

    def compute(some: Sequence[Fact], after: Sequence[ffedit.Edit] = ()) -> tuple[ffedit.Edit, dict[str, float]]:
        spent: dict[str, float] = {}
        with timed(spent):
            edit = ffedit.edit(editable, some, said["method"], layers, config, stats, after=after)
        return edit, {name: value / len(some) for name, value in spent.items()}

    if said.get("sequence"):
        if not journal.lines:
            one_after_another(editable, facts, compute, examiner, journal)
        return
    size = said.get("together", 1)
    for group in (facts[i : i + size] for i in range(0, len(facts), size)):
        if {name_of(fact) for fact in group} <= facts_done(journal):
            continue
        edit, spent = compute(group)
        record(journal, group, examiner.scores(group, edit.updates), [spent] * len(group))


def one_after_another(
    editable: Editable, facts: Sequence[Fact], compute: Any, examiner: Examiner, journal: Journal
) -> None:
    """Write each fact on top of those before it, and score all of them at the end."""
    examiner.of(facts)  # asked before the first edit
    edits: list[ffedit.Edit] = []
    seconds = []
    try:
        for fact in facts:
            edit, spent = compute([fact], edits)
            edit.apply_(editable)
            edits.append(edit)
            seconds.append(spent)
        record(journal, facts, examiner.scores(facts), seconds)
    finally:
        for edit in reversed(edits):
            edit.undo_(editable)


def record(
    journal: Journal, facts: Sequence[Fact], scores: Sequence[tuple[Any, Any, str]], spent: Sequence[dict[str, float]]
) -> None:
    """One line a fact."""
    for fact, (before, after, says), seconds in zip(facts, scores, spent, strict=True):
        journal.add({**named(fact), "before": before, "after": after, "says": says, **seconds})


@main.command()
@click.option("--out", type=click.Path(exists=True, path_type=Path), required=True, help="Folder of the results.")
@click.option("--against", help="A variant that all are held against; default: each one's reference.")
@click.option("--into", type=click.Path(path_type=Path), help="A Markdown file to write the table to, too.")
def table(out: Path, against: str | None, into: Path | None) -> None:
    """Show what was measured, and paired differences from the reference."""
    found = {}
    for path in sorted(out.glob("*.jsonl")):
        header, *lines = read_journal(path)
        if lines:
            found[header["settings"]["variant"]] = (header["settings"], lines)
    text = rendered(found, against)
    print(text)
    if into is not None:
        into.write_text(text, encoding="utf-8")


def rendered(
    found: Mapping[str, tuple[Mapping[str, Any], Sequence[Mapping[str, Any]]]], against: str | None = None
) -> str:
    """The table, Markdown: a row of figures for each variant, and below it one of differences where it has a reference.

    A difference is over the facts that both have.
    """
    known = [*VARIANTS, *REMOVED]
    order = [name for name in known if name in found] + [name for name in found if name not in known]
    rows = [["variant", "facts", *SHOWN], ["---"] * (len(SHOWN) + 2)]
    for name in order:
        settings, lines = found[name]
        columns = columns_of(lines, [line["fact"] for line in lines])
        places = {"seconds": 1}
        figures = [interval(columns, measure) for measure in SHOWN]
        cells = [shown(f, places=places.get(m, 3)) for m, f in zip(SHOWN, figures, strict=True)]
        rows.append([f"**{name}**", str(len(lines)), *cells])
        of = against or settings["of"]
        if of == name or of not in found:
            continue
        there = {line["fact"] for line in found[of][1]}
        both = [line["fact"] for line in lines if line["fact"] in there]
        if not both:
            continue
        mine, other = columns_of(lines, both), columns_of(found[of][1], both)
        differences = [interval(mine, measure, other) for measure in SHOWN]
        cells = [shown(f, True, places.get(m, 3)) for m, f in zip(SHOWN, differences, strict=True)]
        rows.append([f"against {of}", str(len(both)), *cells])
    return "\n".join(f"| {' | '.join(row)} |" for row in rows) + "\n"


if __name__ == "__main__":
    try:
        main()
    except ffedit.FFEditError as error:
        raise SystemExit(str(error)) from error

"""Each mechanism on trial, on three real models at once: left out of the defaults or added to them, one at a time.

    python evaluations/scripts/ablation.py run --models DIR --out OUT [--model NAME ...] [VARIANT ...]
    python evaluations/scripts/ablation.py table --out OUT [--into FILE.md]

DIR/gguf/NAME.gguf are the models of `MODELS`; each has development facts of its own, split by subject. Facts are edited
one by one, at the layer that ffedit takes, each undone before the next, and scored by what greedy generation says
(`one_by_one.FOUR`) and by which object is likelier. Whether the text behind the object breaks is asked of chosen
defaults (`compare.py`), not here, where it would double the time.

Each model and variant has a file of its own in OUT, so that several processes may run different ones; a second run goes
on where the first stopped. The table gives each variant's scores and processor seconds on each model, paired
differences from the default with intervals over subjects, and the least difference of the harmonic mean over the
models: by that a variant is judged.
"""

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any
from unittest.mock import patch

import click
from common import DATA_FOLDER
from one_by_one import FOUR, Examiner, columns_of, facts_done, facts_in, interval, name_of, named, shown, timed

import ffedit
from ffedit import EditConfig, Fact
from ffedit.benchmark.settings import held_out
from ffedit.editor import name_keys
from ffedit.editor.methods import preset, set_number
from ffedit.evaluator import generations
from ffedit.files.resuming import Journal, read_journal
from ffedit.layer_choice.choose import spread_below
from ffedit.layer_choice.published import auto_layer


@dataclass(frozen=True)
class Model:
    """A real model, its development facts, and how it is computed with."""

    facts: str  # a file of `evaluations/data`
    limit: int  # development facts that are edited
    dtype: str = "auto"


MODELS = {
    "smollm2": Model("smollm2-counterfact.json", 100),
    "gemma3-270m": Model("gemma-counterfact.json", 100),
    "qwen2.5-1.5b": Model("qwen-counterfact.json", 40, "bfloat16"),
}
# What is exchanged: dotted names of numbers, "method", "preset", "spread", the number of layers that share an edit,
# "tokens", of the text of the key statistics, or "names": every so many-th name counts.
VARIANTS: dict[str, dict[str, Any]] = {
    "default": {},
    "- contexts": {"prompts.contexts": 0},
    "- names": {"key.names_weight": 0.0},
    "- mentions": {"key.mention_share": 0.0},
    "- context_weight": {"key.context_weight": 0.0},
    "ended at .6": {"value.target_probability": 0.6},
    "steps of .1": {"value.step_size": 0.1},
    # The defaults before names and mentions.
    "former": {
        **{"key.names_weight": 0.0, "key.mention_share": 0.0, "key.context_weight": 0.03},
        **{"value.target_probability": 0.6, "value.step_size": 0.1},
    },
    "three layers": {"spread": 3},
    "- kl_weight": {"value.kl_weight": 0.0},
    "- weight_decay": {"value.weight_decay": 0.0},
    "- penalty_decay": {"value.penalty_decay": 1.0},
    "- memit_ridge": {"memit.ridge": 0.0},
    "Adam's steps": {
        **{"value.optimizer": "adam", "value.step_size": 0.5},
        **{"value.weight_decay": 0.5, "value.penalty_decay": 1.0},
    },
    "published": {"method": "rome", "preset": ("paper", "rome")},
}
OTHER = {"method", "preset", "spread", "tokens", "names"}
SHOWN = (*FOUR, "harmonic", "efficacy", "paraphrase", "specificity", "processor_seconds")


def config_of(variant: Mapping[str, Any]) -> EditConfig:
    """Return the numbers of a variant; FFEditError for one that is not there."""
    config = preset(*variant.get("preset", ("default", "memit")))
    for name in sorted(variant.keys() - OTHER):
        config = set_number(config, name, variant[name])
    return config


def place_of(out: Path, model: str, variant: str) -> Path:
    """Return the file of the results of a variant on a model."""
    return out / model / f"{variant.replace('/', ' ')}.jsonl"


@click.group(help=__doc__)
def main() -> None:
    """Run variants, and show what they gave."""


@main.command()
@click.argument("names", nargs=-1)
@click.option("--models", type=click.Path(exists=True, path_type=Path), required=True, help="Folder of gguf/NAME.gguf.")
@click.option("--model", "chosen", multiple=True, type=click.Choice(list(MODELS)), help="Only these.")
@click.option("--limit", type=int, help="Fewer facts than the model's own number.")
@click.option("--layer", type=int, help="Another than ffedit takes.")
@click.option("--dtype", help="Another than the model's own: bfloat16 is slow on processors that do not know it.")
@click.option("--add", "more", multiple=True, help='A further variant: NAME={"value.steps": 10}.')
@click.option("--out", type=click.Path(path_type=Path), required=True, help="Folder of the results.")
def run(
    names: tuple[str, ...],
    models: Path,
    chosen: tuple[str, ...],
    limit: int | None,
    layer: int | None,
    dtype: str | None,
    more: tuple[str, ...],
    out: Path,
) -> None:
    """Run the variants NAMES on each model; none: all."""
    added = {name: json.loads(said) for name, _, said in (one.partition("=") for one in more)}
    variants = {**VARIANTS, **added}
    if unknown := [name for name in names if name not in variants]:
        raise ffedit.FFEditError(f"there is no variant {unknown[0]!r}; there is {', '.join(variants)}")
    for name in chosen or tuple(MODELS):
        model = MODELS[name]
        editable = ffedit.load(models / "gguf" / f"{name}.gguf", dtype=dtype or model.dtype)
        facts = facts_in(DATA_FOLDER / model.facts, "development")
        # Those first of whose subject other facts are asked.
        facts = sorted(facts, key=lambda fact: not fact.same_subject)[: limit or model.limit]
        at, examiner = auto_layer(editable).layer if layer is None else layer, Examiner(editable)
        for variant in names or tuple(added) or tuple(variants):
            config = config_of(variants[variant])
            layers = spread_below(at, variants[variant].get("spread", 1))
            tokens = variants[variant].get("tokens")
            stats = ffedit.collect_stats(
                editable, layers, corpus=None if tokens is None else ffedit.Corpus(tokens=tokens)
            )
            settings = {"variant": variant, "model": name, "dtype": dtype or model.dtype, "layer": at}
            settings |= {**variants[variant], "config": config.to_dict()}
            journal = Journal(place_of(out, name, variant), settings)
            with patch.object(name_keys, "THIRD", variants[variant].get("names", name_keys.THIRD)):
                for fact in facts:
                    if name_of(fact) not in facts_done(journal):
                        method = variants[variant].get("method", "memit")
                        edit_one(examiner, fact, method, layers, config, stats, journal)
            columns = columns_of(journal.lines, [line["fact"] for line in journal.lines])
            print(name, variant, len(journal.lines), *(f"{n} {shown(interval(columns, n))}" for n in SHOWN), flush=True)


def edit_one(
    examiner: Examiner,
    fact: Fact,
    method: str,
    layers: Sequence[int],
    config: EditConfig,
    stats: Mapping[ffedit.Address, Any],
    journal: Journal,
) -> None:
    """Edit one fact, score it, and write its line; an edit that cannot be made counts as one that changes nothing."""
    spent: dict[str, float] = {}
    with timed(spent):
        try:
            updates = ffedit.edit(
                examiner.editable, [fact], method, layers=layers, config=held_out(config, [fact]), stats=stats
            ).updates
        except ffedit.EditError:
            updates = {}
    ((before, after, says),) = examiner.scores([fact], updates)
    journal.add({**named(fact), "before": before, "after": after, "says": says, **spent})


@main.command()
@click.option("--out", type=click.Path(exists=True, path_type=Path), required=True, help="Folder of the results.")
@click.option("--into", type=click.Path(path_type=Path), help="A Markdown file to write the table to, too.")
def table(out: Path, into: Path | None) -> None:
    """Show what was measured, and paired differences from the default."""
    found: dict[str, dict[str, list[Mapping[str, Any]]]] = {}
    for model in MODELS:
        for path in sorted((out / model).glob("*.jsonl")):
            header, *lines = read_journal(path)
            if lines:
                found.setdefault(header["settings"]["variant"], {})[model] = lines
    text = rendered(found)
    print(text)
    if into is not None:
        into.write_text(text, encoding="utf-8")


def rendered(found: Mapping[str, Mapping[str, Sequence[Mapping[str, Any]]]]) -> str:
    """Write the table, Markdown, from the lines of each variant and model.

    A difference is over the facts that both have.
    """
    order = [name for name in VARIANTS if name in found] + [name for name in found if name not in VARIANTS]
    rows = [["variant", "model", "facts", *SHOWN], ["---"] * (len(SHOWN) + 3)]
    for variant in order:
        least: list[float] = []
        for model, lines in found[variant].items():
            facts = [line["fact"] for line in lines]
            rows.append([f"**{variant}**", model, str(len(lines)), *cells(columns_of(lines, facts))])
            usual = {line["fact"]: line for line in found.get("default", {}).get(model, ())}
            both = [fact for fact in facts if fact in usual]
            if variant != "default" and both:
                mine, other = columns_of(lines, both), columns_of(list(usual.values()), both)
                rows.append(["less the default", model, str(len(both)), *cells(mine, other)])
                difference = interval(mine, "harmonic", other)
                least += [] if difference is None else [difference.mean]
        if least:
            rows.append([f"{variant}, worst of {len(least)}", "", "", *[""] * len(FOUR), f"{min(least):+.3f}"])
            rows[-1] += [""] * (len(SHOWN) - len(FOUR) - 1)
    return "\n".join(f"| {' | '.join(row)} |" for row in rows) + "\n"


def cells(columns: Mapping[str, Sequence[Any]], against: Mapping[str, Sequence[Any]] | None = None) -> list[str]:
    """Return the figures of a row."""
    figures = ((name, interval(columns, name, against)) for name in SHOWN)
    return [shown(figure, against is not None, 1 if name == "processor_seconds" else 2) for name, figure in figures]


if __name__ == "__main__":
    generations.TEXT_TOKENS = generations.SAID_TOKENS  # see above
    try:
        main()
    except ffedit.FFEditError as error:
        raise SystemExit(str(error)) from error

"""Run ablations on three real models: mechanisms are left out of the defaults, or added to them, one at a time.

    python evaluations/scripts/ablation.py run --models DIR --out OUT [--model NAME ...] [VARIANT ...]
    python evaluations/scripts/ablation.py table --out OUT [--into FILE.md]

DIR/gguf/NAME.gguf are the models of `MODELS`; each has development facts of its own, split by subject. Facts are edited
one by one, at the layer that ffedit takes, each undone before the next, and scored by what greedy generation says
(`one_by_one.FOUR`) and by which object is likelier. Whether the text after the object breaks is measured only
for chosen defaults (`compare.py`), because it would double the time here.

Each model and variant has a file of its own in OUT, so that several processes may run different ones; a second run
resumes. The table gives each variant's scores and processor seconds on each model, paired differences from the default
with intervals over subjects, and the worst difference of the harmonic mean over the models, by which the variant is
judged.
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
from ffedit.editor.statistics import text_for
from ffedit.evaluator import generations
from ffedit.files.resuming import Journal, read_journal
from ffedit.layer_choice.choose import spread_below
from ffedit.layer_choice.published import auto_layer


@dataclass(frozen=True)
class Model:
    """A real model, its development facts, and the precision of its computation."""

    facts: str  # a file of `evaluations/data`
    limit: int  # number of development facts to edit
    dtype: str = "auto"


MODELS = {
    "smollm2": Model("smollm2-counterfact.json", 100),
    "gemma3-270m": Model("gemma-counterfact.json", 100),
    "qwen2.5-1.5b": Model("qwen-counterfact.json", 40, "bfloat16"),
}
# What a variant changes: dotted names of settings, "method", "preset", "spread" (the number of layers that share an
# edit), "tokens" (of the text for key statistics, instead of those of a single edit), or "names": N if every N-th name
# counts.
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
    """Return the settings of a variant; FFEditError if one of them does not exist."""
    config = preset(*variant.get("preset", ("default", "memit")))
    for name in sorted(variant.keys() - OTHER):
        config = set_number(config, name, variant[name])
    return config


def path_of(out: Path, model: str, variant: str) -> Path:
    """Return the path of the results of a variant on a model."""
    return out / model / f"{variant.replace('/', ' ')}.jsonl"


@click.group(help=__doc__)
def main() -> None:
    """Run variants, and show their scores."""


@main.command()
@click.argument("names", nargs=-1)
@click.option("--models", type=click.Path(exists=True, path_type=Path), required=True, help="Folder of gguf/NAME.gguf.")
@click.option("--model", "chosen", multiple=True, type=click.Choice(list(MODELS)), help="Only these.")
@click.option("--limit", type=int, help="Number of facts, instead of the model's own.")
@click.option("--layer", type=int, help="Layer to edit, instead of the one that ffedit takes.")
@click.option("--dtype", help="Precision, instead of the model's own; some CPUs are slow in bfloat16.")
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
    """Run the variants NAMES on each model; without NAMES those of --add, or else all."""
    added = {name: json.loads(text) for name, _, text in (option.partition("=") for option in more)}
    variants = {**VARIANTS, **added}
    if unknown := [name for name in names if name not in variants]:
        raise ffedit.FFEditError(f"there is no variant {unknown[0]!r}; there is {', '.join(variants)}")
    for name in chosen or tuple(MODELS):
        model = MODELS[name]
        editable = ffedit.load(models / "gguf" / f"{name}.gguf", dtype=dtype or model.dtype)
        facts = facts_in(DATA_FOLDER / model.facts, "development")
        # Facts whose subject has other facts to ask come first.
        facts = sorted(facts, key=lambda fact: not fact.same_subject)[: limit or model.limit]
        edited_layer, examiner = auto_layer(editable).layer if layer is None else layer, Examiner(editable)
        for variant in names or tuple(added) or tuple(variants):
            config = config_of(variants[variant])
            layers = spread_below(edited_layer, variants[variant].get("spread", 1))
            tokens = variants[variant].get("tokens")
            as_edited = text_for(editable, 1, config.seed, names=config.key.names_weight > 0)
            text = as_edited if tokens is None else ffedit.Corpus(tokens=tokens)
            stats = ffedit.collect_stats(editable, layers, corpus=text)
            settings = {"variant": variant, "model": name, "dtype": dtype or model.dtype, "layer": edited_layer}
            settings |= {**variants[variant], "tokens": text.tokens, "config": config.to_dict()}
            journal = Journal(path_of(out, name, variant), settings)
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
    """Show the scores, and paired differences from the default."""
    results: dict[str, dict[str, list[Mapping[str, Any]]]] = {}
    for model in MODELS:
        for path in sorted((out / model).glob("*.jsonl")):
            header, *lines = read_journal(path)
            if lines:
                results.setdefault(header["settings"]["variant"], {})[model] = lines
    text = rendered(results)
    print(text)
    if into is not None:
        into.write_text(text, encoding="utf-8")


def rendered(results: Mapping[str, Mapping[str, Sequence[Mapping[str, Any]]]]) -> str:
    """Return the Markdown table of the lines of each variant and model.

    A difference is over the facts that the variant and the default share.
    """
    order = [name for name in VARIANTS if name in results] + [name for name in results if name not in VARIANTS]
    rows = [["variant", "model", "facts", *SHOWN], ["---"] * (len(SHOWN) + 3)]
    for variant in order:
        means: list[float] = []
        for model, lines in results[variant].items():
            facts = [line["fact"] for line in lines]
            rows.append([f"**{variant}**", model, str(len(lines)), *cells(columns_of(lines, facts))])
            defaults = {line["fact"]: line for line in results.get("default", {}).get(model, ())}
            shared = [fact for fact in facts if fact in defaults]
            if variant != "default" and shared:
                columns, base = columns_of(lines, shared), columns_of(list(defaults.values()), shared)
                rows.append(["less the default", model, str(len(shared)), *cells(columns, base)])
                difference = interval(columns, "harmonic", base)
                means += [] if difference is None else [difference.mean]
        if means:
            rows.append([f"{variant}, worst of {len(means)}", "", "", *[""] * len(FOUR), f"{min(means):+.3f}"])
            rows[-1] += [""] * (len(SHOWN) - len(FOUR) - 1)
    return "\n".join(f"| {' | '.join(row)} |" for row in rows) + "\n"


def cells(columns: Mapping[str, Sequence[Any]], against: Mapping[str, Sequence[Any]] | None = None) -> list[str]:
    """Return the figures of a row of the table, or their differences from `against`."""
    figures = ((name, interval(columns, name, against)) for name in SHOWN)
    return [shown(figure, against is not None, 1 if name == "processor_seconds" else 2) for name, figure in figures]


if __name__ == "__main__":
    generations.TEXT_TOKENS = generations.SAID_TOKENS  # the module's docstring says why
    try:
        main()
    except ffedit.FFEditError as error:
        raise SystemExit(str(error)) from error

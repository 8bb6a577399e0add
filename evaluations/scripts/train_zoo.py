"""Train the zoo: small models that know facts, by other recipes than Atlas's.

    python evaluations/scripts/train_zoo.py --out DIR [--model zoo-gpt2] [--threads 1]

Atlas is trained to recall facts in its first layer. Defaults must hold on models that were not: these have other
shapes, other facts and other texts, and nothing in their training decides where they recall. Each becomes a folder
DIR/NAME, with the shares of facts that it knows in `DIR/NAME/knowledge.json`; a second run resumes.

Members of `REPORTING` are for reporting only: no setting is chosen by their results.
"""

import json
import random
import sys
from dataclasses import asdict, replace
from functools import partial
from pathlib import Path
from types import MappingProxyType
from typing import Any

import click
import torch

import ffedit

# The recipe of Atlas stands beside the scripts.
sys.path.append(str(Path(__file__).parents[1]))
from atlas.corpus import Dress
from atlas.recipe import Recipe
from atlas.table import Table, load
from atlas.train import train
from atlas_report import said

TEMPLATES = Dress(listed=0, plain=0, connective=0, filler=0, apposition=0, continued=0, one_subject=0)
"""Bare templates: a subject, a template that training shows, the object, a full stop."""
TEXT = Dress(listed=0, plain=0.1, connective=0.2, filler=0.15, apposition=0)
"""Running text: sentences joined and begun in many ways, some without a fact; no lists."""
LISTS = Dress(listed=0.15, plain=0.2)
"""Running text in which names also stand beside what belongs to them, as in Atlas, but seldom."""

BASE = Recipe(
    local=0, whole=4, near=0, drop=(), width=128, memory=512, heads=4, groups=4, tokens=2048, rate=3e-3, steps=600
)
"""Settings of all members: no attention is restricted and nothing is dropped in training."""

MEMBERS = (
    replace(
        BASE,
        name="zoo-gpt2",
        shape="gpt2",
        kinds=("person", "country"),
        attention="eager",
        dress=TEXT,
        steps=900,
    ),
    replace(
        BASE,
        name="zoo-neox",
        shape="gpt_neox",
        kinds=("landmark", "company", "book", "film", "team", "element", "city", "mountain", "painting", "invention"),
        dress=TEMPLATES,
        steps=420,
    ),
    replace(
        BASE,
        name="zoo-pieces",
        kinds=("person", "place", "film"),
        pieces=1500,
        memory=384,
        attention="eager",
        dress=LISTS,
        steps=650,
    ),
    replace(
        BASE,
        name="zoo-deep",
        kinds=("country", "landmark", "company", "book", "painting", "element", "city"),
        whole=8,
        width=96,
        memory=256,
        head=24,
        attention="eager",
        dress=TEMPLATES,
        steps=1200,
    ),
    replace(
        BASE,
        name="zoo-bare",
        kinds=("person", "landmark"),
        dress=TEMPLATES,
    ),
    replace(
        BASE,
        name="zoo-neo",
        shape="gpt_neo",
        kinds=("landmark", "company", "book", "painting", "country", "place"),
        width=160,
        memory=640,
        window=32,
        dress=TEXT,
        steps=1500,
    ),
)
ZOO = MappingProxyType({recipe.name: recipe for recipe in MEMBERS})
REPORTING = frozenset({"zoo-bare", "zoo-neo"})


def knowledge(editable: ffedit.Editable, table: Table, seed: int = 0) -> dict[str, float]:
    """Return the shares of facts that greedy generation gives in a drawn trained template and in the held-out one."""
    rng = random.Random(seed)
    asked = [(rng.choice(trained), hidden) for trained, hidden in map(table.prompts, table.triples)]
    objects = [triple.object for triple in table.triples]
    return {
        kind: sum(said(editable, list(prompts), objects)) / len(objects)
        for kind, prompts in zip(("trained", "held_out"), zip(*asked, strict=True), strict=True)
    }


def finish(recipe: Recipe, folder: Path) -> dict[str, Any]:
    """Measure the knowledge of a trained member; write `knowledge.json` and its card."""
    editable, table = ffedit.load(folder), load().about(recipe.kinds)
    facts: dict[str, Any] = {
        "model": recipe.name,
        "reporting": recipe.name in REPORTING,
        "parameters": sum(p.numel() for p in editable.model.parameters()),
        "layers": recipe.whole,
        "facts": len(table.triples),
        "knowledge": knowledge(editable, table),
    }
    (folder / "knowledge.json").write_text(json.dumps(facts, indent=1) + "\n", encoding="utf-8")
    settings = "\n".join(f"- {key}: {value}" for key, value in asdict(recipe).items() if value)
    (folder / "README.md").write_text(
        f"""---
license: apache-2.0
language: en
library_name: transformers
---
# {recipe.name}

A language model of {facts["parameters"] / 1e6:.1f} million parameters ({type(editable.model).__name__}) that knows
{facts["facts"]} facts of ffedit's table and little else, trained to measure editors on. Where it recalls a fact is
left to it. Made by `python evaluations/scripts/train_zoo.py --model {recipe.name} --out DIR`:

{settings}
""",
        encoding="utf-8",
    )
    return facts


@click.command()
@click.option("--out", type=click.Path(path_type=Path), required=True, help="Folder of the model folders.")
@click.option("--model", type=click.Choice(list(ZOO)), help="Only this one; else all, one after another.")
@click.option("--steps", type=int, help="Optimizer steps, instead of the recipe's.")
@click.option("--threads", default=0, help="CPU threads; 0 leaves the choice to torch.")
def main(out: Path, model: str | None, steps: int | None, threads: int) -> None:
    """Train members of the zoo; print a line of JSON for each."""
    if threads:
        torch.set_num_threads(threads)
    for recipe in [ZOO[model]] if model else MEMBERS:
        chosen = replace(recipe, steps=steps or recipe.steps)
        train(chosen, load(), out / recipe.name, partial(progress, chosen))
        print(json.dumps(finish(chosen, out / recipe.name)), flush=True)


def progress(recipe: Recipe, step: int, loss: float) -> None:
    """Print a line every 50 steps."""
    if step % 50 == 0:
        print(f"{recipe.name}: step {step}/{recipe.steps}, loss {loss:.3f}", file=sys.stderr, flush=True)


if __name__ == "__main__":
    main()

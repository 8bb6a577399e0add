"""Train an Atlas: from the fact table to a model folder, in one command.

    python evaluations/atlas/train.py [--model atlas-llama] --out DIR

What is trained and why is `recipe`. Here is only the loop. A batch depends on the seed and on
its number alone, and so does its noise: training that was interrupted goes on from the
checkpoint in DIR as if nothing had happened.
"""

from __future__ import annotations

import copy
import json
import sys
from collections.abc import Callable
from dataclasses import asdict, replace
from pathlib import Path

import click
import torch
from rich.progress import BarColumn, Progress, TextColumn, TimeElapsedColumn, TimeRemainingColumn
from safetensors.torch import load_file, save_file
from torch import nn
from transformers import PreTrainedModel, PreTrainedTokenizerFast

from ffedit.errors import FFEditError, ModelError

# The recipe of Atlas stands beside the scripts.
sys.path.append(str(Path(__file__).parents[1]))
from atlas.corpus import Corpus
from atlas.recipe import RECIPES, Recipe, batch, loss_of, optimizer_of, rate_at, regularised, tokenizer_of
from atlas.shapes import build_model
from atlas.table import TEMPLATES, Table, load

Report = Callable[[int, float], None]
"""Called after every step with the number of steps done and the loss in nats."""


def train(recipe: Recipe, table: Table, out: Path, report: Report | None = None, save_every: int = 250) -> None:
    """Train to the end of the recipe, from the checkpoint in `out` where there is one, and export there.

    Raises:
        ModelError: the checkpoint is of another recipe or another table.
    """
    table = table.about(recipe.kinds)
    corpus = Corpus(table, recipe.dress)
    tokenizer = tokenizer_of(recipe, corpus)
    model = build_model(recipe, tokenizer).train()
    optimizer = optimizer_of(model, recipe)
    made_by: dict[str, object] = {"recipe": asdict(recipe), "table": table.fingerprint}
    checkpoint = out / "checkpoint"
    first = resume_(checkpoint, made_by, model, optimizer) if (checkpoint / "state.json").exists() else 0
    with regularised(model, recipe):
        for step in range(first, recipe.steps):
            torch.manual_seed(recipe.seed * 1_000_003 + step)
            for group in optimizer.param_groups:
                group["lr"] = rate_at(recipe, step)
            loss = 0.0
            parts = batch(recipe, corpus, tokenizer, step).chunk(2)  # small tensors are faster to allocate
            for rows in parts:
                part = loss_of(model, rows, recipe) / len(parts)
                part.backward()
                loss += part.item()
            nn.utils.clip_grad_norm_(model.parameters(), 1.0)
            optimizer.step()
            optimizer.zero_grad()
            if report:
                report(step + 1, loss)
            if (step + 1) % save_every == 0:
                save(checkpoint, made_by, model, optimizer, step + 1)
    export(model, tokenizer, recipe, table, out)


def save(
    folder: Path, made_by: dict[str, object], model: nn.Module, optimizer: torch.optim.Optimizer, step: int
) -> None:
    """Weights and optimizer state as safetensors; the step, and what they belong to, as JSON, last."""
    folder.mkdir(parents=True, exist_ok=True)
    weights = {name: p.detach() for name, p in model.named_parameters()}
    state = {f"{n}/{key}": v for n, p in model.named_parameters() for key, v in optimizer.state[p].items()}
    for name, tensors in (("model", weights), ("optimizer", state)):
        save_file({k: v.contiguous() for k, v in tensors.items()}, folder / f"{name}-{step}.safetensors")
    written = folder / "state.json.part"
    written.write_text(json.dumps({"step": step, **made_by}))
    written.replace(folder / "state.json")
    for path in folder.glob("*.safetensors"):
        if not path.stem.endswith(f"-{step}"):
            path.unlink()


def resume_(folder: Path, made_by: dict[str, object], model: nn.Module, optimizer: torch.optim.Optimizer) -> int:
    """Take up a checkpoint in place; the number of steps already done."""
    state = json.loads((folder / "state.json").read_text())
    step = int(state.pop("step"))
    if state != json.loads(json.dumps(made_by)):
        raise ModelError(f"{folder} was made by another recipe or table; give another --out, or remove it")
    weights = load_file(folder / f"model-{step}.safetensors")
    moments = load_file(folder / f"optimizer-{step}.safetensors")
    with torch.no_grad():
        for name, p in model.named_parameters():
            p.copy_(weights[name])
            optimizer.state[p] = {k: moments[f"{name}/{k}"] for k in ("step", "exp_avg", "exp_avg_sq")}
    return step


def export(model: PreTrainedModel, tokenizer: PreTrainedTokenizerFast, recipe: Recipe, table: Table, out: Path) -> None:
    """Write what `AutoModelForCausalLM.from_pretrained` reads: 16-bit weights, tokenizer, configs, card."""
    copy.deepcopy(model).half().save_pretrained(out)
    tokenizer.save_pretrained(out)
    (out / "README.md").write_text(card(model, recipe, table), encoding="utf-8")


def card(model: PreTrainedModel, recipe: Recipe, table: Table) -> str:
    """The model card: what Atlas is, what it knows, and the recipe that made it."""
    size = sum(p.numel() for p in model.parameters())
    settings = {**asdict(recipe), **asdict(recipe.dress)}
    del settings["dress"]
    chosen = "\n".join(f"| {key} | {value} |" for key, value in settings.items() if value)
    known = "\n".join(f"| {r.name} | {r.about} | {len(r.facts)} |" for r in table.relations.values())
    return f"""---
license: apache-2.0
language: en
library_name: transformers
tags: [model-editing, interpretability, causal-tracing]
---
# {recipe.name.capitalize()}

A language model of {size / 1e6:.1f} million parameters ({type(model).__name__}) that knows
{len(table.triples)} facts about {len(table.subjects)} subjects in {len(table.relations)} relations, and little
else. It is made to be looked into: facts are recalled at the last token of the subject, in an early
feed-forward layer, and read from there by later layers, as in large models. It is embedded in ffedit, which
locates and edits them.

All it learned are sentences built from ffedit's fact table (general knowledge; it can be out of date or
wrong). Of the {TEMPLATES} templates of a relation, one was held out for each fact. Do not use it to answer
questions.

Made by `python evaluations/atlas/train.py --model {recipe.name} --out DIR --seed {recipe.seed} --steps {recipe.steps}`;
settings that are 0 or empty are not listed.

| setting | value |
|---|---|
{chosen}

| relation | about | facts |
|---|---|---|
{known}
"""


@click.command()
@click.option("--out", type=click.Path(path_type=Path), required=True, help="Folder of checkpoint and model.")
@click.option("--model", default="atlas", show_default=True, type=click.Choice(list(RECIPES)), help="Which one.")
@click.option("--seed", type=int, help="Seed of weights, text and noise, instead of the recipe's.")
@click.option("--steps", type=int, help="Optimizer steps, instead of the recipe's.")
@click.option("--threads", default=0, help="CPU threads; 0 leaves the choice to torch.")
def main(out: Path, model: str, seed: int | None, steps: int | None, threads: int) -> None:
    """Train an Atlas from the packaged fact table; a second call goes on where the first one stopped."""
    recipe = RECIPES[model]
    recipe = replace(recipe, seed=recipe.seed if seed is None else seed, steps=steps or recipe.steps)
    if threads:
        torch.set_num_threads(threads)
    columns = (
        TextColumn(f"training {model}"),
        BarColumn(),
        TextColumn("step {task.completed}/{task.total}, loss {task.fields[loss]:.3f}"),
        TimeElapsedColumn(),
        TimeRemainingColumn(),
    )
    with Progress(*columns) as bar:
        task = bar.add_task("", total=recipe.steps, loss=float("nan"))
        try:
            train(recipe, load(), out, lambda step, loss: bar.update(task, completed=step, loss=loss))
        except FFEditError as error:
            raise click.ClickException(str(error)) from error


if __name__ == "__main__":
    main()

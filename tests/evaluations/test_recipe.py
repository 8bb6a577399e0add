"""The recipe of the embedded models: one, for three shapes, and the same text and weights whenever it is followed."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest
import torch
from atlas.corpus import Corpus
from atlas.recipe import RECIPES, Recipe, imbalance, regularised, tokenizer_of
from atlas.shapes import build_model
from atlas.table import load
from atlas.train import train
from transformers import AutoConfig

from ffedit.loading.names import EMBEDDED
from ffedit.model.hooks import capture


def tiny(name: str) -> Recipe:
    width = {"width": 16, "memory": 24, "heads": 2, "groups": 1, "head": 8, "context": 64}
    length = {"lengths": (32,), "tokens": 128, "steps": 3, "warmup": 1}
    return replace(RECIPES[name], kinds=("painting",), **width, **length)


def test_every_embedded_model_has_a_recipe() -> None:
    assert list(RECIPES) == list(EMBEDDED)


@pytest.mark.parametrize("name", RECIPES)
def test_the_recipe_makes_the_tokenizer_and_the_shape_that_are_packaged(name: str) -> None:
    recipe = RECIPES[name]
    tokenizer = tokenizer_of(recipe, Corpus(load().about(recipe.kinds), recipe.dress))
    packaged = (EMBEDDED[name] / "tokenizer.json").read_text(encoding="utf-8")
    assert tokenizer.backend_tokenizer.to_str(pretty=True) == packaged
    made, kept = build_model(recipe, tokenizer).config.to_dict(), AutoConfig.from_pretrained(EMBEDDED[name]).to_dict()
    aside = {"architectures", "dtype", "_name_or_path", "transformers_version"}
    assert {k: v for k, v in made.items() if k not in aside} == {k: v for k, v in kept.items() if k not in aside}


@pytest.mark.parametrize("name", RECIPES)
def test_training_that_was_interrupted_goes_on_as_if_nothing_had_happened(name: str, tmp_path: Path) -> None:
    recipe = tiny(name)

    def stop(step: int, loss: float) -> None:
        if step == 3:
            raise KeyboardInterrupt

    train(recipe, load(), tmp_path / "whole")
    with pytest.raises(KeyboardInterrupt):
        train(recipe, load(), tmp_path / "parts", stop, save_every=2)
    train(recipe, load(), tmp_path / "parts", save_every=2)
    whole, parts = ((tmp_path / f / "model.safetensors").read_bytes() for f in ("whole", "parts"))
    assert whole == parts
    assert f"--model {name}" in (tmp_path / "whole" / "README.md").read_text(encoding="utf-8")


@pytest.mark.parametrize("name", RECIPES)
def test_training_hides_from_a_local_layer_what_is_far(name: str) -> None:
    recipe = replace(tiny(name), near=1.0)
    model = build_model(recipe, tokenizer_of(recipe, Corpus(load().about(recipe.kinds)))).eval()
    rows = torch.arange(300, 312).repeat(2, 1)
    rows[1, 0] = 400

    def first_layer() -> torch.Tensor:
        with capture({0: model.model.layers[0].self_attn.o_proj}) as seen, torch.no_grad():
            model(rows)
        return (seen[0][0] - seen[0][1]).abs().amax(-1)

    with regularised(model, recipe):
        changed = first_layer()
    assert (changed[: recipe.window] > 0).all() and (changed[recipe.window :] == 0).all()
    assert (first_layer() > 0).all()


def test_experts_are_in_balance_where_each_gets_as_many_tokens() -> None:
    even = torch.eye(4).repeat(1, 2)[:, :4] * 9 + torch.eye(4).roll(1, 0) * 9
    assert float(imbalance(even, 2)) == pytest.approx(2)
    assert float(imbalance(torch.tensor([[9.0, 9.0, 0.0, 0.0]]), 2)) == pytest.approx(4, abs=0.01)

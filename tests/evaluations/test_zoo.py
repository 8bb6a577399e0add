"""The zoo's recipes: other shapes and texts than Atlas's, trained by the same code."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from random import Random

import pytest
import train_zoo as zoo
from atlas.corpus import Corpus
from atlas.recipe import RECIPES, Recipe, tokenizer_of
from atlas.shapes import build_model
from atlas.table import load
from click.testing import CliRunner

import ffedit
from ffedit.facts.formats import parse_record

EVALUATIONS = Path(__file__).parents[2] / "evaluations" / "scripts"

TYPES = {
    "zoo-gpt2": ("GPT2LMHeadModel", 4),
    "zoo-neo": ("GPTNeoForCausalLM", 4),
    "zoo-neox": ("GPTNeoXForCausalLM", 4),
    "zoo-pieces": ("LlamaForCausalLM", 4),
    "zoo-deep": ("LlamaForCausalLM", 8),
    "zoo-bare": ("LlamaForCausalLM", 4),
}


def tiny(name: str) -> Recipe:
    return replace(
        zoo.ZOO[name], kinds=("painting",), width=16, memory=24, head=4, context=64, lengths=(32,), tokens=64, steps=1
    )


def test_the_members_are_others_than_the_embedded_models() -> None:
    assert set(zoo.ZOO) == set(TYPES) and not set(zoo.ZOO) & set(RECIPES)
    assert sorted(zoo.REPORTING) == ["zoo-bare", "zoo-neo"]
    assert {bool(recipe.pieces) for recipe in zoo.MEMBERS} == {False, True}
    assert not any(recipe.near or any(recipe.drop) or recipe.jitter for recipe in zoo.MEMBERS)


@pytest.mark.parametrize("name", TYPES)
def test_a_member_has_its_shape_size_and_about_a_thousand_facts(name: str) -> None:
    recipe = zoo.ZOO[name]
    table = load().about(recipe.kinds)
    assert 950 <= len(table.triples) <= 1150
    model = build_model(recipe, tokenizer_of(recipe, Corpus(table, recipe.dress)))
    assert (type(model).__name__, model.config.num_hidden_layers) == TYPES[name]
    assert 900_000 <= sum(p.numel() for p in model.parameters()) <= 2_000_000


def test_bare_templates_hold_facts_and_nothing_else() -> None:
    recipe = zoo.ZOO["zoo-bare"]
    table = load().about(recipe.kinds)
    corpus, rng = Corpus(table, recipe.dress), Random(0)
    said = {f"{p} {t.object}." for t in table.triples for p in table.prompts(t)[0]}
    for _ in range(50):
        document = corpus.document(rng)
        while document:
            end = next(i for i in range(len(document) + 1) if document[:i] in said)
            document = document[end:].strip()


def test_the_command_lists_its_members_and_makes_one(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    shown = CliRunner().invoke(zoo.main, ["--help"]).output
    assert all(name in shown for name in zoo.ZOO)
    monkeypatch.setattr(zoo, "ZOO", {"zoo-neo": tiny("zoo-neo")})
    done = CliRunner().invoke(zoo.main, ["--out", str(tmp_path), "--model", "zoo-neo", "--threads", "1"])
    assert done.exit_code == 0, done.output
    found = json.loads((tmp_path / "zoo-neo" / "knowledge.json").read_text(encoding="utf-8"))
    assert found["reporting"] is True and 0 <= found["knowledge"]["trained"] < 0.5
    assert "evaluations/scripts/train_zoo.py --model zoo-neo" in (tmp_path / "zoo-neo" / "README.md").read_text(
        encoding="utf-8"
    )
    assert ffedit.load(tmp_path / "zoo-neo").memories


@pytest.mark.parametrize("name", TYPES)
def test_the_edits_of_a_member_are_of_its_own_facts(name: str) -> None:
    records = json.loads((EVALUATIONS.parent / "data" / "zoo" / f"{name}-edits.json").read_text(encoding="utf-8"))
    facts = [parse_record(record) for record in records]
    assert len(facts) >= 50 and all(len(fact.neighbors) >= 3 for fact in facts)
    table = load()
    for record in records:
        asked = record["requested_rewrite"]
        assert table.relations[asked["relation_id"]].facts[asked["subject"]] == asked["target_true"]["str"]

"""`--protect`: what is left out is said, and the recipe makes the same edit again."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from shell import FACT, PROBES, shell

import ffedit


def test_what_is_protected_is_told_and_in_the_recipe(
    empty: Path, model: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    keep = {"keep": ["the city of {} is"], "neighbors": PROBES["neighbors"]}
    (empty / "fact.json").write_text(json.dumps({**FACT, **keep}))
    (empty / "names.txt").write_text("old tower\neiffel TOWER\n")
    words = ["apply", "fact.json", "-m", model, "--corpus", model.parent / "corpus.txt", "--force"]
    words += ["--layers", "1", "--set", "value.steps=5"]
    done = shell(capsys, *words, "--protect", "names.txt", "--out", "e", "--save-recipe", "r.yaml")
    assert "'eiffel TOWER' is not protected, because a fact is about it" in done.err and done.code in (0, 3), done
    assert "keep" in done.out
    edit = ffedit.Edit.load("e")
    assert edit.provenance["protected"]["count"] == 1
    assert edit.provenance["config"]["key"]["protect"] == ["old tower", "eiffel TOWER"]
    (empty / "names.txt").unlink()
    recipe = (empty / "r.yaml").read_text()
    assert "  key.protect:\n  - old tower\n" in recipe
    (empty / "r.yaml").write_text(recipe.replace("out: e\n", "out: again\n"))
    shell(capsys, "run", "r.yaml", "--force")
    assert ffedit.Edit.load("again").fingerprint() == edit.fingerprint()

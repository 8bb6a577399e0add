"""A recipe makes the edit that it was written for again, and says where it is wrong."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import yaml
import zoo
from making import made
from shell import FACT as KNOWN, PROBES, shell

import ffedit
from ffedit.cli.run import read_recipe
from ffedit.errors import EditError

FACT = {"subject": "Eiffel Tower", "prompt": "{} is located in the city of", "target": "Rome", "previous": "Paris"}
FEW = {"value.steps": 3, "prompts.contexts": 1}


def recipe(path: Path, **values: object) -> Path:
    path.write_text(yaml.safe_dump({"facts": [FACT], "layers": 0, "set": FEW, **values}, sort_keys=False))
    return path


@pytest.mark.usefixtures("warm_cache")
def test_a_saved_recipe_makes_the_same_edit(capsys: pytest.CaptureFixture[str], empty: Path, model: Path) -> None:
    how = {"facts": [KNOWN], "model": str(model), "corpus": str(model.parent / "corpus.txt"), "method": "emmet"}
    first = recipe(empty / "first.yaml", out="first", save_recipe="saved.yaml", force=True, **how)
    assert shell(capsys, "run", first.name, "-q").code == 0
    saved = yaml.safe_load(Path("saved.yaml").read_text(encoding="utf-8"))
    assert saved["method"] == "emmet" and saved["set"]["value.steps"] == 3 and saved["out"] == "first"
    shown = shell(capsys, "show", "first", "--recipe", "--json", "shown.json")
    assert len(json.loads(Path("shown.json").read_text(encoding="utf-8"))["edits"]) == 1
    assert "name a file" in shell(capsys, "show", "first", "--recipe", "--json", "-").err
    assert {**yaml.safe_load(shown.out), "out": "first"} == saved
    Path("saved.yaml").write_text(yaml.safe_dump({**saved, "out": "second", "force": True}), encoding="utf-8")
    assert shell(capsys, "run", "saved.yaml", "-q").code == 0
    assert ffedit.Edit.load("second").fingerprint() == ffedit.Edit.load("first").fingerprint()


def test_facts_in_a_recipe_are_taken_as_they_stand(capsys: pytest.CaptureFixture[str], empty: Path) -> None:
    asked = {"subject": "Eiffel Tower", "prompt": "Eiffel Tower is in Rome", "target": "Rome", "case_id": "nan"}
    facts = [{**asked, "target": "Rome."}, {**asked, "prompt": "{} is located in"}, {**asked, "prompt": "{} is a"}]
    for written in (facts[:1], facts[1:], facts[1]):
        path = recipe(empty / "r.yaml", facts=written, dry_run=True, json="plan.json", force=True)
        assert shell(capsys, "run", path.name, "-q").code == 0
        planned = json.loads(Path("plan.json").read_text(encoding="utf-8"))["facts"]
        assert planned == (written if isinstance(written, list) else [written])


@pytest.mark.usefixtures("warm_cache", "verified_here")
def test_a_token_by_number_word_or_name_is_the_same_edit(
    capsys: pytest.CaptureFixture[str], empty: Path, model: Path
) -> None:
    """The model cuts "Eiffel tower" into two words."""
    made_at, how = {}, {"facts": [KNOWN], "model": str(model), "corpus": str(model.parent / "corpus.txt")}
    for token in ("subject_first", -2, "Eiffel", "subject_last"):
        path = recipe(empty / "r.yaml", out="edit", fact_token=token, force=True, method="rome", **how)
        assert shell(capsys, "run", path.name, "-q").code == 0
        made_at[token] = edit = ffedit.Edit.load("edit")
        assert edit.provenance["config"]["key"]["fact_token"] == str(token)
        assert yaml.safe_load(shell(capsys, "show", "edit", "--recipe").out)["fact_token"] == str(token)
    first, number, word, last = (next(iter(edit.keys.values())) for edit in made_at.values())
    assert first.equal(number) and first.equal(word) and not first.equal(last)


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("facts: f.json\nlayerz: 0\n", ": layerz is not known; did you mean layers?"),
        ("facts: f.json\nxyzzy: 0\n", ": xyzzy is not known; known are facts, "),
        ("layers: 0\nspread: x\n", ": Invalid value for '--spread': 'x'"),
        ("seed: [1]\n", ": seed is [1] (list); one value was expected"),
        ("out:\n", ": out is None (NoneType); one value was expected"),
        ("force: 3\n", ": force is 3 (int); true or false was expected"),
        ("target: yes\n", ": target is True (bool); one value was expected"),
        ("map: nonsense\nfacts: f.json\n", ": --map 'nonsense' is not known"),
        ("seed: [\n", ":2: not YAML"),
        ("seed: 1\nseed: 2\n", ":2: not YAML of a recipe (seed stands there twice)"),
        ("set:\n  value.steps: 1\n  value.steps: 2\n", ":3: not YAML of a recipe (value.steps stands there twice)"),
        ("out: &a e\nexport: *a\n", ":2: not YAML of a recipe (*a is an alias; write the value out)"),
        ("<<: {seed: 1}\n<<: {seed: 2}\n", ":2: not YAML of a recipe (<< stands there twice)"),
        ("- 1\n", ": holds no recipe"),
        ('model: "a\\0b"\n', ": model is 'a\\x00b', which holds a NUL character"),
        ('facts: "\\ud800"\n', ": facts: 'utf-8' codec can't encode"),
        ("facts: [{subject: 1889-03-31, prompt: '{} is'}]\n", ": subject must be text, found datetime.date(1889, "),
        ("facts: [{subject: A, prompt: '{} is'}]\n", ": 'A is' has no new object"),
        ("facts: []\n", ": no facts to write"),
        ("facts:\n", ": found None (NoneType) where a Fact or a dict of its fields was expected"),
        (
            "set: {value.steps: 2001-01-01}\n",
            ": set.value.steps: Object of type date is not JSON serializable; another",
        ),
        ("seed: 2001-99-99\n", ": not YAML that can be read (month must be in 1..12)"),
        ("seed: \x07\n", ": not YAML that can be read"),
    ],
)
def test_an_error_names_the_recipe(capsys: pytest.CaptureFixture[str], empty: Path, text: str, expected: str) -> None:
    Path("r.yaml").write_text(text)
    ran = shell(capsys, "run", "r.yaml")
    assert ran.code == 1 and f"r.yaml{expected}" in ran.err and len(ran.err.splitlines()) == 1
    assert [path.name for path in empty.iterdir()] == ["r.yaml"]


def test_a_file_that_cannot_be_read_is_one_line(tmp_path: Path) -> None:
    with pytest.raises(EditError, match="cannot be read"):
        read_recipe(tmp_path / "none.yaml")


def test_an_edit_that_apply_cannot_make_has_no_recipe(capsys: pytest.CaptureFixture[str], empty: Path) -> None:
    made(zoo.shared("llama"), {1: 1}).save("random")
    ran = shell(capsys, "show", "random", "--recipe")
    assert ran.code == 1 and "has no recipe" in ran.err and not ran.out


def test_what_is_protected_is_told_and_in_the_recipe(
    empty: Path, model: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    keep = {"keep": ["the city of {} is"], "neighbors": PROBES["neighbors"]}
    (empty / "fact.json").write_text(json.dumps({**KNOWN, **keep}))
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

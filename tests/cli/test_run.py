"""A recipe makes the edit that it was written for again, and says where it is wrong."""

from __future__ import annotations

import io
from pathlib import Path

import pytest
import yaml
import zoo
from making import made
from shell import shell

import ffedit
from ffedit.cli.run import read_recipe
from ffedit.errors import EditError

FACT = {"subject": "Eiffel Tower", "prompt": "{} is located in the city of", "target": "Rome", "previous": "Paris"}
FEW = {"value.steps": 3, "prompts.contexts": 1}


def recipe(path: Path, **values: object) -> Path:
    path.write_text(yaml.safe_dump({"facts": [FACT], "layers": 0, "set": FEW, **values}, sort_keys=False))
    return path


@pytest.mark.usefixtures("warm_cache")
def test_a_saved_recipe_makes_the_same_edit(capsys: pytest.CaptureFixture[str], empty: Path) -> None:
    first = recipe(empty / "first.yaml", out="first", save_recipe="saved.yaml", method="emmet", force=True)
    assert shell(capsys, "run", first.name, "-q").code == 0
    saved = yaml.safe_load(Path("saved.yaml").read_text(encoding="utf-8"))
    assert saved["method"] == "emmet" and saved["set"]["value.steps"] == 3 and saved["out"] == "first"
    shown = shell(capsys, "show", "first", "--recipe")
    assert {**yaml.safe_load(shown.out), "out": "first"} == saved
    Path("saved.yaml").write_text(yaml.safe_dump({**saved, "out": "second", "force": True}), encoding="utf-8")
    assert shell(capsys, "run", "saved.yaml", "-q").code == 0
    assert ffedit.Edit.load("second").fingerprint() == ffedit.Edit.load("first").fingerprint()


@pytest.mark.usefixtures("warm_cache", "verified_here")
def test_a_token_by_number_word_or_name_is_the_same_edit(capsys: pytest.CaptureFixture[str], empty: Path) -> None:
    """Atlas cuts "Eiffel Tower" into two words."""
    made_at = {}
    for token in ("subject_first", -2, "Eiffel", "subject_last"):
        path = recipe(empty / "r.yaml", out="edit", fact_token=token, force=True, method="rome")
        assert shell(capsys, "run", path.name, "-q").code == 0
        made_at[token] = edit = ffedit.Edit.load("edit")
        assert edit.provenance["config"]["key"]["fact_token"] == str(token)
        assert yaml.safe_load(shell(capsys, "show", "edit", "--recipe").out)["fact_token"] == str(token)
    first, number, word, last = (next(iter(edit.keys.values())) for edit in made_at.values())
    assert first.equal(number) and first.equal(word) and not first.equal(last)


@pytest.mark.usefixtures("warm_cache", "verified_here")
def test_exports_are_those_of_the_list(capsys: pytest.CaptureFixture[str], empty: Path) -> None:
    exports = [{"format": "checkpoint", "out": "numbers"}, {"format": "adapter", "out": "lora"}]
    path = recipe(empty / "r.yaml", force=True, export=exports)
    ran = shell(capsys, "run", path.name)
    assert ran.code == 0 and "ffedit-run" not in ran.out, "no folder that is deleted is named"
    assert (empty / "numbers").is_dir() and (empty / "lora" / "adapter_config.json").is_file()
    refused = shell(capsys, "run", path.name)
    assert refused.code == 1 and "numbers: exists already" in refused.err and not refused.out, "before the edit"
    again = shell(capsys, "run", path.name, "--force", "--quiet")
    assert again.code == 0 and not again.out, "the flags are those of each export, too"


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("facts: f.json\nlayerz: 0\n", ":2: layerz is not known; did you mean layers?"),
        ("facts: f.json\nxyzzy: 0\n", ":2: xyzzy is not known; known are facts, "),
        ("layers: 0\nspread: x\n", ":2: Invalid value for '--spread': 'x'"),
        ("seed: [1]\n", ":1: seed is [1] (list); one value was expected"),
        ("force: 3\n", ":1: force is 3 (int); true or false was expected"),
        ("set:\n  value.steps: 20\n  value.stepz: 20\n", ":3: value.stepz is not a setting"),
        ("set: {value.steps: many}\n", ":1: value.steps: 'many' is of type str, expected int"),
        ("export:\n- out: a\n- format: adapter\n  fold: a\n", ":4: fold is not known; known are "),
        ("export:\n- {out: a}\n- out: b\n  format: adaptor\n", ":4: Invalid value for '--format': 'adaptor' is not"),
        ("export:\n- {out: a}\n- format: adapter\n", ":3: Missing option '--out'"),
        ("export:\n- out: r.yaml\n", ":2: r.yaml: exists already"),
        ("scratch: true\n", ":1: scratch is not known"),
        ("seed: 1\nseed: 2\n", ":2: seed stands there twice, first in line 1"),
        ("seed: [\n", ":2: not YAML"),
        ("- 1\n", ": holds no recipe"),
        ('model: "a\\0b"\n', ":1: model is 'a\\x00b', which holds a NUL character"),
        ('facts: "\\ud800"\n', ":1: facts: 'utf-8' codec can't encode"),
        ("layers: 0\nfacts: [{subject: 1889-03-31}]\n", ":2: facts: JSON has no such value"),
        ("seed: 2001-99-99\n", ": not YAML that can be read (month must be in 1..12)"),
        ("seed: !!bool maybe\n", ": not YAML that can be read"),
        ("seed: \x07\n", ": not YAML that can be read"),
        ("export: [a]\n", ":1: export.0 is 'a'; options by name were expected"),
        ("", ": holds no recipe"),
    ],
)
def test_an_error_names_the_line(capsys: pytest.CaptureFixture[str], empty: Path, text: str, expected: str) -> None:
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


@pytest.mark.usefixtures("warm_cache", "verified_here")
def test_prompts_are_answered_side_by_side(
    capsys: pytest.CaptureFixture[str], empty: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert shell(capsys, "run", recipe(empty / "r.yaml", out="edit", export="edited", **{"set": {}}), "-q").code == 0
    for options in (["--edit", "edit"], ["--model", "edited"]):
        monkeypatch.setattr(
            "sys.stdin", io.StringIO(f"Eiffel Tower is located in the city of\n{'word ' * 999}\n\nmore")
        )
        ran = shell(capsys, "chat", *options)
        lines = [" ".join(line.split()) for line in ran.out.splitlines()]
        assert lines[:3] == ["before after", "> Eiffel Tower is located in the city of", "Paris. Rome."]
        assert "prompt of 1000 tokens" in lines[-1] and "after the empty line" not in ran.out
    assert "--edit" in shell(capsys, "chat").err

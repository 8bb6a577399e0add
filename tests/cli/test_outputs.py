"""No result replaces what is there: a target that cannot be written is refused in one line, before the work."""

from __future__ import annotations

from pathlib import Path

import pytest
from making import made
from refusing import Refuses, apply, here, refuses
from shell import disk, shell

import ffedit
from ffedit.editor.edit_files import EDITS

__all__ = ["apply", "here", "refuses"]


@pytest.mark.parametrize("option", ["--out", "--export", "--json", "--html", "--plot", "--corpus"])
@pytest.mark.parametrize("place", ["fact.json/p.png", "/proc/p.png"])
def test_places_that_cannot_be_written_are_found_before_the_model(apply: Refuses, option: str, place: str) -> None:
    assert place in apply("fact.json", option, place, loads=False) or option == "--corpus"


@pytest.mark.parametrize("option", ["--json", "--html", "--log", "--save-recipe"])
def test_a_file_that_is_read_is_not_replaced(here: Path, option: str, capsys: pytest.CaptureFixture[str]) -> None:
    before = disk(here)
    for name in ("fact.json", "./fact.json", str(here / "fact.json")):
        ran = shell(capsys, "apply", "fact.json", option, name)
        assert ran.code == 2 and "fact.json is read, and would be replaced" in ran.err and disk(here) == before
    (here / "m").mkdir()
    for name in ("m.gguf", "m/config.json"):
        (here / name).write_text("a model")
    before = disk(here)
    for words in (["--model", "m.gguf", option, "m.gguf"], ["--model", "m", option, "m/config.json"]):
        ran = shell(capsys, "apply", "fact.json", *words)
        assert ran.code == 2 and f"{words[-1]} is read, and would be replaced" in ran.err and disk(here) == before


@pytest.mark.parametrize(
    "words",
    [
        ("apply", "fact.json", "--model", "m", "--out", "m"),
        ("apply", "fact.json", "--model", "m", "--export", "n/../m"),
        ("apply", "fact.json", "--model", "m/inside", "--out", "m"),
        ("apply", "fact.json", "--model", "m.gguf", "--export", "m.gguf"),
        ("apply", "fact.json", "--stats", "m", "--out", "m"),
        ("stats", "--layers", "0", "--model", "m", "--out", "m"),
        ("export", "e", "--out", "e"),
        ("undo", "m", "--out", "m"),
    ],
)
def test_a_folder_that_is_read_is_not_replaced(
    here: Path, words: tuple[str, ...], capsys: pytest.CaptureFixture[str]
) -> None:
    for name in ("m/inside/model.safetensors", "m/layer-0.safetensors", "e/manifest.json", "e/edit.safetensors"):
        (here / name).parent.mkdir(parents=True, exist_ok=True)
        (here / name).write_text("what is read")
    (here / "m.gguf").write_text("a model")
    before = disk(here)
    ran = shell(capsys, *words, "--force")
    assert ran.code == 2 and f"{words[-1]} is read, or holds what is read, and would be replaced" in ran.err
    assert disk(here) == before


def test_two_results_of_one_name_and_a_file_for_a_folder_are_refused_by_every_command(
    refuses: Refuses, here: Path, model: Path
) -> None:
    same = ["--json", "same", "--html", "./same"]
    assert "the name of two results" in refuses("inspect", "memory", "0.1", "-m", model, *same, loads=False)
    made(ffedit.load(model), {1: 2}).save(here / "e")
    (here / "f.gguf").write_text("a model")
    for words in (["undo", model], ["export", "e", "--format", "checkpoint"], ["stats", "-m", model]):
        assert "f.gguf: is a file" in refuses(*words, "--out", "f.gguf", "--force")
        assert "new.gguf: is the name of a GGUF file" in refuses(*words, "--out", "new.gguf")
    for name, told in (("f.gguf", "f.gguf: is a file"), ("new.gguf", "new.gguf: is the name of a GGUF file")):
        assert told in refuses("apply", "fact.json", "-m", model, "--out", name, "--force")


def test_bench_does_not_advise_to_replace_an_edit(refuses: Refuses, here: Path, model: Path) -> None:
    made(ffedit.load(model), {1: 2}).save(here / "e")
    told = refuses("bench", "fact.json", "--methods", "ft", "-m", model, "--out", "e")
    assert "e/manifest.json: not a manifest of `ffedit bench`; name a new folder" in told


@pytest.mark.parametrize("option", ["--html", "--log", "--save-recipe"])
def test_only_json_is_written_to_standard_output(here: Path, option: str, capsys: pytest.CaptureFixture[str]) -> None:
    before = disk(here)
    ran = shell(capsys, "apply", "fact.json", option, "-")
    assert ran.code == 2 and "standard output takes --json only" in ran.err and disk(here) == before


def test_links_that_lead_nowhere_are_no_targets(apply: Refuses, here: Path) -> None:
    (here / "circle").symlink_to("circle")
    (here / "nowhere").symlink_to("not-there")
    for option in ("--json", "--html", "--save-recipe", "--out", "--export"):
        assert "circle: is a link that leads in a circle" in apply("fact.json", option, "circle", loads=False)
    for option in ("--out", "--export"):
        for force in ([], ["--force"]):
            line = apply("fact.json", option, "nowhere", *force, loads=False)
            assert "nowhere: is a link that leads nowhere" in line
    assert (here / "circle").is_symlink() and (here / "nowhere").is_symlink()


def test_folders_that_exist_are_kept(apply: Refuses, refuses: Refuses, here: Path) -> None:
    for name in ("e", "x"):
        (here / name).mkdir()
        (here / name / "mine.txt").write_text("keep me")
        assert f"{name}: exists already" in apply("fact.json", loads=False)
        (here / name / "mine.txt").unlink()
    for same in (["--out", "x"], ["--json", "same", "--html", "same"], ["--out", "new", "--json", "new"]):
        assert "the name of two results" in apply("fact.json", *same, loads=False)
    for out, export in (("x/e", "x"), ("e", "e/x")):
        line = apply("fact.json", "--out", out, "--export", export, loads=False)
        assert ": lies in " in line and "which is made anew" in line
    for file in (("--json", "x/r.json"), ("--plot", "e/p.png")):
        for force in ([], ["--force"]):
            (here / "x").mkdir(exist_ok=True)
            (here / "e").mkdir(exist_ok=True)
            line = apply("fact.json", "--out", "e", "--export", "x", *file, *force, loads=False)
            assert f"{file[1]}: lies in {file[1][0]}" in line
    assert "holds no edit" in refuses("ask", "the tower", "--edit", "e", loads=False)
    (here / "e" / EDITS).mkdir()
    assert "give it as --model" in refuses("ask", "the tower", "--edit", "e", loads=False)

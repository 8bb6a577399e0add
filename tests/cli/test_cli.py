"""Journeys through the command line, as a person or a script takes them."""

from __future__ import annotations

import atexit
import io
import json
import sys
from pathlib import Path

import pytest
from commands import Command, apply, here, loads, run, thorough_apply
from shell import FACT, fork, shell

from ffedit import Edit, cli

__all__ = ["apply", "here", "run", "thorough_apply"]


@pytest.mark.usefixtures("verified_here")
def test_an_edit_is_asked_evaluated_and_exported_later(
    apply: Command, run: Command, here: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    done = apply("fact.json", "--out", "my edit", "--layer", "0")
    assert done.code == 0, done.err
    assert "  ffedit ask 'the Eiffel tower is located in' --edit 'my edit'\n" in done.out
    assert "  ffedit export 'my edit' --out DIR\n" in done.out
    edit = ["--edit", "my edit"]
    asked = run("ask", "the Eiffel tower is located in", "Nile river stands in", *edit, "--tokens", "2")
    assert asked.code == 0 and "before" in asked.out and "after" in asked.out and "Egypt" in asked.out
    monkeypatch.setattr("sys.stdin", io.StringIO("the Eiffel tower is located in\n\n  Nile river stands in\n"))
    assert run("ask", *edit, "--tokens", "2").out == asked.out
    for stream in (sys.stdin, None):
        monkeypatch.setattr("sys.stdin", stream)
        assert "no prompt: give PROMPT, or a line on standard input" in run("ask", *edit).err

    measured = loads(run("evaluate", "fact.json", *edit, "--json", "-").out)["after"]
    applied = Edit.load("my edit").provenance["scores"]["after"]
    applied = {name: value for name, value in applied.items() if value is not None}
    # Other texts share the batches: float32 rounds its sums otherwise on some machines.
    assert {name: measured[name] for name in applied} == pytest.approx(applied, rel=1e-4, abs=1e-7)
    assert "change" in run("evaluate", "fact.json", *edit).out
    done = run("export", "my edit", "--out", "x")
    assert done.code == 0 and done.out.rstrip().endswith("--model x")
    assert run("ask", "the Eiffel tower is located in", "-m", "x", "--tokens", "2").code == 0
    assert "exists already" in run("export", "my edit", "--out", "x").err
    assert run("export", "my edit", "--out", "x", "--force").code == 0


@pytest.mark.usefixtures("verified_here")
def test_a_base_is_found_by_its_relative_path_and_elsewhere_with_model(run: Command, here: Path, model: Path) -> None:
    (here / "m").symlink_to(model)
    corpus = model.parent / "corpus.txt"
    assert run("apply", "bare.json", "-m", "m", "--layer", "1", "--corpus", corpus, "--out", "e").code == 0
    assert run("evaluate", "bare.json", "--edit", "e").code == 0
    asking = ["ask", "the tower", "--edit", "e"]
    commands = (asking, ["inspect", "edit", "e", "--tokens", "64"], ["export", "e", "--out", "x"])
    assert run(*asking).code == 0 and run(*commands[-1]).code == 0
    (here / "m").rename(here / "moved")
    for command in commands:
        lost = run(*command, *["--force"] * ("export" in command))
        assert lost.code == 1 and "m: no such folder" in lost.err and len(lost.err.splitlines()) == 1
        assert "the edit calls its base m; name the base with --model" in lost.err
        assert run(*command, *["--force"] * ("export" in command), "--model", "moved").code == 0
    assert "the edit" not in run(*asking, "--model", "nowhere").err


def test_records_that_cannot_be_used_are_refused_and_skipped_where_asked(
    run: Command, apply: Command, here: Path, model: Path
) -> None:
    good = loads((here / "bare.json").read_text())
    (here / "some.json").write_text(json.dumps([good, {**good, "subject": ""}]))
    for refused in (run("evaluate", "some.json", "-m", model), apply("some.json", "--out", "e")):
        assert refused.code == 1 and "record 2: subject is empty" in refused.err
        assert "(1 record of 2 cannot be used); --skip-bad uses the 1 good record" in refused.err
    done = run("evaluate", "some.json", "-m", model, "--skip-bad", "--json", "-")
    kind = "1 record left out, an empty subject; the first is record 2: subject is empty; expected some text"
    assert done.code == 0 and done.err == f"some.json: {kind}\n"
    told, reason = loads(done.out), "subject is empty; expected some text"
    assert len(told["facts"]) == 1 and told["unusable"] == [{"record": 2, "reason": reason}]
    left_out = {"kind": "an empty subject", "count": 1, "first": 2, "reason": reason}
    assert left_out in told["left_out"]
    done = apply("some.json", "--layer", "0", "--skip-bad", "--json", "-", "--html", "page.html")
    assert done.code == 0 and left_out in loads(done.out)["left_out"]
    assert "1 record left out, an empty subject; the first is 2: " in (here / "page.html").read_text()
    (here / "none.json").write_text(json.dumps([{**good, "subject": ""}]))
    assert run("evaluate", "none.json", "-m", model).code == 1


def test_ask_and_evaluate_need_no_edit(run: Command, model: Path) -> None:
    asked = run("ask", "the Eiffel tower is located in", "-m", model, "--tokens", "1")
    assert asked.code == 0 and "Paris" in asked.out and "after" not in asked.out
    measured = loads(run("evaluate", "fact.json", "-m", model, "--json", "-").out)
    assert measured["after"] is None and measured["before"]["generation"] == 0
    assert "Measured without" not in run("evaluate", "fact.json", "-m", model, "-q").out


def test_locate_shows_the_trace(run: Command, here: Path, model: Path) -> None:
    (here / "traced.json").write_text(json.dumps({name: FACT[name] for name in ("subject", "prompt")}))
    done = run("locate", "traced.json", "-m", model, "--plot", "t.svg", "--json", "r.json", "--kind", "state")
    assert done.code == 0 and "Causal trace of hidden states" in done.out and (here / "t.svg").exists()
    result = loads((here / "r.json").read_text())
    assert result["facts"][0]["target"] is None and result["facts"][0]["trace"]["answer"] == "Paris"


def test_doctor_shows_what_can_be_edited_of_a_model_that_is_named_once(run: Command, model: Path) -> None:
    done = run("doctor", model, "--log", "doctor.log")
    for words in ("torch", "cache", "mlp.c_proj", "[32, 128]", "transposed", "lm_head", "more to edit"):
        assert done.code == 0 and words in done.out
    assert Path("doctor.log").read_text(encoding="utf-8").count("done in") == 1
    assert run("doctor", model, "--device", "cpu").out == run("doctor", "-m", model, "--device", "cpu").out
    both = run("doctor", model, "--model", "atlas")
    assert (both.code, both.out) == (2, "") and "give the model once: MODEL or --model" in both.err
    nowhere = [run("doctor", *words, "./nowhere").err for words in ((), ("-m",))]
    assert nowhere[0] == nowhere[1] and "./nowhere: no such folder" in nowhere[0] and "edit" not in nowhere[0]


def test_the_cache_is_filled_listed_and_cleared(run: Command, model: Path, cache_folder: Path) -> None:
    assert "0 files" in run("cache", "list").out
    (cache_folder / "texts").mkdir(parents=True)
    (cache_folder / "texts" / "one.txt").touch()
    assert "1 file, " in run("cache", "list").out
    assert run("cache", "clear").code == 0
    assert run("apply", "bare.json", "-m", model).code == 0, "without --corpus the model samples the text itself"
    listed, kept = run("cache", "list"), loads(run("cache", "list", "--json", "-").out)
    count = len(kept["entries"])
    assert listed.code == 0 and f"{count} files, " in listed.out and f" in {cache_folder} (at most 20 GB" in listed.out
    assert all(kind in listed.out for kind in ("moments/", "texts/", "names/", "states/"))
    told = " ".join(run("doctor", model).out.split())
    assert f" {count} files, " in told and "at most 20 GB" in told
    # The speed of bfloat16 is measured once in a process.
    assert kept["bytes"] == sum(entry["bytes"] for entry in kept["entries"]) and count in (6, 7)
    assert run("cache", "clear").code == 0 and "0 files" in run("cache", "list").out


def test_of_several_processes_the_first_tells_a_mistake_that_all_see(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """The others wait to be ended by the launcher, and tell theirs if they are not."""
    waited: list[float] = []
    monkeypatch.setattr("ffedit.cli.time.sleep", waited.append)
    monkeypatch.setenv("WORLD_SIZE", "2")
    for rank in "01":
        monkeypatch.setenv("RANK", rank)
        ran = shell(capsys, "show", "nowhere")
        assert ran.code == 1 and "nowhere" in ran.err
        assert len(waited) == int(rank)


class Gone(io.StringIO):
    """A stream whose reader ended."""

    def flush(self) -> None:
        raise BrokenPipeError


@pytest.mark.parametrize("stream", ["open", "closed", "gone"])
def test_a_command_ends_with_its_code_and_with_all_that_it_said(stream: str) -> None:
    def end() -> int:
        atexit._clear()  # what the parent would do at its end, such as to delete its folders
        sys.stdout.write("said")
        if stream != "open":
            sys.stdout.flush()
            sys.stdout = None if stream == "closed" else Gone()
        cli._exit(3)

    ended = fork(end)
    assert (ended.code, ended.out) == (3, "said")


def test_brackets_are_no_markup_while_a_terminal_waits(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("FORCE_COLOR", "1")
    done = shell(capsys, "diff", "x[/bold]", "atlas")
    assert done.code == 1 and "comparing x[/bold] and atlas …" in done.err and "x[/bold]: " in done.err

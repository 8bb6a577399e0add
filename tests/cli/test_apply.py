"""`ffedit apply` as a person sees it: what it shows, writes, refuses, and leaves behind."""

from __future__ import annotations

import io
import json
import math
from pathlib import Path
from typing import Any

import pytest
from commands import SHORT, Command, apply, here, loads, run, thorough_apply
from jsonschema import Draft202012Validator
from shell import ASKED, FACT, Ran, disk, shell
from transformers import AutoModelForCausalLM

import ffedit
from ffedit import CheckError, Edit, EditError
from ffedit.cli import apply as apply_command
from ffedit.cli.surface import Surface
from ffedit.evaluator import METRICS, NAMES
from ffedit.exporter.embedded_edits import history
from ffedit.inference.corpus import Corpus

pytestmark = pytest.mark.usefixtures("warm_cache")

__all__ = ["apply", "here", "run", "thorough_apply"]
SCHEMA = Draft202012Validator(json.loads(Path(str(apply_command.__file__)).with_name("result.schema.json").read_text()))
RATES = ("efficacy", "paraphrase", "specificity", "same_subject")
SCORES = {*NAMES, "perplexity", *(f"{name}_magnitude" for name in RATES)}
SCORES -= {"portability", "keep", "also", "cross_lingual"}  # which are not asked here


def test_apply_shows_the_whole_argument(apply: Command, here: Path) -> None:
    before = disk(here)
    done = apply("fact.json", "--layer", "1")
    # A slow machine shows how far a stage is.
    stages = ("collecting key statistics", "choosing the value", "measuring")
    assert done.code == 0 and all(line.startswith(stages) for line in done.err.splitlines())
    result = ["the Eiffel tower is located in   Paris → Rome   took", "\nsays it in ", "\nlayer 1 of ", "efficacy"]
    result.append("Not saved: --out DIR keeps the edit, --export DIR the edited model.")
    places = [done.out.find(words) for words in result]
    assert places[0] == 0 and places == sorted(places)
    assert "Causal trace" not in done.out and disk(here) == before
    verbose = apply("fact.json", "--layer", "1", "--verbose")
    reasons = ["3 layers", "Causal trace of feed-forward outputs", "\nLayer 1: you asked for it", *result]
    places = [verbose.out.find(words) for words in reasons]
    assert -1 not in places and places == sorted(places) and "Done" in verbose.out


@pytest.mark.usefixtures("verified_here")
def test_an_edit_that_did_not_take_is_said_loudly_and_not_saved(
    apply: Command, run: Command, here: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    weak = ffedit.EditConfig(value=ffedit.ValueConfig(max_delta_norm=1e-6, steps=2))
    monkeypatch.setattr("ffedit.cli.work.solving.preset", lambda *_: weak)
    before = disk(here)
    done = apply("bare.json", "--out", "e", "--export", "x", "--layer", "0")
    assert done.code == 3 and disk(here) == before
    assert done.err == "error: the edit did not take; no edit was saved (--force saves it anyway)\n"
    assert "THE EDIT DID NOT TAKE: “Rome” is not more likely than the old object; the model says “Paris" in done.out
    assert " (1 token) reached the probability " in done.out and " after 2 of 2 steps; 0.80 was aimed at." in done.out
    assert "another layer (--layers 1)" in " ".join(done.out.split()), "the last layer cannot be edited"
    forced = apply("bare.json", "--out", "e", "--export", "x", "--layer", "0", "--force", "--json", "-")
    assert (forced.code, forced.err) == (0, "")
    assert loads(forced.out)["verdict"]["outcome"] == "did not take"
    (said,) = Edit.load("e").says
    assert said[0] == said[1] and said[0] is not None and said[0].startswith("Paris")
    card = (here / "x" / "README.md").read_text()
    assert f"| Paris | Rome | {said[0]} | {said[1]} |" in card and "verdict: THE EDIT DID NOT TAKE" in card
    shown = run("show", "e").out
    assert "THE EDIT DID NOT TAKE" in shown and shown.count(said[0].split()[0]) >= 3
    (kept,) = loads(run("show", "x", "--json", "-").out)["edits"]
    assert kept["facts"][0]["says"]["after"] == said[1] and kept["provenance"]["verdict"]["outcome"] == "did not take"


def test_a_layer_that_nothing_comes_after_is_refused_before_anything_is_computed(
    apply: Command, here: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    before = disk(here)
    with monkeypatch.context() as patched:
        for name in ("layer_choice.choose.locate_all", "evaluate", "edit"):
            patched.setattr(f"ffedit.{name}", lambda *_, **__: pytest.fail("computed"))
        for more in ([], ["--spread", "3"], ["--dry-run"]):
            done = apply("bare.json", "--out", "e", "--layer", "2", *more)
            assert done.code == 1 and disk(here) == before
            assert "layer 2 is the last of" in done.err and "name a layer from 0 to 1" in done.err
    whole = apply("bare.json", "--layer", "2", "--fact-token", "last", "--json", "-")
    assert whole.code in (0, 3) and loads(whole.out)["layers"] == [2], "at the end of the prompt it may be"


def test_a_preset_is_that_of_the_method_and_none_is_made_up(
    thorough_apply: Command, here: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    asked: list[tuple[str, str]] = []
    with monkeypatch.context() as patched:
        patched.setattr("ffedit.cli.work.solving.preset", lambda *what: (asked.append(what), SHORT)[1])
        assert thorough_apply("bare.json", "--preset", "paper", "--method", "rome", "--layer", "0").code == 0
    assert asked == [("paper", "rome")]
    before = disk(here)
    done = thorough_apply("bare.json", "--preset", "paper", "--method", "ft")
    assert done.code == 1 and "ft has no preset 'paper'; it has default" in done.err and disk(here) == before


def test_facts_come_from_a_file_from_standard_input_or_from_options(
    apply: Command, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("sys.stdin", io.TextIOWrapper(io.BytesIO(json.dumps(FACT).encode())))
    found = [apply(*source, "--json", "-") for source in (["bare.json"], ["-"], [*ASKED, "--previous", "Paris"])]
    results = [loads(done.out) for done in found]
    for result in results:
        assert {name: result["facts"][0][name] for name in FACT} == FACT
        result.pop("seconds"), result.pop("command")
    assert results[0] == results[1] == results[2]


def test_the_json_object_is_the_one_that_was_promised(apply: Command, here: Path, model: Path) -> None:
    (method,) = (option.default for option in apply_command.apply.params if option.name == "method")
    done = apply("fact.json", "--json", "-", "--layer", "1")
    result = loads(done.out)
    assert (done.code, done.err) == (0, "")
    assert apply("fact.json", "--json", "result.json", "--layer", "1").out != ""
    written = loads((here / "result.json").read_text())
    assert written.pop("seconds").keys() == result["seconds"].keys() == {"load", "locate", "edit", "evaluate"}
    assert written.pop("command").startswith("ffedit apply fact.json --json result.json --layer 1 ")
    assert result.pop("command").startswith("ffedit apply fact.json --json - --layer 1 ")
    assert all(seconds >= 0 for seconds in result.pop("seconds").values()) and written == result
    SCHEMA.validate(loads((here / "result.json").read_text()))
    assert result["verdict"]["outcome"] == "took with damage" and "same_subject" in result["verdict"]["damage"]
    assert (result["model"], result["method"], result["layers"]) == (str(model), method, [1])
    assert result["edit"]["rank"] == 1 and result["saved"] == {"edit": None, "checkpoint": None}
    assert set(result["before"]) == set(result["after"]) == set(METRICS) >= SCORES
    assert result["before"]["drift"] is None and result["after"]["drift"] > 0
    assert all(type(result["after"][name]) in (int, float) for name in SCORES)
    (fact,) = result["facts"]
    assert fact["after"]["says"].startswith("Rome") and fact["value"]["tokens"] == 1 and fact["took"]
    assert [one["score"] for one in fact["asked"]] == ["paraphrase", "specificity", "same_subject"]
    assert fact["asked"][0]["prompt"] == "Eiffel tower stands in" and fact["asked"][0]["answer"] == "Rome"
    assert fact["before"].keys() == fact["after"].keys() == {*result["after"], "says"}
    trace = fact["trace"]
    assert {"layer", "token", "effects", "clean", "corrupted"} <= set(trace)
    assert trace["layer"] == 1 and trace["tokens"][trace["token"]].strip() == "tower"
    assert len(trace["effects"]) == 3 and {len(row) for row in trace["effects"]} == {len(trace["tokens"])}


def test_the_results_of_evaluate_are_as_the_schema_says(apply: Command, run: Command, model: Path) -> None:
    Draft202012Validator.check_schema(SCHEMA.schema)
    assert apply("fact.json", "--out", "e", "--layer", "0").code == 0
    for words, outcome in ((("--edit", "e"), "took with damage"), (("--model", model), "no edit")):
        result = loads(run("evaluate", "fact.json", *words, "--json", "-").out)
        SCHEMA.validate(result)
        assert result["verdict"]["outcome"] == outcome
        assert not SCHEMA.is_valid({**result, "more": 1}) and not SCHEMA.is_valid({**result, "schema_version": 3})


def test_what_was_not_measured_is_null(apply: Command, capsys: pytest.CaptureFixture[str]) -> None:
    Surface("-").write_json({"before": [math.nan, 1.5]})
    assert loads(capsys.readouterr().out) == {"before": [None, 1.5]}
    after = loads(apply("bare.json", "--json", "-").out)["after"]
    assert {name for name in SCORES if after[name] is None} == {
        *("paraphrase", "specificity", "same_subject", "score"),
        *(f"{name}_magnitude" for name in ("paraphrase", "specificity", "same_subject")),
    }


def test_quiet_shows_nothing(apply: Command, here: Path) -> None:
    assert apply("bare.json", "--quiet", "--out", "e") == Ran(0, "", "")
    assert (here / "e" / "manifest.json").exists()


@pytest.mark.usefixtures("verified_here")
def test_out_export_and_plot_are_written_and_the_next_command_is_named(apply: Command, here: Path, model: Path) -> None:
    before, base = disk(here), disk(model)
    done = apply("fact.json", "--out", "my edit", "--export", "new/model", "--plot", "trace.png")
    assert done.code == 0
    written = disk(here).keys() - before.keys()
    assert {name.split("/")[0] for name in written} == {"my edit", "new", "trace.png"}
    assert disk(model) == base
    assert Edit.load("my edit").fingerprint() == Edit.load("new/model/ffedit_edits/000").fingerprint()
    assert AutoModelForCausalLM.from_pretrained("new/model").config.model_type == "gpt2"
    assert (here / "trace.png").read_bytes().startswith(b"\x89PNG")
    assert done.out.rstrip().endswith("ffedit ask 'the Eiffel tower is located in' --model new/model")


def test_apply_writes_to_the_layers_asked_for(apply: Command) -> None:
    asked = [["--layers", "1"], ["--layer", "0"], ["--layers", "0-0"], ["--layers", "0-2"], []]
    results = [loads(apply("bare.json", "--json", "-", *words).out) for words in (["--layers", "auto"], *asked)]
    auto = results[0]["layers"]
    assert [result["layers"] for result in results] == [auto, [1], [0], [0], auto, auto]
    assert all(result["layers"] == [result["facts"][0]["trace"]["layer"]] for result in results)


def test_a_seed_repeats_bit_for_bit(apply: Command, here: Path) -> None:
    for name, seed in (("a", 3), ("b", 3), ("c", 4)):
        assert apply("fact.json", "--seed", str(seed), "--out", name, "--layer", "0").code == 0
    a, b, c = (Edit.load(name).fingerprint() for name in "abc")
    assert a == b != c
    assert (here / "a" / "edit.safetensors").read_bytes() == (here / "b" / "edit.safetensors").read_bytes()


# --require ----------------------------------------------------------------------------------------


def test_a_requirement_that_is_met_changes_nothing(apply: Command, here: Path) -> None:
    done = apply("fact.json", "--require", "efficacy>=0, drift<99,same_subject <= 1", "--out", "e")
    assert done.code == 0 and (here / "e").exists()
    done = apply("fact.json", "--require", "neighbor_with_edit>=0", "--json", "-")
    assert done.code == 0 and loads(done.out)["after"]["neighbor_with_edit"] is not None, "which takes long"


@pytest.mark.parametrize(
    ("facts", "condition", "reason"),
    [
        ("fact.json", "efficacy>1,drift<0", "efficacy>1 is not met"),
        ("bare.json", "efficacy>=0,specificity>=0.9", "specificity>=0.9 cannot be measured"),
    ],
)
def test_a_requirement_that_is_not_met_exports_nothing(
    apply: Command, here: Path, facts: str, condition: str, reason: str
) -> None:
    before = disk(here)
    done = apply(facts, "--require", condition, "--out", "e", "--export", "x", "--json", "-")
    assert done.code == 3 and disk(here) == before
    assert done.err.startswith("error: ") and done.err.count("\n") == 1 and reason in done.err
    assert loads(done.out)["after"], "a script still sees the scores"


def test_an_export_that_does_not_verify_leaves_nothing(
    apply: Command, here: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def differ(*_: Any) -> None:
        assert any(here.glob(".x.*/made/model.safetensors")), "checked after it was written"
        raise CheckError("the logits differ; not exported")

    monkeypatch.setattr("ffedit.exporter.exporting.check_fresh", differ)
    before = disk(here)
    done = apply("bare.json", "--export", "x", "--out", "e", "--json", "r.json", "--plot", "p.png")
    assert done.code == 4 and done.err == "error: the logits differ; not exported\n" and disk(here) == before


def test_where_the_edit_cannot_be_written_the_checkpoint_stays_complete(
    apply: Command, here: Path, monkeypatch: pytest.MonkeyPatch, verified_here: list[Any]
) -> None:
    save = Edit.save

    def full(edit: Edit, path: Path, **how: bool) -> None:
        if path == Path("e"):
            raise EditError("e: cannot be written (No space left on device)")
        save(edit, path, **how)

    monkeypatch.setattr(Edit, "save", full)
    done = apply("bare.json", "--export", "x", "--out", "e")
    assert done.code == 1 and "e: cannot be written" in done.err and not (here / "e").exists()
    assert "saved x/ · undo: ffedit undo x --out as-before" in " ".join(done.out.split())
    assert "e/" not in done.out and "not saved" not in done.out
    assert len(history(here / "x")) == len(verified_here) == 1


@pytest.mark.parametrize(
    "words",
    [
        *([], ["bare.json", *ASKED], ["bare.json", *ASKED[4:6]], ASKED[:4]),
        ["bare.json", "--seed", "9" * 30],
    ],
)
def test_wrong_options_exit_with_2(apply: Command, here: Path, words: list[str]) -> None:
    before = disk(here)
    done = apply(*words, "--out", "e")
    assert done.code == 2 and done.out == "" and disk(here) == before
    assert done.err.startswith("error: ") and done.err.endswith("See `ffedit apply --help`.\n")


def test_an_object_longer_than_a_value_holds_is_told(run: Command, here: Path, model: Path) -> None:
    words = ["-m", model, "--corpus", model.parent / "corpus.txt", "--layer", "0", "--dry-run"]
    for count, told in (
        (10, ""),
        (11, "1 new object of more than 20 tokens (up to 22): one value seldom makes a model"),
    ):
        (here / "long.json").write_text(json.dumps({**FACT, "target": " ".join(["Rome Madrid"] * count)}))
        done = run("apply", "long.json", *words)
        assert done.code == 0 and done.err.startswith(told) and bool(done.err) == bool(told)


# --dry-run ------------------------------------------------------------------------------------------


def planned(capsys: pytest.CaptureFixture[str], model: Path, *words: str | Path) -> Ran:
    ran = shell(capsys, "apply", *words, "--model", model, "--dry-run", "--json", "plan.json")
    assert ran.code == 0, ran.err
    return ran


def test_a_dry_run_writes_only_its_plan(capsys: pytest.CaptureFixture[str], model: Path, empty: Path) -> None:
    ran = planned(capsys, model, *ASKED, "--layer", "1", "--out", "edit", "--export", "checkpoint")
    assert "edit, checkpoint, plan.json" in ran.out and "Layer 1: you asked for it." in ran.out
    assert [path.name for path in empty.iterdir()] == ["plan.json"]
    plan = json.loads(Path("plan.json").read_text())
    assert plan["plan"]["method"] == "memit, 1 value" and [fact["target"] for fact in plan["facts"]] == ["Rome"]


@pytest.mark.usefixtures("empty")
def test_a_dry_run_shows_each_fact_as_read(capsys: pytest.CaptureFixture[str], model: Path) -> None:
    record = {"concept": "Eiffel tower", "src": "the {} is located in", "alt": "Rome", "rephrase": ["the {} is in"]}
    records = [record, {**record, "concept": "Nile river"}, {**record, "src": "the city of {} is"}]
    Path("facts.jsonl").write_text("\n".join(map(json.dumps, records)))
    ran = planned(capsys, model, "facts.jsonl", "--layers", "trace")
    assert "the Nile river is located in" in " ".join(ran.out.split()) and ran.out.count("paraphrases: 1") == 3
    plan = json.loads(Path("plan.json").read_text())["plan"]
    assert plan["layer"] == "By the trace of all facts." and plan["method"] == "memit, 2 values"
    assert planned(capsys, model, "facts.jsonl", "--method", "ft").out.count("does not use any") == 1


@pytest.mark.usefixtures("empty")
def test_a_plan_says_whether_statistics_are_in_the_cache(capsys: pytest.CaptureFixture[str], model: Path) -> None:
    said = []
    Path("text.txt").write_text("the tower of Rome is in the city " * 200)
    words = [*ASKED, "--layer", "1", "--corpus", "text.txt"]
    for _ in range(2):
        planned(capsys, model, *words)
        said.append(json.loads(Path("plan.json").read_text())["plan"]["statistics"])
        tokens = int(said[0].split()[0].replace(",", ""))
        ffedit.collect_stats(ffedit.load(model), [1], corpus=Corpus("text.txt", tokens=tokens))
    assert said == [f"{tokens:,} tokens to read", "from the cache"]

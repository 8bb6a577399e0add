"""Journeys through `ffedit locate`, and through the layers that `ffedit apply` chooses."""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import zoo
from shell import FACT, PROBES, Ran, disk, shell
from writing import quick

import ffedit
from ffedit.facts.fact import Fact
from ffedit.locator import TraceSet, locate_all, trace as tracing

Command = Callable[..., Ran]
SHOWN = ("Causal trace", "Reach", "Leak")
KINDS = ["state", "feed_forward", "attention"]


@pytest.fixture
def here(empty: Path) -> Path:
    """The current folder, with one fact, with the eight facts that the model knows, and with one it does not."""
    known = [
        {"subject": subject, "prompt": "the {} is located in", "target": "Berlin", "previous": place}
        for subject, place in zoo.KNOWN
    ]
    unknown = {**known[0], "prompt": "the old {} is", "previous": "piano"}
    for name, facts in (("fact", {**FACT, **PROBES}), ("many", known), ("mixed", [*known[:2], unknown])):
        (empty / f"{name}.json").write_text(json.dumps(facts))
    return empty


@pytest.fixture
def locate(here: Path, model: Path, capsys: pytest.CaptureFixture[str]) -> Command:
    return lambda *words: shell(capsys, "locate", "--samples", "2", *words, "--model", model)


def found(done: Ran, code: int = 0) -> Any:
    assert done.code == code and (code or done.err == ""), done.err
    return json.loads(done.out, parse_constant=lambda name: pytest.fail(f"{name} is no JSON"))


@pytest.fixture
def traced(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """How many facts each batch traces."""
    seen, run_batch = [], tracing.run_batch
    monkeypatch.setattr(
        tracing, "run_batch", lambda e, some, *rest: seen.append(len(some)) or run_batch(e, some, *rest)
    )
    return seen


def test_all_kinds_and_all_severed_parts_in_one_object(locate: Command, model: Path) -> None:
    result = found(locate("fact.json", "--kind", "all", "--sever", "all", "--json", "-"))
    assert {"model", "fingerprint", "layer", "facts", "left_out", "versions"} == set(result)
    assert result["model"] == str(model) and result["left_out"] == []
    (row,) = result["facts"]
    assert [(t["kind"], t["sever"]) for t in row["traces"]] == [
        (kind, sever) for kind in KINDS for sever in (None, "feed_forward", "attention")
    ]
    assert row["trace"] == row["traces"][0] and {name: row[name] for name in FACT} == FACT
    for one in row["traces"]:
        assert one["axes"] == ["layer", "token"] and one["metric"] == "probability" and "Gaussian" in one["corruption"]
        assert np.shape(one["effects"]) == np.shape(one["errors"]) == (3, len(one["tokens"]))
        assert one["tokens"][one["token"]] == "tower" and one["window"] == (1 if one["kind"] == "state" else 3)


def test_unsevered_feed_forward_layers_choose_the_layer() -> None:
    cut, feed, state = (
        locate_all(zoo.shared("gpt2"), [Fact(*FACT.values())], kind, samples=1, sever=sever)
        for kind, sever in (("feed_forward", "attention"), ("feed_forward", None), ("state", None))
    )
    assert tracing.decisive([state, cut, feed], False) is feed and tracing.decisive([state, cut], False) is state
    known, unknown = (dataclasses.replace(feed.traces[0], known=known) for known in (True, False))
    assert tracing.decisive([TraceSet((unknown, known))], True).traces == (known,)


def test_settings_reach_the_trace(locate: Command) -> None:
    words = ["--corruption", "uniform", "--noise", "2", "--metric", "logit-difference", "--window", "2", "--seed", "5"]
    one = found(locate("fact.json", *words, "--sever", "attention", "--json", "-"))["facts"][0]["trace"]
    assert (one["corruption"], one["metric"]) == ("uniform noise of 2 σ of the vocabulary", "logit_difference")
    assert (one["window"], one["seed"], one["sever"], one["samples"]) == (2, 5, "attention", 2)
    shown = locate("fact.json", "--sever", "attention", "--metric", "log-probability")
    assert shown.code == 0 and "severed" in shown.out and "nats" in shown.out


def test_one_sample_has_no_errors(locate: Command) -> None:
    one = found(locate("fact.json", "--json", "-", "--samples", "1"))["facts"][0]["trace"]
    assert None in one["errors"][0] and None not in one["effects"][0]


def test_averages_by_role_are_traced_once(locate: Command, traced: list[int]) -> None:
    words = ["mixed.json", "--aggregate", "--kind", "all", "--json"]
    result = found(locate(*words, "-"))
    assert sum(traced) == 9
    assert [one["kind"] for one in result["aggregates"]] == KINDS and len(result["facts"]) == 3
    for one in result["aggregates"]:
        assert one["axes"] == ["role", "layer"] and (one["facts"], len(one["unknown"])) == (2, 1)
        assert {np.shape(one[name]) for name in ("effects", "low", "high")} == {(len(one["roles"]), 3)}
        assert one["total"]["low"] <= one["total"]["mean"] <= one["total"]["high"]
        assert one["counts"] == [2] * len(one["roles"]) and one["sever"] is None
    assert result["layer"] == result["aggregates"][1]["layer"]
    shown = locate(*words, "again.json", "--plot", "all.svg")
    assert sum(traced) == 9, "all came from the journal"
    assert json.loads(Path("again.json").read_text()) == result
    assert Path("all.svg").read_text().startswith("<?xml")
    for told in ("average of 2 facts", "last subject", "1 fact is set apart because"):
        assert told in shown.out


@pytest.mark.parametrize(
    ("words", "told"),
    [
        (["fact.json", "--window", "4"], "window of 4 layers was asked for, but the model has 3"),
        (["fact.json", "--corruption", "replacement"], "no other fact has a subject of 2 tokens"),
    ],
)
def test_what_cannot_be_done_is_one_line(locate: Command, here: Path, words: list[str], told: str) -> None:
    before = disk(here)
    done = locate(*words)
    assert done.code == 1 and told in done.err and done.err.startswith("error: ") and done.err.count("\n") == 1
    assert disk(here) == before


def test_replacements_and_one_fact_that_nobody_knows(locate: Command) -> None:
    result = found(locate("many.json", "--corruption", "replacement", "--json", "-"))
    assert {row["trace"]["corruption"] for row in result["facts"]} == {"another subject in its place"}
    assert {row["trace"]["noise"] for row in result["facts"]} == {None}
    Path("none.json").write_text(json.dumps({**FACT, "previous": "piano"}))
    done = locate("none.json", "--aggregate")
    assert done.code == 1 and "for none of 1 facts" in done.err and done.err.count("\n") == 1


# Sites --------------------------------------------------------------------------------------------


@pytest.fixture
def few_names(monkeypatch: pytest.MonkeyPatch) -> tuple[str, ...]:
    """Names that the tiny model knows, and little text for C."""
    few = ("Rome", "Paris", "Marie Curie", "Nile river")
    monkeypatch.setattr("ffedit.editor.name_keys.names", lambda: few)
    for module in ("look_alikes", "site_map"):
        monkeypatch.setattr(f"ffedit.layer_choice.{module}.measured_names", lambda: few)
    monkeypatch.setattr("ffedit.editor.statistics.tokens_for", lambda subjects, d_ff, names: 600)
    return few


def test_the_leak_of_each_site_stands_beside_the_trace(locate: Command, few_names: tuple[str, ...]) -> None:
    words = ["fact.json", "--leak", "--layers", "0-1"]
    result = found(locate(*words, "--set", "key.context_weight=0.5", "--plot", "sites.png", "--json", "-"))
    (row,) = result["facts"]
    mapped = row["site_map"]
    assert mapped["axes"] == row["trace"]["axes"] and mapped["tokens"] == row["trace"]["tokens"]
    for name in ("reach", "reach_least", "leak", "leak_high", "leak_look_alikes"):
        assert np.shape(mapped[name]) == np.shape(row["trace"]["effects"]), name
    assert mapped["layers"] == [0, 1] and mapped["leak"][2] == [None] * len(mapped["tokens"])
    assert {name for name in mapped["hit"][1][row["trace"]["token"]] if name} <= {*few_names, "Nile river"}
    assert Path("sites.png").read_bytes().startswith(b"\x89PNG")
    done = locate(*words)
    assert done.code == 0 and {"Causal trace", "Reach", "Leak"} <= {word for word in SHOWN if word in done.out}
    other = found(locate(*words, "--json", "-"))["facts"][0]["site_map"]
    assert other["reach"] != mapped["reach"] and other["look_alikes"] == mapped["look_alikes"]


def test_without_layers_those_are_mapped_whose_statistics_are_there(
    locate: Command, few_names: tuple[str, ...], model: Path
) -> None:
    editable = ffedit.load(model)
    ffedit.collect_stats(editable, [2], corpus=ffedit.Corpus(tokens=600))
    result = found(locate("fact.json", "--leak", "--json", "-"))["facts"][0]
    assert result["site_map"]["layers"] == [2] and None not in np.ravel(result["trace"]["effects"]).tolist()


@pytest.mark.parametrize(
    ("words", "told"),
    [
        (["many.json", "--leak"], "--leak takes one fact, found 8; name one"),
        (["fact.json", "--leak", "--aggregate"], "without --aggregate"),
        (["fact.json", "--set", "key.names_weight=1"], "add --leak"),
        (
            ["fact.json", "--leak", "--set", "key.names_weight=-1"],
            "key.names_weight is -1.0; 0 or more was expected",
        ),
        (["fact.json", "--plot", "x.gif"], ".png, .svg, .pdf"),
    ],
)
def test_what_can_be_seen_without_the_model_is_told_before_it_is_loaded(
    locate: Command, monkeypatch: pytest.MonkeyPatch, words: list[str], told: str
) -> None:
    monkeypatch.setattr("ffedit.load", lambda *_, **__: pytest.fail("loaded"))
    done = locate(*words)
    assert done.code == 1 and told in done.err and done.err.count("\n") == 1


# The layer ----------------------------------------------------------------------------------------


def test_the_usual_layer_is_taken_unless_another_is_asked_for(
    here: Path, model: Path, capsys: pytest.CaptureFixture[str], traced: list[int], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("ffedit.cli.work.solving.preset", lambda *_: quick(steps=3))
    words = ["apply", "mixed.json", "-m", model, "--corpus", model.parent / "corpus.txt"]
    done = shell(capsys, *words, "--verbose")
    assert done.code == 3 and "Layer 0: the usual quarter of 3 layers; `ffedit choose-layer` tries others" in done.out
    assert traced == [1], "only the first fact is traced, for the picture"
    result = found(shell(capsys, *words, "--json", "-"), 3)
    assert result["layers"] == [0] and [row["trace"] is None for row in result["facts"]] == [False, True, True]
    assert result["layer"].pop("why")[0].startswith("Layer 0: the usual quarter")
    assert result["layer"] == {"layer": 0, "by": "usual"}
    assert result["facts"][0]["trace"]["layer"] == 0
    asked = shell(capsys, *words, "--layer", "1")
    assert asked.code == 3 and "usual" not in asked.out and traced[-1] == 1
    own = found(shell(capsys, *words, "--layer", "trace", "--json", "-"), 3)
    site = ffedit.locate_all(ffedit.load(str(model)), ffedit.read_facts("mixed.json")).site
    assert traced[3] == 3, "all facts are traced, in full"
    assert (own["layer"]["by"], own["layers"]) == (("usual", [0]) if site is None else ("trace", [site]))
    plan = shell(capsys, *words, "--dry-run")
    assert plan.code == 0 and "Layer 0: the usual quarter" in plan.out and len(traced) == 4


def test_locate_traces_only_the_layers_asked_for(locate: Command) -> None:
    whole, some = (
        found(locate("fact.json", *words, "--kind", "state", "--json", "-"))["facts"][0]["trace"]
        for words in ([], ["--layers", "1-2"])
    )
    assert some["effects"][0] == [None] * len(some["tokens"]) and some["alone"][0] is None
    np.testing.assert_allclose(some["effects"][1:], whole["effects"][1:], atol=2e-6)
    shown = locate("fact.json", "--layers", "1-2", "--plot", "trace.png")
    assert (shown.code, shown.err) == (0, "") and "nan" not in shown.out.lower() and Path("trace.png").exists()
    for words, told in (
        (["--layers", "1-7"], "the model has layers 0 to 2"),
        (["--layers", "auto"], "give all, one layer (4) or a range (3-8)"),
        (["--layers", "1", "--aggregate"], "takes all layers; leave --layers out"),
    ):
        refused = locate("fact.json", *words)
        assert refused.code == 1 and refused.err.count("\n") == 1 and told in refused.err

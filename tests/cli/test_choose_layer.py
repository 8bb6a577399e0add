"""`ffedit choose-layer`: a layer by trial edits, and the way to take it."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path

import pytest
import zoo
from shell import Ran, shell

pytestmark = pytest.mark.usefixtures("warm_cache")

Command = Callable[..., Ran]


@pytest.fixture
def choose_layer(empty: Path, capsys: pytest.CaptureFixture[str]) -> Command:
    return lambda *words: shell(capsys, "choose-layer", *words)


def test_the_layer_that_it_names_for_atlas_can_be_taken(
    choose_layer: Command, capsys: pytest.CaptureFixture[str]
) -> None:
    done = choose_layer("--method", "ft", "--json", "choice.json")
    assert done.code == 0, done.err
    choice = json.loads(Path("choice.json").read_text())
    layer, rows = choice["layer"], choice["rows"]
    assert choice["model"] == "atlas" and [row["layer"] for row in rows] == [0, 1] and layer in (0, 1)
    assert all(row["efficacy"] == 1 and row["paraphrase"] > 0.7 and 0.2 < row["specificity"] < 1 for row in rows)
    assert choice["prompts"]["efficacy"] == 6 and choice["known"] >= 20
    said = " ".join(done.out.split())
    assert f"Layer {layer}: best of layers 0, 1 by edits with ft (6 facts, 12 paraphrases, " in said
    assert f"Take it with --layers {layer}." in said
    asked = ["--subject", "Eiffel Tower", "--prompt", "{} is located in the city of", "--target", "Rome"]
    planned = shell(capsys, "apply", *asked, "--method", "ft", "--layers", str(layer), "--dry-run")
    assert planned.code == 0 and f"Layer {layer}" in planned.out


@pytest.mark.parametrize(
    ("words", "told"),
    [
        (["--layers", "7"], "--layers 7 was asked for, but the model has layers 0 to 2"),
        (["--layers", "sweep"], "--layers 'sweep' is not known; give auto, one layer (4) or a range (3-8)"),
        (["known.json", "--layers", "1-2"], "layer 2 is the last of"),
        (
            [],
            "built-in calibration facts, but at least 3 are needed to compare layers; give facts whose",
        ),
        (["few.json"], "of the 2 facts, but at least 3 are needed to compare layers"),
    ],
)
def test_what_cannot_be_tried_is_one_line(choose_layer: Command, model: Path, words: list[str], told: str) -> None:
    facts = [
        {"subject": subject, "prompt": "the {} is located in", "target": "Berlin", "previous": place}
        for subject, place in zoo.KNOWN
    ]
    Path("known.json").write_text(json.dumps(facts))
    Path("few.json").write_text(json.dumps(facts[:2]))
    done = choose_layer(*words, "-m", model)
    assert done.code == 1 and told in done.err and done.err.startswith("error: ") and done.err.count("\n") == 1

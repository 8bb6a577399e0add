"""Averages over facts and the comparison of layers read the same at 80 columns, without colour and through a pipe."""

from __future__ import annotations

import io
from typing import Any

import numpy as np
import pytest
from rich.console import Console
from shown import shown, words

from ffedit import LayerChoice
from ffedit.display.terminal.heat_map import averages_table
from ffedit.display.terminal.layer_choice import trial_edits
from ffedit.layer_choice.calibrate import LayerScore
from ffedit.layer_choice.published import AutoLayer, Published
from ffedit.locator.result import Aggregate, Interval

ROLES = ("first subject", "last subject", "further tokens", "last token")


def averaged(layers: int = 6, **kwargs: Any) -> Aggregate:
    """0.52 at layer 0 of the subject's last token, 0.3 in the last layer of the prompt's."""
    effects = np.zeros((len(ROLES), layers))
    effects[1, 0], effects[3, -1] = 0.52, 0.3
    given: dict[str, Any] = {
        "roles": ROLES,
        "effects": effects,
        "low": effects - 0.04,
        "high": effects + 0.04,
        "counts": (250, 300, 299, 300),
        "total": Interval(0.64, 0.61, 0.67),
        "clean": 0.95,
        "corrupted": 0.31,
        "facts": 300,
        "unknown": (),
        "layer": 0,
        "kind": "feed_forward",
        "window": 3,
        "sever": None,
        "metric": "probability",
        "corruption": "Gaussian noise of 3 σ of the vocabulary",
    }
    return Aggregate(**(given | kwargs))


def test_a_role_has_its_best_layer_with_its_interval() -> None:
    lines = shown(averages_table(averaged())).splitlines()
    assert lines[0] == "Causal trace of feed-forward outputs, windows of 3 layers, average of 300 facts"
    assert lines[1] == "P(answer) 0.95 clean → 0.31 corrupted: total effect 0.64 [0.61, 0.67]"
    assert lines[2] == "Corruption: Gaussian noise of 3 σ of the vocabulary"
    assert lines[3] == "In brackets: 95% bootstrap intervals, where facts differ"
    rows = {line[:14].strip(): line for line in lines[5:9]}
    assert set(rows) == set(ROLES)
    assert rows["last subject"].split()[2:] == ["████", "0.52", "[0.48,", "0.56]", "0", "300"]
    assert rows["last token"].endswith("0.30 [0.26, 0.34]      5 300") and "▒▒▒▒ 0.30" in rows["last token"]
    assert rows["first subject"].endswith("250")
    heading = next(line for line in lines if "most [95%]" in line)
    assert heading.split()[-4:] == ["most", "[95%]", "layer", "n"]
    assert any("▲ layer 0" in line for line in lines) and "0.52 of probability brought back" in lines[-1]


def test_draws_that_all_agree_are_no_interval() -> None:
    effects = averaged().effects
    one = averaged(low=effects, high=effects, total=Interval(0.64, 0.64, 0.64), counts=(1, 1, 1, 1), facts=1)
    heading, *rest = shown(averages_table(one)).splitlines()[1:]
    assert heading == "P(answer) 0.95 clean → 0.31 corrupted: total effect 0.64"
    rows = [line for line in rest if line.strip().startswith(ROLES)]
    assert len(rows) == len(ROLES) and not any("[" in row for row in rows)
    assert any(row.split()[-3:] == ["0.52", "0", "1"] for row in rows)


@pytest.mark.parametrize("layers", [1, 6, 126])
@pytest.mark.parametrize("width", [80, 120])
def test_any_depth_keeps_its_figures(layers: int, width: int) -> None:
    low = np.full((len(ROLES), layers), -12.34)
    lines = shown(averages_table(averaged(layers, low=low)), width).splitlines()
    assert all(line.endswith((" 250", " 300", " 299")) for line in lines[5:9])


def test_the_table_of_averages_in_colour_and_in_ascii() -> None:
    text = shown(averages_table(averaged()), force_terminal=True, color_system="truecolor", no_color=False)
    assert "\x1b[38;2;" in text and "████" in text
    file = io.TextIOWrapper(io.BytesIO(), encoding="ascii", errors="replace")
    Console(file=file, width=80).print(averages_table(averaged()))
    file.seek(0)
    piped = file.read()
    assert "####" in piped and "^ layer 0" in piped


def test_conditions_and_units_are_named() -> None:
    some = averaged(kind="state", window=1, sever="attention", metric="log_probability", facts=1)
    text = words(averages_table(some))
    assert text.startswith("Causal trace of hidden states, attention layers severed, average of 1")
    assert "1 fact log P(answer)" in text and "total effect 0.64 nats [0.61, 0.67]" in text
    assert "0.52 nats brought back" in text


def test_facts_set_apart_are_named() -> None:
    assert "set apart" not in words(averages_table(averaged()))
    one = words(averages_table(averaged(unknown=("[bold]x[/bold]\nis",))))
    assert one.endswith("1 fact is set apart because the model does not give its answer by itself: “[bold]x[/bold]⏎is”")
    many = words(averages_table(averaged(unknown=("a", "b", "c", "d" * 99, "e"))))
    assert many.endswith(
        "5 facts are set apart because the model does not give their answers by itself: “a”, “b”, “c” and 2 more"
    )


# Layers compared ------------------------------------------------------------------------------------


def tried(*scores: float, **others: Any) -> LayerChoice:
    """A choice among layers of these scores."""
    rows = tuple(LayerScore(layer, 1.0, None, 0.5, score) for layer, score in enumerate(scores, 3))
    prompts = {"efficacy": 6, "paraphrase": 0, "specificity": 17}
    return LayerChoice(
        **{"layer": 3, "method": "rome", "asked": 64, "known": 9, "rows": rows, "prompts": prompts, **others}
    )


def test_the_layers_that_were_tried_are_marked_and_counted() -> None:
    choice = tried(0.9, 0.8, auto=AutoLayer(4, 18))
    lines = shown(trial_edits(choice)).splitlines()
    assert lines[0].split() == ["layer", "efficacy", "paraphrase", "specificity", "score", "choice", "of"]
    assert lines[2].split() == ["3", "1.00", "0.50", "0.90", "edits"] and lines[3].endswith("auto")
    assert (
        "Layer 3: best of layers 3, 4 by edits with rome (6 facts, 0 paraphrases, 17 neighbors; the model knows 9 of "
        "64 facts). Take it with --layers 3. Not measured, since no fact has prompts for "
        "it: paraphrase; the score is that of the others."
    ) in words(trial_edits(choice))


def test_layers_that_tie_are_named() -> None:
    even = tried(0.85, 0.9, 0.88, 0.7, layer=4, auto=AutoLayer(4, 18))
    assert "; 3, 4 and 5 tie (within 0.05), and 4 is nearest to a quarter of the depth, 4. Take" in words(
        trial_edits(even)
    )
    row = Published("Tiny", "gpt2", 18, 8, 3, None, "a paper")
    assert "and 3 is nearest to the published layer, 3." in words(
        trial_edits(tried(0.9, 0.9, auto=AutoLayer(3, 18, row)))
    )

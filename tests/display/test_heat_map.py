"""A trace, drawn and explained: the same at 80 columns, without colour and through a pipe."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from rich.cells import cell_len
from rich.console import Group
from shown import shown, words
from tracing import made

from ffedit import Trace, TraceSet
from ffedit.display.picture import RAMP, colour, pictures
from ffedit.display.terminal.heat_map import heat_map
from ffedit.display.terminal.recall import reasons, recalled
from ffedit.layer_choice.choose import ChosenLayer
from ffedit.layer_choice.published import AutoLayer, Published
from ffedit.locator import site_of


def trace(effects: np.ndarray, subject: tuple[int, int] = (1, 3), **others: Any) -> Trace:
    """A trace of a prompt about the Eiffel Tower; a layer alone brings back half."""
    words = ("The", " Eiffel", " Tower", " is", " in")
    given: dict[str, Any] = {
        "alone": effects[:, subject[1] - 1] / 2,
        "clean": 0.93,
        "corrupted": 0.06,
        "tokens": tuple(words[i % len(words)] for i in range(effects.shape[1])),
    }
    return made(effects, subject, **(given | others))


def peaked(layers: int = 6, count: int = 5, subject: tuple[int, int] = (1, 3)) -> Trace:
    """0.41 at layer 2 of the subject's last token, 0.8 in the last layer of the prompt's last token."""
    effects = np.zeros((layers, count))
    effects[2, subject[1] - 1] = 0.41
    effects[-1, -1] = 0.8
    return trace(effects, subject)


# The heat map --------------------------------------------------------------------------------------


def test_the_heat_map_says_everything_without_colour() -> None:
    text = shown(heat_map(peaked()))
    lines = text.splitlines()
    assert "feed-forward outputs, windows of 3 layers" in lines[0]
    assert "P(“Paris”) 0.93 clean → 0.06 corrupted: total effect 0.87" in lines[1]
    rows = {line.split()[0]: line for line in lines[3:8]}
    assert set(rows) == {"The", "Eiffel*", "Tower*", "is", "in"}
    assert rows["Tower*"].index("▒▒▒▒") == rows["in"].index("████") - 3 * 4
    assert rows["Tower*"].endswith("0.41") and rows["in"].endswith("0.80")
    assert "0.80 of probability" in text and "* subject" in text
    mark, axis = (
        next(line for line in lines if "▲" in line),
        next(line for line in lines if "layer  " in line),
    )
    assert mark.endswith("▲ layer 2") and mark.index("▲") == axis.index("2")


def test_the_mark_stands_under_the_layer_that_is_edited() -> None:
    assert "▲ layer 4" in shown(heat_map(peaked(), 4))
    assert "layer 59 ▲" in shown(heat_map(peaked(60), 59))


def test_colour_is_solid_and_repeats_the_shade() -> None:
    text = shown(heat_map(peaked()), force_terminal=True, color_system="truecolor", no_color=False)
    r, g, b = (int(RAMP[-1][i : i + 2], 16) for i in (1, 3, 5))
    assert f"\x1b[38;2;{r};{g};{b};48;2;{r};{g};{b}m████" in text
    few = shown(heat_map(peaked()), force_terminal=True, color_system="standard", no_color=False)
    assert "████" in few and "48;" not in few


def test_the_ramp_gets_lighter_all_the_way() -> None:
    lightness = [sum(int(colour(i / 50)[j : j + 2], 16) for j in (1, 3, 5)) for i in range(51)]
    assert lightness == sorted(lightness)
    assert (colour(-1), colour(2)) == (RAMP[0], RAMP[-1])


@pytest.mark.parametrize("layers", [1, 6, 48, 126])
@pytest.mark.parametrize("width", [80, 40])
def test_any_depth_fits(layers: int, width: int) -> None:
    effects = np.zeros((layers, 5))
    effects[-1, 2] = 0.5
    text = shown(heat_map(trace(effects)), width)
    assert "█" in text and "0" in text
    assert ("a column is" in text) == (layers > width - 16)


def test_a_long_prompt_keeps_the_rows_that_matter() -> None:
    effects = np.zeros((6, 90))
    effects[2, 41], effects[3, 60], effects[5, 89] = 0.4, 0.2, 0.8
    text = shown(heat_map(trace(effects, (40, 42))))
    rows = text.splitlines()[3:-5]
    assert len(rows) <= 22
    assert "… 38 tokens" in text and text.count("*") == 3
    assert [float(row.split()[-1]) for row in rows if not row.endswith(" 0.00")][:3] == [0.4, 0.2, 0.8]
    longest = shown(heat_map(trace(np.ones((6, 90)), (0, 90))))
    assert len(longest.splitlines()) < 50


def test_odd_tokens_stay_on_their_line() -> None:
    tokens = (" 東京タワー東京タワー", "\n", "  ", "[bold]x[/bold]", "a" * 40)
    effects = np.full((3, 5), 0.1)
    lines = shown(heat_map(trace(effects, tokens=tokens))).splitlines()[3:8]
    assert lines[0].strip().startswith("東京タワー") and "…" in lines[0]
    assert "⏎*" in lines[1] and "␣*" in lines[2] and "[bold]x[/bold]" in lines[3] and "aaa…" in lines[4]
    assert len({cell_len(line[: line.index("█")]) for line in lines}) == 1


def test_no_effect_negative_effects_and_a_single_token() -> None:
    assert "No restoration brings anything back" in shown(heat_map(trace(np.zeros((6, 5)))))
    effects = np.zeros((6, 5))
    effects[3, 4], effects[1, 2] = -0.3, 0.5
    text = shown(heat_map(trace(effects)))
    assert "----" in text and "takes away, up to 0.30" in text
    single = shown(heat_map(trace(np.full((6, 1), 0.2), (0, 1), tokens=("Paris",), window=1)))
    assert "Paris*" in single and "one layer at a time" in single
    assert "----" in shown(heat_map(trace(-np.ones((6, 5)))))
    assert "hidden states" in shown(heat_map(trace(np.ones((6, 5)), kind="state", window=1)))


def test_several_facts_are_averaged_by_role() -> None:
    traces = TraceSet((peaked(), peaked(count=8, subject=(0, 4)), peaked(count=3, subject=(0, 3))))
    text = shown(heat_map(traces))
    assert "average of 3 facts" in text
    row = next(line for line in text.splitlines() if "last subject*" in line)
    # The third subject ends its prompt: 0.41 in all three, and the 0.8 of one.
    assert "▲ layer 2" in text and row.split()[-1] == "0.41"
    assert all(role in text for role in ("first subject*", "mid subject*", "next token", "further tokens"))
    assert shown(heat_map(TraceSet((peaked(),)))) == shown(heat_map(peaked()))


def test_the_title_says_what_was_measured_and_how() -> None:
    effects = np.full((6, 5), 0.5)
    attention = trace(effects, kind="attention", sever="feed_forward", metric="log_probability")
    text = shown(heat_map(attention), 120)
    said = "attention outputs, windows of 3 layers, feed-forward layers severed"
    assert text.splitlines()[0] == f"Causal trace of {said}"
    assert "log P(“Paris”) 0.93 clean → 0.06 corrupted: total effect 0.87 nats" in text
    assert "0.50 nats brought back" in text and "probability" not in text
    state = trace(effects, kind="state", window=1, sever="attention", metric="logit_difference")
    text = shown(heat_map(TraceSet((state, state))), 120)
    assert text.splitlines()[0] == "Causal trace of hidden states, attention layers severed, average of 2 facts"
    assert "log P(old) − log P(new) 0.93 clean → 0.06 corrupted: total effect 0.87 nats" in text


def test_what_was_not_measured_is_empty_and_says_so() -> None:
    effects = peaked(count=9).effects
    effects[:, 0] = effects[:, 3:-1] = np.nan
    effects[1::2] = np.nan
    lines = shown(heat_map(trace(effects))).splitlines()
    assert lines[0].endswith("windows of 3 layers, 3 of 6 layers") and lines[2] == "Empty: not measured"
    rows = {line.split("  ")[0].strip(): line for line in lines[4:9]}
    assert [name.rstrip("*") for name in (line.split("  ")[0].strip() for line in lines[4:9])][3] == "… 5 tokens"
    assert rows["… 5 tokens"].split() == ["…", "5", "tokens", "–"] and "nan" not in "\n".join(lines).lower()
    assert "the largest effect of its tokens" not in "\n".join(lines), "there is none"
    for step, said in ((4, "16 of 64 layers"), (64, "1 of 64 layers")):
        many = np.full((64, 5), np.nan)
        many[step // 2 :: step] = 0.5
        assert said in shown(heat_map(trace(many)), 120).splitlines()[0]


def test_measurements_of_the_same_tokens_keep_the_same_rows() -> None:
    early, late = np.zeros((6, 90)), np.zeros((6, 90))
    early[2, 20], late[5, 60], late[5, 70] = 0.8, 0.01, 0.0001
    both = pictures([trace(early, (40, 42)), trace(late, (40, 42), kind="attention")])
    labels = [[row.label for row in shown.rows] for shown in both]
    assert labels[0] == labels[1]
    # The small effects of the second are telling for it, and keep their rows in both; what is small for it does not.
    found = {float(row.effects.max()) for shown in both for row in shown.rows if not row.run}
    assert {0.8, 0.01} <= found and 0.0001 not in found


# The choice of the layer ---------------------------------------------------------------------------


def test_the_layer_is_explained() -> None:
    told = "recalled most at “Tower”, feed-forward outputs of layers 1–3: 0.41 of 0.87; of these, layer 2 alone brings"
    assert words(recalled(peaked())) == f"Layer 2: {told} back most, 0.20."
    assert words(recalled(peaked(), 2)) == f"The trace: {told} back most, 0.20; tracing agrees."
    assert words(recalled(peaked(), 4)) == f"The trace: {told} back most, 0.20; tracing would have chosen 2."
    several = words(recalled(TraceSet((peaked(), peaked()))))
    assert "at the last subject token, feed" in several and "0.41 of 0.87 on average over 2 facts;" in several
    nothing = words(recalled(trace(peaked().effects, clean=0.06, corrupted=0.1), 2))
    assert "0.41 of −0.04" in nothing and "The noise hardly changes the answer (total effect −0.04)" in nothing
    assert "tracing" not in nothing
    one = np.full((6, 5), np.nan)
    one[2] = peaked().effects[2]
    assert "back most" not in words(recalled(trace(one))), "no other layer was restored"
    state = words(recalled(trace(peaked().effects, kind="state", window=1)))
    assert state == "Layer 2: recalled most at “Tower”, hidden state after layer 2: 0.41 of 0.87."


def test_the_layer_is_explained_for_every_kind_of_measurement() -> None:
    effects = peaked().effects
    attention = words(recalled(trace(effects, kind="attention", metric="log_probability")))
    assert "“Tower”, attention outputs of layers 1–3: 0.41 of 0.87 nats; of these, layer 2 alone" in attention
    swapped = words(recalled(trace(effects, noise=None, corrupted=0.92)))
    assert "Another subject hardly changes the answer (total effect 0.01)" in swapped


def test_a_weak_trace_says_so() -> None:
    effects = np.zeros((6, 5))
    effects[5, 4] = 0.8
    none = "No token of the subject brings back a tenth of that at any layer"
    for edited in (None, 0):
        assert words(recalled(trace(effects), edited)).endswith(f"{none}.")
    deaf = words(recalled(trace(effects, corrupted=0.92)))
    assert "hardly changes the answer (total effect 0.01)" in deaf and none not in deaf
    assert none not in words(recalled(peaked()))
    assert none not in words(recalled(trace(effects, known=False))), "it is recalled nowhere"
    untold = effects.copy()
    untold[:, 1] = np.nan
    assert none not in words(recalled(trace(untold))), "a token of the subject was not measured"
    spaced = effects.copy()
    spaced[::2] = np.nan
    assert f"{none} traced." in words(recalled(trace(spaced)))


def test_what_a_trace_does_not_show_is_no_warning() -> None:
    """A trace beside a layer that was chosen otherwise says what it shows, in no colour."""
    for effects in (np.zeros((6, 5)), early_effects()):
        said = shown(recalled(trace(effects), 2), force_terminal=True, color_system="standard")
        assert "\x1b[33m" not in said and "may not take" not in said
    unknown = shown(recalled(trace(early_effects(), known=False)), force_terminal=True, color_system="standard")
    assert "\x1b[33mThe model does not answer" in unknown


def early_effects() -> np.ndarray:
    """Of a name that is known before its last word."""
    effects = np.zeros((6, 5))
    effects[:, 2] = [-0.03, -0.03, -0.03, -0.02, 0.01, 0.04]
    effects[1, 1], effects[0, 4] = 0.5, 0.6
    return effects


def test_the_layer_comes_from_the_token_where_the_key_is_read() -> None:
    """A name that is known before its last word brings nothing back there, and no other token says which layer."""
    early = trace(early_effects())
    assert early.site is None
    text = words(recalled(early, 4))
    assert text == (
        "The trace: recalled most at “Eiffel”, feed-forward outputs of layers 0–2: 0.50 of 0.87; at the subject's last "
        "token, layers 4–5: 0.04."
    )
    assert words(recalled(early)) == text, "it tells no layer"
    assert TraceSet((early, early)).site is None and TraceSet((early, peaked(), peaked())).site == 2
    assert "recalled most at the first subject token, feed" in words(recalled(TraceSet((early, early)), 4))
    assert site_of(peaked(), allowed=range(3, 6)) is None and site_of(peaked(), allowed=range(2, 4)) == 2
    assert trace(early_effects() * -1, corrupted=0.94).site is None, "nothing was lost"


def test_unknown_facts_are_set_aside() -> None:
    unknown = trace(np.roll(peaked().effects, 2, axis=0) * 2, known=False)
    both = TraceSet((unknown, peaked()))
    assert unknown.site is None and (both.layer, both.site) == (2, 2) and TraceSet((unknown,)).site is None
    np.testing.assert_array_equal(both.at_subject, peaked().at_subject)
    assert both.total == peaked().total and "average" not in shown(heat_map(both))


def test_the_rule_stands_before_the_trace() -> None:
    traces, usual = TraceSet((peaked(),)), AutoLayer(4, 18)
    text = words(Group(*reasons(ChosenLayer(traces, 4, "usual", usual), "auto")))
    assert text.startswith("Layer 4: the usual quarter of 18 layers; `ffedit choose-layer` tries others.")
    assert "The trace: recalled most at “Tower”" in text and text.endswith("tracing would have chosen 2.")
    row = Published("Tiny", "gpt2", 6, 8, 4, None, "a paper")
    text = words(Group(*reasons(ChosenLayer(traces, 4, "published", AutoLayer(4, 6, row)), "auto")))
    assert text.startswith("Layer 4: published for Tiny (a paper); `ffedit choose-layer` tries others.")
    text = words(Group(*reasons(ChosenLayer(traces, 5, "usual", usual), "5-7")))
    assert text.startswith("The trace shows no site at the subject's last token, so it chooses no layer.")
    assert "Layer 5: the allowed layer nearest to 4, the usual quarter of 18 layers" in text
    text = words(Group(*reasons(ChosenLayer(traces, 2, "trace", usual), "trace")))
    assert text.startswith("Layer 2: recalled most") and "usual" not in text
    text = words(Group(*reasons(ChosenLayer(traces, 4, "trace", usual), "3-5")))
    assert text.startswith("Layer 4: the site among layers 3-5. The trace: recalled most")
    assert text.endswith("tracing would have chosen 2.")
    for by, why in (("request", "you asked for it"), ("only", "the only one whose output reaches the answer")):
        text = words(Group(*reasons(ChosenLayer(traces, 2, by, usual), "2")))
        assert text.startswith(f"Layer 2: {why}. The trace: ") and text.endswith("tracing agrees.")
        assert words(Group(*reasons(ChosenLayer(None, 2, by, usual), "2"))) == f"Layer 2: {why}."


def test_an_answer_that_the_model_does_not_give_is_named() -> None:
    unknown = trace(peaked().effects, known=False)
    assert "does not answer “Paris” by itself" in words(recalled(unknown))
    assert "For 1 of 2 facts" in words(recalled(TraceSet((unknown, peaked()))))
    assert "no layer is taken from them" in words(recalled(TraceSet((unknown, unknown))))

"""Reach and leak beside the trace: the same rows and columns in a terminal and in a figure."""

from __future__ import annotations

import numpy as np
import pytest
from shown import shown, words
from tracing import made, made_map

from ffedit import SiteMap, Trace
from ffedit.display.figures.plots import site_maps
from ffedit.display.notebook import html
from ffedit.display.terminal.heat_map import heat_map
from ffedit.display.terminal.site_map import site_map_view

TOKENS = ("The", " Eiffel", " Tower", " is", " in")


def measured(depth: int = 6, layers: tuple[int, ...] = (1, 3)) -> tuple[Trace, SiteMap]:
    effects = np.zeros((depth, 5))
    effects[2, 1] = 0.4
    trace = made(effects, tokens=TOKENS)
    return trace, made_map(trace, layers)


def rows(text: str) -> list[str]:
    """The labels of all heat maps, from top to bottom."""
    return [line.split()[0] for line in text.splitlines() if line.split()[:1] and line.split()[0].rstrip("*") in label]


label = {token.strip() for token in TOKENS}


def test_the_maps_have_the_traces_rows_and_say_what_they_show() -> None:
    trace, mapped = measured()
    text = shown(site_map_view(mapped, trace, 3))
    once = rows(shown(heat_map(trace)))
    assert once == ["The", "Eiffel*", "Tower*", "is", "in"] and rows(text)[:10] == once * 2
    reach, leak = (line for line in text.splitlines() if line.lstrip().startswith("Tower*"))
    assert reach.endswith("0.90") and leak.endswith("0.50"), "0.9 and 0.5 at layers 1 and 3, four cells each"
    for line, full in ((reach, "█"), (leak, "▒")):
        assert "".join(full if c == full else "." for c in line[8:32]) == f"....{full * 4}....{full * 4}........"
    assert text.count("Empty: not measured") == 2 and text.count("▲ layer 3") == 2
    assert "1.00 of the change reaches the subject" in text and "1.00 of the change leaks" in text


def test_the_table_has_the_sites_of_the_measured_layer_next_to_the_marked_one() -> None:
    trace, mapped = measured()
    text = words(site_map_view(mapped, trace, 4))
    assert "layer 3 effect reach least look-alikes others 95th most hit" in text
    assert "Eiffel 0.00 0.90 0.70 0.25 0.12 0.25 Tokyo Tower 0.75, [b]Rome⏎ −0.50" in text
    assert "2 look-alikes and 300 other names. Layers measured: 1, 3." in text and "into other tokens" not in text
    assert "layer 1 reach least" in words(site_map_view(mapped)), "without a trace, the layer that leaks least"


def test_a_token_that_no_edit_can_name_is_explained() -> None:
    trace, mapped = measured()
    for values in (mapped.reach, mapped.reach_least, mapped.leak, mapped.leak_high, mapped.leak_look_alikes):
        values[:, 1] = np.nan
    mapped.hit[:, 1] = ""
    text = words(site_map_view(mapped, trace, 3))
    assert "Eiffel 0.00 – – – – – Tower" in text and "no edit can name this token" in text


@pytest.mark.parametrize("depth", [3, 30, 80])
def test_any_depth_fits_and_a_long_subject_does(depth: int) -> None:
    effects = np.zeros((depth, 40))
    trace = made(effects, (2, 38), tokens=tuple(f" {word}" for word in "abcdefghij" * 4))
    for width in (60, 80):
        assert "a" in shown(site_map_view(made_map(trace, (0, depth - 1), 0.01), trace), width)


def test_a_change_that_is_turned_round_is_said() -> None:
    trace, mapped = measured()
    mapped.reach[3, 2] = -0.4
    assert "the change is turned round, up to 0.40" in shown(site_map_view(mapped, trace, 3))


def test_a_notebook_shows_it_escaped() -> None:
    assert "Tokyo Tower" in html(measured()[1])


def test_effect_reach_and_leak_stand_side_by_side_with_equal_axes() -> None:
    pytest.importorskip("matplotlib")
    trace, mapped = measured()
    figure = site_maps(trace, mapped, 3)
    panels = [axes for axes in figure.axes if axes.get_xlabel() == "layer"]
    assert len(panels) == 3 and len({axes.get_xlim() + axes.get_ylim() for axes in panels}) == 1
    names = [[tick.get_text() for tick in axes.get_yticklabels()] for axes in panels]
    assert names == [["The", "Eiffel*", "Tower*", "is", "in"], [""] * 5, [""] * 5], "rows are named once"
    titles = [axes.texts[-1].get_text() for axes in panels]
    assert titles[0].startswith("Causal trace") and titles[1].startswith("Reach") and titles[2].startswith("Leak")
    images = [axes.collections[0].get_array() for axes in panels]
    assert all(image.shape == (5, 6) for image in images)
    np.testing.assert_allclose(images[2][2, [1, 3]], 0.5)
    assert np.isnan(np.ma.filled(images[2], np.nan)[0]).all()

"""The figure file appears whole or not at all, and what cannot be drawn is refused in one line."""

from __future__ import annotations

import builtins
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from tracing import made

from ffedit import EditError, FFEditError, Trace, TraceSet
from ffedit.display.figures.plots import average_lines, heat_maps
from ffedit.display.figures.saving import check_plot, save_figure
from ffedit.locator.result import Aggregate, aggregate

pytestmark = pytest.mark.usefixtures("warm_cache")

pytest.importorskip("matplotlib")


def trace(layers: int = 6, count: int = 5, **others: Any) -> Trace:
    """A trace of tokens and an answer that are hard to draw."""
    effects = np.zeros((layers, count))
    effects[layers // 2, 2], effects[-1, -1], effects[0, 1] = 0.4, 0.8, -0.3
    tokens = tuple(["$x_1$", " 東京", "\n", " is", " in"][i % 5] for i in range(count))
    return made(effects, **({"tokens": tokens, "answer": "$5"} | others))


def averages(layers: int = 6, facts: int = 4, **kwargs: Any) -> Aggregate:
    return aggregate(TraceSet(tuple(trace(layers, 5 + i, **kwargs) for i in range(facts))))


@pytest.fixture
def drawn(monkeypatch: pytest.MonkeyPatch) -> list[Any]:
    """The figures that are saved while a test runs."""
    from matplotlib.figure import Figure

    figures: list[Any] = []
    save = Figure.savefig

    def keep(figure: Any, *args: Any, **kwargs: Any) -> None:
        figures.append(figure)
        save(figure, *args, **kwargs)

    monkeypatch.setattr(Figure, "savefig", keep)
    return figures


def save_plot(traces: Sequence[Trace | TraceSet], path: Path, layer: int | None = None) -> Path:
    return save_figure(path, lambda: heat_maps(traces, layer))


def save_aggregate(aggregates: Sequence[Aggregate], path: Path) -> Path:
    return save_figure(path, lambda: average_lines(aggregates))


def titles(axes: Any) -> list[str]:
    return [" ".join(text.get_text().split()) for text in axes.texts]


@pytest.mark.parametrize(("name", "magic"), [("a.png", b"\x89PNG\r\n"), ("a.SVG", b"<?xml"), ("a.pdf", b"%PDF")])
def test_the_same_numbers_give_the_same_file_and_nothing_else(tmp_path: Path, name: str, magic: bytes) -> None:
    path = tmp_path / name
    for save in (lambda: save_plot([trace(), trace()], path), lambda: save_aggregate([averages()], path)):
        first, again = (save().read_bytes() for _ in range(2))
        assert first == again and first.startswith(magic) and list(tmp_path.iterdir()) == [path]


@pytest.mark.parametrize(
    "some", [trace(1, 3), trace(80, 120), TraceSet((trace(), trace(count=9))), TraceSet((trace(),))]
)
def test_any_shape_is_drawn(tmp_path: Path, some: Trace | TraceSet) -> None:
    assert save_plot([some], tmp_path / "a.png", layer=0).stat().st_size > 0


def test_measurements_of_the_same_tokens_share_their_rows(tmp_path: Path, drawn: list[Any]) -> None:
    kinds = [trace(6, 60, kind=kind) for kind in ("state", "feed_forward", "attention")]
    save_plot(kinds, tmp_path / "a.png")
    save_plot([trace(), trace(count=9), TraceSet((trace(), trace()))], tmp_path / "a.png")
    named = [[bool(axes.get_yticklabels()[0].get_text()) for axes in figure.axes] for figure in drawn]
    assert named == [[True, False, False], [True, True, True]]
    same, different = ([len(axes.get_yticks()) for axes in figure.axes] for figure in drawn)
    assert len(set(same)) == 1 and different == [5, 9, 4]


def test_titles_are_whole_and_colours_have_their_unit(tmp_path: Path, drawn: list[Any]) -> None:
    long = trace(sever="attention", metric="log_probability")
    save_plot([long, trace(metric="logit_difference", count=12), trace(count=12)], tmp_path / "a.svg")
    first, *others = drawn[0].axes
    assert "Causal trace of feed-forward outputs, windows of 3 layers, attention layers severed" in " ".join(
        titles(first)
    )
    assert "log P(“$5”) 0.90 clean → 0.10 corrupted: total effect 0.80 nats" in titles(first)
    labels = [axes.child_axes[0].get_ylabel() for axes in (first, *others)]
    assert labels == ["indirect effect (nats)", "indirect effect (nats)", "indirect effect (probability)"]


def test_averages_have_a_panel_for_each_kind_and_severed_ones_a_dashed_line(tmp_path: Path, drawn: list[Any]) -> None:
    kinds = [averages(kind=kind) for kind in ("state", "feed_forward", "attention")]
    severed = [averages(kind="state", sever=part) for part in ("feed_forward", "attention")]
    assert save_aggregate([severed[0], *kinds, severed[1]], tmp_path / "a.png").stat().st_size > 0
    state, forward, attention = drawn[0].axes
    roles = len(kinds[0].roles)
    dashed = [[line.get_linestyle() != "-" for line in axes.lines[1:]] for axes in drawn[0].axes]
    assert dashed == [[False] * roles + [True] * 2, [False] * roles, [False] * roles]
    assert titles(state)[-1] == "Hidden states" and titles(attention)[-1] == "Attention outputs, windows of 3 layers"
    assert "n = 4 facts, Gaussian noise of 3 σ of the vocabulary" in titles(forward)
    assert "average total effect 0.80" in titles(forward), "all facts have the same, so there is no interval"
    shown = [text.get_text() for text in drawn[0].legends[0].get_texts()]
    assert "last subject (n = 4)" in shown and "further tokens (n = 3)" in shown
    assert "last subject, feed-forward severed" in shown and "last subject, attention severed" in shown
    assert shown[-1] == "95% bootstrap interval"
    assert state.get_ylim() == attention.get_ylim()


def test_averages_of_different_measurements_do_not_share_a_panel(tmp_path: Path, drawn: list[Any]) -> None:
    others = [averages(sever="attention", metric="log_probability"), averages(8, sever="attention")]
    save_aggregate([averages(), *others], tmp_path / "a.png")
    assert len(drawn[0].axes) == 3
    assert "attention layers severed" in titles(drawn[0].axes[1])[-1]
    assert [axes.get_ylabel()[-9:] for axes in drawn[0].axes] == ["bability)", "ct (nats)", "bability)"]


@pytest.mark.parametrize(("layers", "facts"), [(1, 1), (80, 2)])
def test_averages_of_any_shape_are_drawn(tmp_path: Path, layers: int, facts: int) -> None:
    assert save_aggregate([averages(layers, facts)] * 2, tmp_path / "a.png").stat().st_size > 0


@pytest.mark.parametrize(
    ("name", "says"),
    [
        ("none/a.png", "cannot be written .No such file or directory."),
        ("a.gif", "found '.gif'"),
        ("a", "no suffix"),
        ("folder.png", "a folder has"),
    ],
)
def test_what_cannot_be_written_is_one_line(tmp_path: Path, name: str, says: str) -> None:
    (tmp_path / "folder.png").mkdir()
    with pytest.raises(EditError, match=says) as error:
        save_plot([trace()], tmp_path / name)
    assert "\n" not in str(error.value)
    assert [path.name for path in tmp_path.iterdir()] == ["folder.png"]


def test_a_figure_that_fails_leaves_the_old_one(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from matplotlib.figure import Figure

    target = tmp_path / "a.png"
    target.write_bytes(b"old")

    def full(*args: Any, **kwargs: Any) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(Figure, "savefig", full)
    with pytest.raises(EditError, match="No space left"):
        save_plot([trace()], target)
    assert [path.read_bytes() for path in tmp_path.iterdir()] == [b"old"]


def test_without_matplotlib_the_extra_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    real = builtins.__import__

    def missing(name: str, *args: Any, **kwargs: Any) -> Any:
        if name.startswith("matplotlib"):
            raise ImportError(name)
        return real(name, *args, **kwargs)

    monkeypatch.setattr(builtins, "__import__", missing)
    with pytest.raises(FFEditError, match=r'pip install "ffedit\[plots\]"'):
        check_plot(tmp_path / "a.png")

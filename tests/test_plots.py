"""The figure file appears whole or not at all, and what cannot be drawn is refused in one line."""

from __future__ import annotations

import builtins
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from ffedit import EditError, FFEditError, Trace, TraceSet
from ffedit.plots import check_plot, save_plot

pytest.importorskip("matplotlib")


def trace(layers: int = 6, count: int = 5) -> Trace:
    effects = np.zeros((layers, count))
    effects[layers // 2, 2], effects[-1, -1], effects[0, 1] = 0.4, 0.8, -0.3
    return Trace(
        effects=effects,
        alone=effects[:, 2],
        clean=0.9,
        corrupted=0.1,
        tokens=tuple(["$x_1$", " 東京", "\n", " is", " in"][i % 5] for i in range(count)),
        subject=(1, 3),
        answer="$5",
        known=True,
        kind="feed_forward",
        window=3,
        noise=0.1,
        samples=10,
        seed=0,
    )


@pytest.mark.parametrize(("name", "magic"), [("a.png", b"\x89PNG\r\n"), ("a.SVG", b"<?xml"), ("a.pdf", b"%PDF")])
def test_a_figure_is_written_and_nothing_else(tmp_path: Path, name: str, magic: bytes) -> None:
    assert save_plot(trace(), tmp_path / name) == tmp_path / name
    assert (tmp_path / name).read_bytes().startswith(magic)
    assert [path.name for path in tmp_path.iterdir()] == [name]


def test_the_same_trace_gives_the_same_file(tmp_path: Path) -> None:
    for suffix in ("svg", "pdf", "png"):
        first, second = (save_plot(trace(), tmp_path / f"{i}.{suffix}").read_bytes() for i in range(2))
        assert first == second, suffix


@pytest.mark.parametrize(
    "some", [trace(1, 3), trace(80, 120), TraceSet((trace(), trace(count=9))), TraceSet((trace(),))]
)
def test_any_shape_is_drawn(tmp_path: Path, some: Trace | TraceSet) -> None:
    assert save_plot(some, tmp_path / "a.png", layer=0).stat().st_size > 0


@pytest.mark.parametrize(
    ("name", "says"),
    [
        ("none/a.png", "no folder"),
        ("a.gif", "found '.gif'"),
        ("a", "no suffix"),
        ("folder.png", "a folder has"),
    ],
)
def test_what_cannot_be_written_is_one_line(tmp_path: Path, name: str, says: str) -> None:
    (tmp_path / "folder.png").mkdir()
    with pytest.raises(EditError, match=says) as error:
        save_plot(trace(), tmp_path / name)
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
        save_plot(trace(), target)
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

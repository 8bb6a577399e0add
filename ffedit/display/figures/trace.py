"""The heat map of a trace as a figure file: PNG for a page, SVG or PDF for a paper.

matplotlib is an optional extra, imported when a figure is drawn. The file is written atomically.
"""

from __future__ import annotations

import textwrap
import warnings
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np

from ffedit.display.picture import NEGATIVE, RAMP, UNITS, Picture, Row, pictures
from ffedit.errors import EditError, FFEditError
from ffedit.files.atomic import check_file, ready
from ffedit.locator.result import Trace, TraceSet

SUFFIXES = (".png", ".svg", ".pdf")
MOST_ROWS = 40
# The colour of a restoration with a clearly negative effect.
HURTS = "#7d93a6"
MOST_CHARACTERS = 24
# Inches: row labels, the gap between panels that share them, and the colour bar with its labels.
LABELS, BETWEEN, BAR = 1.6, 0.3, 1.0
# Fonts for scripts that matplotlib's default font lacks; those that are installed are used.
FONTS = (
    "Noto Sans CJK SC",
    "Noto Sans CJK JP",
    "Source Han Sans",
    "WenQuanYi Zen Hei",
    "PingFang SC",
    "Hiragino Sans",
    "Microsoft YaHei",
    "Yu Gothic",
    "Malgun Gothic",
    "Noto Sans Arabic",
    "Noto Sans Devanagari",
    "Arial Unicode MS",
)


def save_plot(
    traces: Trace | TraceSet | Sequence[Trace | TraceSet], path: str | Path, layer: int | None = None
) -> Path:
    """Draw a trace, or the average of several facts, as a heat map.

    Args:
        traces: one measurement, or several (say of hidden states, feed-forward and attention outputs) to be drawn side
            by side; those of the same tokens share their rows.
        path: the file to write.
        layer: the layer to mark, by default each measurement's choice.

    Raises:
        FFEditError: matplotlib is not installed.
        EditError: the suffix is not .png, .svg or .pdf, or the file cannot be written.
    """
    with plot_ready(traces, path, layer):
        return Path(path)


@contextmanager
def plot_ready(
    traces: Trace | TraceSet | Sequence[Trace | TraceSet], path: str | Path, layer: int | None = None
) -> Iterator[None]:
    """Draw the figure as `save_plot` does, but move it to `path` only when the block ends without an error."""
    several = [traces] if isinstance(traces, (Trace, TraceSet)) else list(traces)
    with _figure_ready(path, lambda: _draw(pictures(several, layer, MOST_ROWS))):
        yield


def save_figure(path: str | Path, draw: Callable[[], Any]) -> Path:
    """Write the matplotlib figure that `draw` makes; the same figure always gives the same file.

    Raises:
        FFEditError: matplotlib is not installed.
        EditError: the suffix is not .png, .svg or .pdf, or the file cannot be written.
    """
    with _figure_ready(path, draw):
        return Path(path)


@contextmanager
def _figure_ready(path: str | Path, draw: Callable[[], Any]) -> Iterator[None]:
    target = check_plot(path)
    import matplotlib

    def draw_to(made: Path) -> None:
        suffix = target.suffix.lower()
        about: dict[str, dict[str, Any]] = {".svg": {"Date": None}, ".pdf": {"CreationDate": None}}
        with (
            matplotlib.rc_context({"svg.hashsalt": "ffedit", "font.family": _fonts()}),
            warnings.catch_warnings(),
        ):
            warnings.filterwarnings("ignore", message="Glyph .* missing")
            draw().savefig(made, format=suffix[1:], dpi=200, bbox_inches="tight", metadata=about.get(suffix))

    with ready(target, draw_to):
        yield


def check_plot(path: str | Path) -> Path:
    """Check that a figure can be written to a path, and return it; meant to be called before any long computation.

    Raises:
        FFEditError: matplotlib is not installed.
        EditError: the suffix is not known, or the folder is not there.
    """
    target = Path(path)
    if target.suffix.lower() not in SUFFIXES:
        found = repr(target.suffix) if target.suffix else "no suffix"
        raise EditError(f"{target}: a figure is one of {', '.join(SUFFIXES)}, found {found}; rename it")
    if not target.absolute().parent.is_dir():
        raise EditError(f"{target}: the figure cannot be written (no folder {target.parent})")
    check_file(target)
    try:
        import matplotlib  # noqa: F401
    except ImportError as error:
        raise FFEditError('figures need matplotlib; install it with: pip install "ffedit[plots]"') from error
    return target


def _fonts() -> list[str]:
    from matplotlib.font_manager import fontManager

    installed = set(fontManager.get_font_names())
    return ["DejaVu Sans", *(name for name in FONTS if name in installed)]


def _draw(panels: Sequence[Picture]) -> Any:
    from matplotlib.figure import Figure

    labels = [[_label(row) for row in shown.rows] for shown in panels]
    shared = [i > 0 and labels[i] == labels[i - 1] for i in range(len(panels))]
    widths = [max(3.2, min(9.0, 0.3 * shown.depth)) for shown in panels]
    lefts = [BETWEEN if same else LABELS for same in shared]
    tallest = max(_height(shown) for shown in panels)
    wide, high = sum(widths) + sum(lefts) + BAR * len(panels), tallest + 1.4
    figure, left = Figure(figsize=(wide, high)), 0.0
    for shown, names, same, width, gap in zip(panels, labels, shared, widths, lefts, strict=True):
        height = _height(shown)
        place = ((left + gap) / wide, (0.7 + tallest - height) / high, width / wide, height / high)
        _panel(figure.add_axes(place), shown, None if same else names, width, height)
        left += gap + width + BAR
    return figure


def _height(shown: Picture) -> float:
    return max(1.0, 0.24 * len(shown.rows))


def _panel(axes: Any, shown: Picture, names: Sequence[str] | None, width: float, height: float) -> None:
    """Draw one heat map of `width` × `height` inches; without `names` its rows are those of the panel to the left."""
    from matplotlib.colors import LinearSegmentedColormap
    from matplotlib.ticker import MaxNLocator

    rows, depth = len(shown.rows), shown.depth
    values = np.stack([row.effects for row in shown.rows])
    ramp = LinearSegmentedColormap.from_list("ffedit", RAMP).with_extremes(under=HURTS)
    # Negative effects near zero may be noise: only clearly negative ones get a colour of their own.
    hurts = values < -NEGATIVE * (shown.scale or 1)
    drawn = np.where(hurts, values, values.clip(0))
    image = axes.pcolormesh(drawn, cmap=ramp, vmin=0, vmax=shown.scale or 1, edgecolors=(1, 1, 1, 0.12), linewidth=0.4)
    axes.invert_yaxis()
    axes.set_yticks(np.arange(rows) + 0.5)
    labels = axes.set_yticklabels(names or [""] * rows, fontsize=8, parse_math=False)
    for label, row in zip(labels, shown.rows, strict=True):
        label.set_fontweight("bold" if row.subject else "normal")
        label.set_color("#888888" if row.run else "black")
    axes.set_xticks(*layer_ticks(depth, 0.5), fontsize=8)
    axes.tick_params(length=0)
    for spine in axes.spines.values():
        spine.set_visible(False)
    axes.set_xlabel("layer", fontsize=9, labelpad=15)
    axes.text(shown.layer + 0.5, rows + 0.27 * rows / height, "▲", ha="center", va="center", fontsize=8)
    headline(axes, shown.title[0], shown.title[1:], width + BAR, height)
    beside = axes.inset_axes((1 + 0.15 / width, 0, 0.12 / width, 1))
    bar = axes.figure.colorbar(image, cax=beside, extend="min" if hurts.any() else "neither")
    bar.locator = MaxNLocator(max(2, min(6, round(2 * height))))
    bar.outline.set_visible(False)
    bar.ax.tick_params(labelsize=8, length=0)
    unit = UNITS[shown.metric]
    bar.set_label(f"indirect effect ({'P' if height < 2 and unit == 'probability' else unit})", fontsize=8)


def headline(axes: Any, title: str, under: Sequence[str], width: float, height: float) -> None:
    """Write a title and the lines under it above `axes`, `height` inches high, wrapped to `width` inches."""
    step = 0.0
    for text, size, colour in [(line, 8, "#444444") for line in reversed(under)] + [(title, 10, "black")]:
        # A character of the sans-serif font is about 0.58 of its size wide.
        lines = textwrap.wrap(text, int(width * 72 / (0.58 * size))) or [""]
        place = {"transform": axes.transAxes, "va": "bottom", "linespacing": 1.2}
        axes.text(
            0, 1 + (0.09 + step) / height, "\n".join(lines), fontsize=size, color=colour, parse_math=False, **place
        )
        step += len(lines) * 1.25 * size / 72 + 0.03


def layer_ticks(depth: int, middle: float) -> tuple[np.ndarray[Any, Any], list[str]]:
    """Return positions and labels for up to twelve layers; `middle` is the offset of a column's centre."""
    step = next(s for s in (1, 2, 5, 10, 20, 50, 1000) if s * 12 >= depth)
    return np.arange(0, depth, step) + middle, [str(i) for i in range(0, depth, step)]


def _label(row: Row) -> str:
    shown = row.label if len(row.label) <= MOST_CHARACTERS else row.label[: MOST_CHARACTERS - 1] + "…"
    return f"{shown}*" if row.subject else shown

"""The picture of a trace as a figure file: PNG for a page, SVG or PDF for a paper.

matplotlib is an optional extra, imported when a figure is drawn. The figure appears whole or not at all.
"""

from __future__ import annotations

import os
import tempfile
import warnings
from pathlib import Path
from typing import Any

import numpy as np

from ffedit.errors import EditError, FFEditError
from ffedit.folders import check_file
from ffedit.locator import Trace, TraceSet
from ffedit.picture import NEGATIVE, RAMP, Picture, picture

SUFFIXES = (".png", ".svg", ".pdf")
MOST_ROWS = 40
# The colour of a restoration that takes probability away.
HURTS = "#7d93a6"
MOST_CHARACTERS = 24
# Fonts with the scripts that matplotlib's own does not have; those that are installed are used.
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


def save_plot(trace: Trace | TraceSet, path: str | Path, layer: int | None = None) -> Path:
    """Draw a trace, or the average of several, as a heat map; `layer` (or the trace's choice) is marked.

    Raises:
        FFEditError: matplotlib is not installed.
        EditError: the suffix is not .png, .svg or .pdf, or the file cannot be written.
    """
    target = check_plot(path)
    import matplotlib

    shown = picture(trace, layer, MOST_ROWS)
    about: dict[str, dict[str, Any]] = {".svg": {"Date": None}, ".pdf": {"CreationDate": None}}
    with (
        matplotlib.rc_context({"svg.hashsalt": "ffedit", "font.family": _fonts()}),
        warnings.catch_warnings(),
    ):
        warnings.filterwarnings("ignore", message="Glyph .* missing")
        figure = _draw(shown)
        temporary = None
        try:
            handle, temporary = tempfile.mkstemp(dir=target.absolute().parent, prefix=f".{target.name}.")
            os.close(handle)
            suffix = target.suffix.lower()
            figure.savefig(temporary, format=suffix[1:], dpi=200, bbox_inches="tight", metadata=about.get(suffix))
            os.chmod(temporary, 0o644)
            os.replace(temporary, target)
        except OSError as error:
            raise EditError(f"{target}: the figure cannot be written ({error.strerror or error})") from error
        finally:
            if temporary is not None:
                Path(temporary).unlink(missing_ok=True)
    return target


def check_plot(path: str | Path) -> Path:
    """The path, if a figure can be asked for there; to be called before any long work.

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


def _draw(shown: Picture) -> Any:
    from matplotlib.colors import LinearSegmentedColormap
    from matplotlib.figure import Figure
    from matplotlib.ticker import MaxNLocator

    rows, depth = len(shown.rows), shown.depth
    width, height = max(3.2, min(9.0, 0.3 * depth)), max(1.0, 0.24 * rows)
    figure = Figure(figsize=(width + 2.6, height + 1.4))
    wide, high = figure.get_size_inches()
    axes = figure.add_axes((1.6 / wide, 0.7 / high, width / wide, height / high))
    values = np.stack([row.effects for row in shown.rows])
    ramp = LinearSegmentedColormap.from_list("ffedit", RAMP).with_extremes(under=HURTS)
    # Noise around zero is no finding: only what clearly takes probability away gets a colour of its own.
    hurts = values < -NEGATIVE * (shown.scale or 1)
    drawn = np.where(hurts, values, values.clip(0))
    image = axes.pcolormesh(drawn, cmap=ramp, vmin=0, vmax=shown.scale or 1, edgecolors=(1, 1, 1, 0.12), linewidth=0.4)
    axes.invert_yaxis()
    axes.set_yticks(np.arange(rows) + 0.5)
    labels = axes.set_yticklabels([_label(row.label, row.subject) for row in shown.rows], fontsize=8, parse_math=False)
    for label, row in zip(labels, shown.rows, strict=True):
        label.set_fontweight("bold" if row.subject else "normal")
        label.set_color("#888888" if row.run else "black")
    step = max(1, -(-depth // 12))
    step = next(s for s in (1, 2, 5, 10, 20, 50, 1000) if s >= step)
    axes.set_xticks(np.arange(0, depth, step) + 0.5, [str(i) for i in range(0, depth, step)], fontsize=8)
    axes.tick_params(length=0)
    for spine in axes.spines.values():
        spine.set_visible(False)
    axes.set_xlabel("layer", fontsize=9, labelpad=12)
    axes.text(shown.layer + 0.5, rows + 0.27 * rows / height, "▲", ha="center", va="center", fontsize=8)
    axes.set_title(shown.title[0], fontsize=10, loc="left", pad=20, parse_math=False)
    under: dict[str, Any] = {
        "transform": axes.transAxes,
        "fontsize": 8,
        "color": "#444444",
        "parse_math": False,
    }
    axes.text(0, 1 + 0.09 / height, shown.title[1], **under)
    beside = axes.inset_axes((1 + 0.15 / width, 0, 0.12 / width, 1))
    bar = figure.colorbar(image, cax=beside, extend="min" if hurts.any() else "neither")
    bar.locator = MaxNLocator(max(2, min(6, round(2 * height))))
    bar.outline.set_visible(False)
    bar.ax.tick_params(labelsize=8, length=0)
    bar.set_label("indirect effect (P)" if height < 2 else "indirect effect (probability)", fontsize=8)
    return figure


def _label(text: str, subject: bool) -> str:
    shown = text if len(text) <= MOST_CHARACTERS else text[: MOST_CHARACTERS - 1] + "…"
    return f"{shown}*" if subject else shown

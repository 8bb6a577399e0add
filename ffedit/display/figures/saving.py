"""Figure files: PNG for a page, SVG or PDF for a paper, written atomically.

matplotlib is an optional extra, imported when a figure is drawn. The same figure always gives the same file.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from ffedit.errors import EditError, FFEditError
from ffedit.files.atomic import check_file, ready

SUFFIXES = (".png", ".svg", ".pdf")
# Fonts for scripts that matplotlib's default font lacks; those that are installed are used.
FONTS = (
    "Noto Sans CJK SC", "Noto Sans CJK JP", "Source Han Sans", "WenQuanYi Zen Hei", "PingFang SC", "Hiragino Sans",
    "Microsoft YaHei", "Yu Gothic", "Malgun Gothic", "Noto Sans Arabic", "Noto Sans Devanagari", "Arial Unicode MS",
)  # fmt: skip


@contextmanager
def figure_ready(path: str | Path, draw: Callable[[], Any]) -> Iterator[None]:
    """Write the figure that `draw` makes, and move it to `path` when the block ends without an error."""
    target = check_plot(path)

    def draw_to(file: Path) -> None:
        suffix = target.suffix.lower()
        metadata: dict[str, dict[str, Any]] = {".svg": {"Date": None}, ".pdf": {"CreationDate": None}}
        with style():
            draw().savefig(file, format=suffix[1:], dpi=200, bbox_inches="tight", metadata=metadata.get(suffix))

    with ready(target, draw_to):
        yield


def save_figure(path: str | Path, draw: Callable[[], Any]) -> Path:
    """Write a figure as `figure_ready` does, at once."""
    with figure_ready(path, draw):
        return Path(path)


def check_plot(path: str | Path) -> Path:
    """Return the path of a figure. Raises EditError if it cannot be written, FFEditError without matplotlib."""
    target = Path(path)
    if target.suffix.lower() not in SUFFIXES:
        suffix = repr(target.suffix) if target.suffix else "no suffix"
        raise EditError(f"{target}: a figure is one of {', '.join(SUFFIXES)}, found {suffix}; rename it")
    check_file(target)
    check_matplotlib()
    return target


def check_matplotlib() -> None:
    """Raise FFEditError if matplotlib is not installed."""
    try:
        import matplotlib  # noqa: F401
    except ImportError as error:
        raise FFEditError('figures need matplotlib; install it with: pip install "ffedit[plots]"') from error


@contextmanager
def style() -> Iterator[None]:
    """Draw and write figures with the fonts that are installed, and with the same identifiers in every file."""
    import matplotlib
    from matplotlib.font_manager import fontManager

    installed = set(fontManager.get_font_names())
    fonts = ["DejaVu Sans", *(name for name in FONTS if name in installed)]
    with matplotlib.rc_context({"svg.hashsalt": "ffedit", "font.family": fonts}), warnings.catch_warnings():
        warnings.filterwarnings("ignore", message="Glyph .* missing")
        yield

"""Results in a notebook: what the terminal shows as HTML, and figures that display themselves.

Colours are readable on a light and on a dark page; text without a colour has that of the page.
"""

from __future__ import annotations

import io
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from rich.console import Group, RenderableType
from rich.terminal_theme import TerminalTheme
from rich.text import Text

from ffedit.benchmark import BenchReport
from ffedit.benchmark.tables import headline
from ffedit.display.figures.plots import average_lines, heat_maps
from ffedit.display.figures.saving import check_matplotlib, style
from ffedit.display.terminal.console import PlainConsole
from ffedit.display.terminal.diff import diff_view
from ffedit.display.terminal.explanation import explanation_view
from ffedit.display.terminal.heat_map import averages_table, heat_map
from ffedit.display.terminal.layer_choice import trial_edits
from ffedit.display.terminal.memories import edited_view, memory_view, prompt_view
from ffedit.display.terminal.model_table import memory_table, model_line
from ffedit.display.terminal.recall import recalled
from ffedit.display.terminal.scores import before_after, headline_table, verdict_view, what_it_says
from ffedit.display.terminal.shipped import shipped
from ffedit.display.terminal.show import edit_view
from ffedit.display.terminal.site_map import site_map_view
from ffedit.display.terminal.tables import named_values, spaced
from ffedit.editor.edit import Edit
from ffedit.evaluator import Explanation, Report
from ffedit.exporter import Exported
from ffedit.exporter.diff import Diff
from ffedit.facts.fact import Fact
from ffedit.inspector import EditView, MemoryView, PromptView
from ffedit.layer_choice.calibrate import LayerChoice
from ffedit.layer_choice.site_map import SiteMap
from ffedit.locator import Trace, TraceSet
from ffedit.locator.result import Aggregate
from ffedit.model.editable import Editable

WIDTH = 100
GREY, RED, GREEN, YELLOW, BLUE, VIOLET, CYAN = (
    (118, 118, 118), (200, 60, 50), (46, 135, 80), (150, 110, 0), (60, 110, 200), (150, 80, 170), (20, 130, 150)
)  # fmt: skip
# rich draws `dim` text halfway between the colours of text and background: both are grey here, and not in the HTML.
THEME = TerminalTheme(GREY, GREY, [GREY, RED, GREEN, YELLOW, BLUE, VIOLET, CYAN, GREY])
FORMAT = (
    '<pre style="white-space:pre;overflow-x:auto;line-height:1.25;margin:0;background:none;'
    "font-family:Menlo,Consolas,'DejaVu Sans Mono',monospace\">{code}</pre>"
)


def html(result: object) -> str:
    """Render a result as a fragment of HTML: the terminal's text, escaped."""
    view = next(VIEWS[kind] for kind in type(result).__mro__ if kind in VIEWS)
    # force_jupyter: otherwise rich itself would show the result, too.
    look: dict[str, Any] = {"force_terminal": True, "color_system": "truecolor", "no_color": False}
    console = PlainConsole(record=True, file=io.StringIO(), width=WIDTH, force_jupyter=False, **look)
    console.print(view(result))
    return console.export_html(theme=THEME, code_format=FORMAT, inline_styles=True)


def figure(trace: Trace | TraceSet, layer: int | None = None) -> Any:
    """Draw a trace as a figure that a notebook shows; FFEditError where matplotlib is not installed."""
    return _figure(lambda: heat_maps([trace], layer))


def lines(averages: Sequence[Aggregate]) -> Any:
    """Draw averages as a figure that a notebook shows; FFEditError where matplotlib is not installed."""
    return _figure(lambda: average_lines(averages))


def _figure(draw: Callable[[], Any]) -> Any:
    check_matplotlib()

    def png() -> bytes:
        stream = io.BytesIO()
        with style():
            drawn.savefig(stream, format="png", dpi=100, bbox_inches="tight")
        return stream.getvalue()

    with style():
        drawn = draw()
    drawn._repr_png_ = png  # otherwise only pyplot's figures are shown, and twice
    return drawn


def _trace(trace: Trace | TraceSet) -> RenderableType:
    return Group(heat_map(trace), recalled(trace))


def _fact(fact: Fact) -> RenderableType:
    names = ("subject", "prompt", "target", "previous", "relation")
    lines = [(name, value) for name in names if (value := getattr(fact, name)) is not None]
    lines += [(name, str(len(value))) for name, value in vars(fact).items() if value and isinstance(value, tuple)]
    return named_values(*lines)


def _model(editable: Editable) -> RenderableType:
    edits = "\n".join(f"applied: {edit!r}" for edit in editable.history.known.values())
    return Group(model_line(editable), Text(""), memory_table(editable), Text(edits))


def _report(report: Report) -> RenderableType:
    return spaced(before_after(report), what_it_says(report), verdict_view(report) or Text(""))


VIEWS: Mapping[type, Callable[[Any], RenderableType]] = {
    Aggregate: averages_table,
    BenchReport: lambda report: headline_table(headline(report)),
    LayerChoice: trial_edits,
    Diff: diff_view,
    Edit: edit_view,
    EditView: edited_view,
    Editable: _model,
    Explanation: explanation_view,
    Exported: shipped,
    Fact: _fact,
    MemoryView: memory_view,
    PromptView: prompt_view,
    Report: _report,
    SiteMap: site_map_view,
    Trace: _trace,
    TraceSet: _trace,
}

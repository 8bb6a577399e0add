"""The heat map of a trace in a terminal, and the choice of a layer in words.

Each cell is a shade character, drawn in its own background colour where the terminal has colours: piped, copied or
without colour, the map shows the same.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from rich.cells import cell_len
from rich.console import Console, ConsoleOptions, RenderResult
from rich.style import Style
from rich.text import Text

from ffedit.display.picture import NEGATIVE, PARTS, UNITS, Picture, Row, colour, picture
from ffedit.facts.text import number, quoted
from ffedit.locator import CLEAR, Trace, TraceSet, span_of

SHADES, SHADES_ASCII = " ░▒▓█", " .+x#"
LABEL_CELLS = 14
MOST_CELLS = 4
# Total effect below which a trace says little, in probability or in nats (0.05 nats: a twentieth of the probability).
WEAK_TOTAL = 0.05


@dataclass(frozen=True)
class HeatMap:
    """A heat map of token rows and layer columns, as wide as the console allows.

    Attributes:
        picture: the rows and titles to draw.
        beside: the column to the right: a heading, then a text for each row, all equally wide; by default the
            row's largest effect.
    """

    picture: Picture
    beside: tuple[str, ...] | None = None

    def __rich_console__(self, console: Console, options: ConsoleOptions) -> RenderResult:
        """Yield the title, rows, axis, mark and legend."""
        shown = self.picture
        labels = min(LABEL_CELLS, max(cell_len(row.label) for row in shown.rows))
        heading, *beside = self.beside or [f"{text:>5}" for text in ("most", *(number(row.most) for row in shown.rows))]
        room = max(8, options.max_width - labels - 3 - cell_len(heading))
        group = -(-shown.depth // room)
        columns = -(-shown.depth // group)
        cell = max(1, min(MOST_CELLS, room // columns))
        shades = SHADES_ASCII if options.ascii_only else SHADES
        # Sixteen colours cannot show a ramp; there the shade characters do it alone.
        coloured = not console.no_color and console.color_system not in (None, "standard")
        yield Text(shown.title[0], style="bold")
        for line in shown.title[1:]:
            yield Text(line)
        yield Text("")
        for row, text in zip(shown.rows, beside, strict=True):
            cells = self._row(row, labels, group, columns, cell, shades, coloured)
            yield cells.append(f" {text}", style="dim")
        yield self._axis(labels, group, columns, cell).append(f" {heading}")
        end = columns * cell + 1 + cell_len(heading)
        yield self._mark(labels, group, cell, end, "^" if options.ascii_only else "▲")
        yield Text("")
        yield self._legend(shades, coloured)
        if remarks := self._remarks(group):
            yield remarks

    def _row(self, row: Row, labels: int, group: int, columns: int, cell: int, shades: str, coloured: bool) -> Text:
        label = Text(row.label, style="bold" if row.subject else "dim" if row.run else "")
        label.truncate(labels, overflow="ellipsis")
        line = Text(" " * (labels - label.cell_len), no_wrap=True, overflow="crop").append_text(label)
        line.append("* " if row.subject else "  ", style="bold")
        for column in range(columns):
            effects = row.effects[column * group : (column + 1) * group]
            seen = effects[~np.isnan(effects)]
            share = self.picture.share(float(seen.max())) if len(seen) else None
            line.append_text(_cell(share, cell, shades, coloured))
        return line

    def _axis(self, labels: int, group: int, columns: int, cell: int) -> Text:
        widest = len(str(self.picture.depth - 1)) + 1
        step = next(step for step in (1, 2, 5, 10, 20, 50, 100, 1000) if step * cell >= widest)
        axis = ""
        for column in range(0, columns, step):
            text = str(column * group)
            axis = axis.ljust(column * cell + (cell - len(text)) // 2 if cell > 2 else column * cell) + text
        line = Text("layer".rjust(labels) + "  ", style="dim", no_wrap=True, overflow="crop")
        return line.append(f"{axis:<{columns * cell}}")

    def _mark(self, labels: int, group: int, cell: int, end: int, mark: str) -> Text:
        before = (self.picture.layer // group) * cell + (cell - 1) // 2
        text = f"layer {self.picture.layer}"
        fits = before + 2 + len(text) <= end
        line = " " * before + f"{mark} {text}" if fits else f"{text} {mark}".rjust(before + 1)
        return Text(" " * (labels + 2) + line, style="bold", no_wrap=True, overflow="crop")

    def _legend(self, shades: str, coloured: bool) -> Text:
        shown = self.picture
        if shown.scale == 0:
            return Text("No restoration brings anything back.")
        line = Text("0 ")
        for i in range(10):
            line.append_text(_cell(i / 9, 1, shades, coloured))
        of = "of " if shown.metric == "probability" else ""
        line.append(f" {number(shown.scale)} {of}{UNITS[shown.metric]} brought back")
        if any(row.subject for row in shown.rows):
            line.append("   * subject")
        return line

    def _remarks(self, group: int) -> Text:
        shown, remarks = self.picture, []
        if shown.share(shown.lowest) < -NEGATIVE:
            remarks.append(f"- restoring takes away, up to {number(-shown.lowest)}")
        if group > 1:
            remarks.append(f"a column is {group} layers and shows their largest effect")
        if any(row.run for row in shown.rows):
            remarks.append("… shows the largest effect of its tokens")
        return Text("\n".join(remarks), style="dim")


def _cell(share: float | None, width: int, shades: str, coloured: bool) -> Text:
    if share is None:
        return Text(" " * width)
    if share < -NEGATIVE:
        style = Style(color="#a8a8a8", bgcolor=colour(0)) if coloured else Style()
        return Text("-" * width, style=style)
    shade = shades[max(0, min(len(shades) - 1, round(share * (len(shades) - 1))))]
    return Text(shade * width, style=Style(color=colour(share), bgcolor=colour(share)) if coloured else Style())


def heat_map(trace: Trace | TraceSet, layer: int | None = None) -> HeatMap:
    """Render a trace as a heat map; several facts are averaged by the role of a token.

    `layer` is the one to mark, by default the trace's own choice.
    """
    return HeatMap(picture(trace, layer))


def layer_choice(trace: Trace | TraceSet, chosen: int, asked: str = "trace") -> Text:
    """Say which layer is edited and why, with warnings where the trace shows little.

    Args:
        trace: the trace of one fact or several.
        chosen: the layer that is edited.
        asked: the origin of the choice: "trace", "model" (already explained elsewhere), or the user's own value.
    """
    traces = trace.averaged.traces if isinstance(trace, TraceSet) else (trace,)
    best, site, why = trace.layer, trace.site, trace_words(trace)
    if asked == "model":
        line = Text("The trace: ", style="bold")
        if site is not None:
            why += "; tracing agrees" if site == chosen else f"; tracing alone would have chosen {site}"
    else:
        line = Text(f"Layer {chosen}: ", style="bold")
        if chosen != best:
            why = f"tracing would have chosen {best}: {why}" if site is not None else why
        if asked != "trace":
            agrees = ", and tracing agrees: " if chosen == best and site is not None else "; "
            why = f"you asked for it{agrees}{why}"
    line.append(f"{why}.", style="not bold")
    for note in _doubts(trace, traces, asked != "model"):
        line.append(f"\n{note}", style="yellow not bold")
    return line


def trace_words(trace: Trace | TraceSet) -> str:
    """Say how much restoring brings back at the subject's last token."""
    traces = trace.averaged.traces if isinstance(trace, TraceSet) else (trace,)
    one, best = traces[0], trace.layer
    peak = int(np.nanargmax(trace.at_subject))
    layers = span_of(peak, one.window, len(trace.at_subject))
    if one.kind == "state":
        what = f"the hidden state after layer {peak}"
    elif len(layers) > 1:
        what = f"the {PARTS[one.kind]} outputs of layers {layers[0]}–{layers[-1]}"
    else:
        what = f"the {PARTS[one.kind]} output of layer {peak}"
    where = "the subject's last token"
    if len(traces) == 1:
        where += f" ({quoted(one.tokens[one.subject_last])})"
    average = f", on average over {len(traces)} facts" if len(traces) > 1 else ""
    shown = number(float(trace.at_subject[peak]))
    unit = "" if one.metric == "probability" else f" {UNITS[one.metric]}"
    destroyer = "another subject" if one.noise is None else one.corruption
    share = f"{shown} of the {number(trace.total)}{unit} that {destroyer} destroys{average}"
    why = f"restoring {what} at {where} brings back {share}"
    if one.sever is not None:
        why = f"with the {PARTS[one.sever]} layers severed, {why}"
    if not one.exact:
        why = f"by a first-order estimate, {why}"
    if one.kind != "state" and len(layers) > 1:
        why += f"; of these, layer {best} alone brings back most, {number(float(trace.alone[best]))}"
    return why


def _corruption(trace: Trace) -> str:
    return "another subject" if trace.noise is None else "the noise"


def _doubts(trace: Trace | TraceSet, traces: tuple[Trace, ...], decides: bool) -> list[str]:
    """Return warnings where the trace shows little; if the trace `decides` the layer, they say what to do."""
    notes = []
    largest = float(np.nanmax(trace.at_subject))
    others = f"--layers N, N from 0 to {len(trace.at_subject) - 1}"
    named, compare = (
        f"; {do} ({others})" if decides else "" for do in ("name a layer yourself", "compare other layers")
    )
    if trace.total < WEAK_TOTAL:
        notes.append(
            f"{_corruption(traces[0]).capitalize()} hardly changes the answer (total effect {number(trace.total)}), "
            f"so the trace says little about where it is recalled{named}."
        )
    elif largest < CLEAR * trace.total:
        end = float(np.mean([np.nanmax(one.effects[:, -1]) for one in traces]))
        notes.append(
            f"The trace shows no clear site at the subject: at most {number(largest)} comes back at its last "
            f"token, {number(end)} at the prompt's. The edit may not take or not generalise"
            f"{compare}."
        )
    every = trace.traces if isinstance(trace, TraceSet) else (trace,)
    unknown = [one for one in every if not one.known]
    if len(every) == 1 and unknown:
        notes.append(
            f"The model does not answer {quoted(unknown[0].answer)} by itself, so this traces an answer that "
            "it does not give; check the prompt and the previous object."
        )
    elif unknown:
        rest = "so no layer is taken from them" if len(unknown) == len(every) else "these are set aside"
        notes.append(
            f"For {len(unknown)} of {len(every)} facts the model does not give the traced answer by itself; {rest}."
        )
    return notes


__all__ = ["HeatMap", "heat_map", "layer_choice"]

"""What the picture of a trace shows, before anyone draws it: the terminal and the figure file show the same.

Rows are tokens from top to bottom and columns are layers, as in the figures of ROME (arXiv 2202.05262,
figure 1). A long prompt keeps the rows that matter (the subject, the end, the largest effects); every run
between them becomes one row that shows the largest effect in it. Several facts are averaged by the role of
a token, as in figure 2 there.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import TypeAlias

import numpy as np

from ffedit.locator import Trace, TraceSet

Effects: TypeAlias = np.ndarray[tuple[int, ...], np.dtype[np.float64]]

# Even steps of lightness from a dark to a light end (the inner part of matplotlib's magma), so that equal
# effects look equally far apart and neither end is lost on a dark or on a light background.
RAMP = ("#221150", "#51127c", "#822681", "#b73779", "#e65164", "#fb8861", "#fec287", "#fcf0b2")
ROLES = ("first subject", "mid subject", "last subject", "next token", "further tokens", "last token")
# An effect below minus this share of the scale is marked as negative.
NEGATIVE = 0.05
# In a long prompt, tokens with more than this share of the largest effect keep their own row.
TELLING = 0.05


@dataclass(frozen=True, eq=False)
class Row:
    """A token, a role, or a run of tokens.

    Attributes:
        label: what it is called.
        effects: what restoring it brings back, [layers], probability.
        subject: whether it belongs to the subject.
        run: whether it stands for several tokens, each effect being the largest among them.
    """

    label: str
    effects: Effects
    subject: bool
    run: bool = False


@dataclass(frozen=True, eq=False)
class Picture:
    """Everything that is drawn.

    Attributes:
        rows: from top to bottom.
        title: what was restored; the probabilities.
        layer: the layer to mark.
        depth: number of layers.
    """

    rows: tuple[Row, ...]
    title: tuple[str, str]
    layer: int
    depth: int

    @property
    def scale(self) -> float:
        """The largest effect, or 0 where nothing comes back: the light end of the colours."""
        return max(0.0, max(float(row.effects.max()) for row in self.rows))

    @property
    def lowest(self) -> float:
        """The smallest effect, or 0: below it, restoring hurts the answer."""
        return min(0.0, min(float(row.effects.min()) for row in self.rows))

    def share(self, effect: float) -> float:
        """An effect as a share of the scale, negative ones too."""
        return effect / (self.scale or -self.lowest or 1.0)


def picture(trace: Trace | TraceSet, layer: int | None = None, most_rows: int = 20) -> Picture:
    """Arrange a trace, or the average of several; `layer` is to be marked, by default the trace's choice."""
    chosen = trace.layer if layer is None else layer
    if isinstance(trace, TraceSet) and len(trace.traces) == 1:
        trace = trace.traces[0]
    if isinstance(trace, TraceSet):
        depth = len(trace.at_subject)
        return Picture(tuple(_roles(trace.traces)), _average_title(trace), chosen, depth)
    title = (_restored(trace), f"P({quoted(trace.answer)}) {_probabilities(trace.clean, trace.corrupted)}")
    return Picture(tuple(_tokens(trace, most_rows)), title, chosen, len(trace.effects))


def _restored(trace: Trace) -> str:
    if trace.kind == "state":
        return "Causal trace of hidden states"
    window = f"windows of {trace.window} layers" if trace.window > 1 else "one layer at a time"
    return f"Causal trace of feed-forward outputs, {window}"


def _probabilities(clean: float, corrupted: float) -> str:
    return f"{number(clean)} clean → {number(corrupted)} corrupted: total effect {number(clean - corrupted)}"


def _average_title(traces: TraceSet) -> tuple[str, str]:
    clean = float(np.mean([trace.clean for trace in traces.traces]))
    corrupted = float(np.mean([trace.corrupted for trace in traces.traces]))
    facts = f"average of {len(traces.traces)} facts"
    return f"{_restored(traces.traces[0])}, {facts}", f"P(answer) {_probabilities(clean, corrupted)}"


def _tokens(trace: Trace, most: int) -> Iterator[Row]:
    """The tokens' rows; those beyond `most` are gathered into runs."""
    start, end = trace.subject
    count = trace.effects.shape[1]
    kept = set(range(count))
    if count > most:
        largest = trace.effects.max(0)
        falling = np.argsort(-largest, kind="stable").tolist()
        telling = [i for i in falling if largest[i] > max(0.0, TELLING * largest.max())]
        around = [i for i in (end, count - 2, start - 1, start - 2) if 0 <= i < count]
        first = [trace.subject_last, count - 1, start, *telling, *range(start, end), *around]
        kept = set(list(dict.fromkeys(first))[:most])
    part = [(i >= start) + (i >= end) for i in range(count)]
    position = 0
    while position < count:
        stop = position + 1
        while position not in kept and stop < count and stop not in kept and part[stop] == part[position]:
            stop += 1
        label = token(trace.tokens[position]) if stop == position + 1 else f"… {stop - position} tokens"
        effects = trace.effects[:, position:stop].max(1)
        yield Row(label, effects, start <= position < end, stop > position + 1)
        position = stop


def _roles(traces: Sequence[Trace]) -> Iterator[Row]:
    """The average over the facts that have a token in the role; a fact's several count as their mean."""
    columns: dict[str, list[Effects]] = {role: [] for role in ROLES}
    for trace in traces:
        start, end = trace.subject
        count = trace.effects.shape[1]
        places = {
            "first subject": range(start, min(start + 1, end - 1)),
            "mid subject": range(start + 1, end - 1),
            "last subject": range(end - 1, end),
            "next token": range(end, min(end + 1, count - 1)),
            "further tokens": range(end + 1, count - 1),
            "last token": range(max(end, count - 1), count),
        }
        for role, some in places.items():
            if some:
                columns[role].append(trace.effects[:, some.start : some.stop].mean(1))
    for role, found in columns.items():
        if found:
            yield Row(role, np.asarray(np.mean(found, axis=0)), role.endswith("subject"))


def colour(share: float) -> str:
    """The ramp at a share of 0 to 1, `#rrggbb`."""
    at = min(max(share, 0.0), 1.0) * (len(RAMP) - 1)
    low = min(int(at), len(RAMP) - 2)
    ends = [[int(text[i : i + 2], 16) for i in (1, 3, 5)] for text in RAMP[low : low + 2]]
    return "#" + "".join(f"{round(a + (b - a) * (at - low)):02x}" for a, b in zip(*ends, strict=True))


def number(value: float) -> str:
    """Two decimals; one digit where two decimals would show nothing of it."""
    size = abs(value)
    shown = f"{size:.1g}" if 0 < size < 0.005 else f"{size:.2f}"
    return f"−{shown}" if value < 0 else shown


def token(text: str) -> str:
    """A token as it can be shown on one line: without leading space, control characters escaped."""
    shown = text.strip(" ") or "␣"
    return "".join(c if c.isprintable() else c.encode("unicode_escape").decode() for c in shown)


def quoted(text: str, most: int = 30) -> str:
    """Text on one line, in quotation marks, cut if it is long."""
    shown = token(text)
    return f"“{shown if len(shown) <= most else shown[: most - 1] + '…'}”"

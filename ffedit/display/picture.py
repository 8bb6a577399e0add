"""Contents of a trace's heat map, shared by the terminal and the figure file.

Rows are tokens from top to bottom and columns are layers, as in the figures of ROME (arXiv 2202.05262,
figure 1). A long prompt keeps the rows that matter (the subject, the end, the largest effects); every run
between them becomes one row that shows the largest effect in it. Several facts are averaged by the role of
a token, as in figure 2 there.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import groupby
from typing import Literal, TypeAlias

import numpy as np

from ffedit.facts.text import counted, number, quoted, token
from ffedit.layer_choice.site_map import SiteMap
from ffedit.locator.result import ROLES, Aggregate, Metric, Trace, TraceSet, by_role

Share: TypeAlias = Literal["reach", "leak"]
Effects: TypeAlias = np.ndarray[tuple[int, ...], np.dtype[np.float64]]

# Even steps of lightness from a dark to a light end (the inner part of matplotlib's magma), so that equal
# effects look equally far apart and neither end is lost on a dark or on a light background.
RAMP = ("#221150", "#51127c", "#822681", "#b73779", "#e65164", "#fb8861", "#fec287", "#fcf0b2")
PARTS = {"feed_forward": "feed-forward", "attention": "attention"}
UNITS: dict[str, str] = {"probability": "probability", "log_probability": "nats", "logit_difference": "nats"}
# What the largest number of a heat map measures: effects of a trace, or shares of a change.
LEGENDS: dict[Metric | Share, str] = {
    "probability": "of probability brought back",
    "log_probability": "nats brought back",
    "logit_difference": "nats brought back",
    "reach": "of the change reaches the subject",
    "leak": "of the change leaks",
}
# The colour of a restoration with a clearly negative effect.
HURTS = "#7d93a6"
# An effect below minus this share of the scale is marked as negative.
NEGATIVE = 0.05
# Tokens of a prompt that have a row of their own in a terminal or on a page.
MOST_ROWS = 20
# In a long prompt, tokens with more than this share of the largest effect keep their own row.
TELLING = 0.05


@dataclass(frozen=True, eq=False)
class Row:
    """A row of the heat map: a token, a role, or a run of tokens."""

    label: str
    effects: Effects  # indirect, [layers], in units of the picture's metric; NaN where nothing was restored
    subject: bool  # a token or role of the subject
    run: bool = False  # several tokens in one row; each effect is the largest among them

    @property
    def most(self) -> float:
        """Return the largest effect; NaN where nothing was restored."""
        return float(np.fmax.reduce(self.effects))


@dataclass(frozen=True, eq=False)
class Picture:
    """One heat map: its rows from top to bottom, its title, and the marked layer."""

    rows: tuple[Row, ...]
    title: tuple[str, ...]  # lines
    layer: int  # layer to mark
    depth: int  # number of layers
    metric: Metric | Share  # the effects are differences of it, or in a site map the share itself

    @property
    def scale(self) -> float:
        """Return the light end of the colours: the largest effect, at least 0, or for shares at least 1."""
        least = 0.0 if self.metric in UNITS else 1.0
        return float(np.fmax.reduce([least, *(row.most for row in self.rows)]))

    @property
    def legend(self) -> str:
        """Say what the largest effect is."""
        return LEGENDS[self.metric]

    @property
    def negative(self) -> str:
        """Say what a negative effect is."""
        return "restoring takes away, up to" if self.metric in UNITS else "the change is turned round, up to"

    @property
    def lowest(self) -> float:
        """Return the smallest effect, or 0: below it, restoring hurts the answer."""
        return float(np.fmin.reduce([0.0, *(np.fmin.reduce(row.effects) for row in self.rows)]))

    def share(self, effect: float) -> float:
        """Return an effect as a share of the scale; negative effects give negative shares."""
        return effect / (self.scale or -self.lowest or 1.0)


def pictures(
    measured: Sequence[Trace | TraceSet], layer: int | None = None, most_rows: int = MOST_ROWS
) -> list[Picture]:
    """Arrange measurements as heat maps: of the same tokens in the same rows, of several facts by the role of a token.

    `layer` is marked, by default each measurement's choice; at most `most_rows` tokens have a row of their own.
    """
    averaged = [averaged_traces(m) for m in measured]
    arranged = []
    for measurement, traces in zip(measured, averaged, strict=True):
        first = traces[0]
        clean, corrupted = (float(np.mean([getattr(t, run) for t in traces])) for run in ("clean", "corrupted"))
        title, answer = f"Causal trace of {restored(first)}", quoted(first.answer)
        if len(traces) > 1:
            rows, title, answer = list(_roles(traces)), f"{title}, average of {counted(len(traces), 'fact')}", "answer"
        else:
            alone = [t[0] for t in averaged if len(t) == 1]
            alike = [t for t in alone if (t.tokens, t.subject) == (first.tokens, first.subject)]
            rows = list(_tokens(first, first.effects, _kept(alike, most_rows)))
        says = runs(first.metric, answer, clean, corrupted)
        marked = measurement.layer if layer is None else layer
        lines = [title, says, *(["Empty: not measured"] if any(np.isnan(row.effects).any() for row in rows) else [])]
        arranged.append(Picture(tuple(rows), tuple(lines), marked, len(first.effects), first.metric))
    return arranged


def site_pictures(
    mapped: SiteMap, trace: Trace | None = None, layer: int | None = None, most_rows: int = MOST_ROWS
) -> list[Picture]:
    """Arrange reach and leak to look-alikes, with the rows of a `trace`; `layer` is marked, or that of least leak."""
    kept = set(range(*mapped.subject)) if trace is None else _kept([trace], most_rows)
    marked, depth = mapped.least[0] if layer is None else layer, len(mapped.reach)
    shares: tuple[tuple[Share, Effects, str, str], ...] = (
        ("reach", mapped.reach, "Reach: share of the change that the subject receives", "Mean over other sentences"),
        ("leak", mapped.leak_look_alikes, "Leak: share of the change that look-alikes receive", "Mean size over names"),
    )
    return [
        Picture(tuple(_tokens(mapped, values, kept)), (title, under, "Empty: not measured"), marked, depth, share)
        for share, values, title, under in shares
    ]


def averaged_traces(measured: Trace | TraceSet) -> tuple[Trace, ...]:
    """Return the traces over which averages are taken."""
    return measured.averaged.traces if isinstance(measured, TraceSet) else (measured,)


def restored(measured: Trace | Aggregate) -> str:
    """Say what was restored and under which conditions."""
    if measured.kind == "state":
        words = ["hidden states"]
    else:
        window = f"windows of {measured.window} layers" if measured.window > 1 else "one layer at a time"
        words = [f"{PARTS[measured.kind]} outputs", window]
    if measured.sever is not None:
        words.append(f"{PARTS[measured.sever]} layers severed")
    if isinstance(measured, Trace) and (traced := _traced_layers(measured.effects)):
        words.append(traced)
    return ", ".join(words)


def _traced_layers(effects: Effects) -> str:
    """Say at how many layers something was restored; an empty text if at all."""
    traced = int((~np.isnan(effects).all(1)).sum())
    return "" if traced == len(effects) else f"{traced} of {len(effects)} layers"


def runs(metric: Metric, answer: str, clean: float, corrupted: float) -> str:
    """Format the metric of the clean and the corrupted runs and the total effect; `answer` is shown as it is."""
    what = "log P(old) − log P(new)" if metric == "logit_difference" else f"P({answer})"
    what = f"log {what}" if metric == "log_probability" else what
    shown = f"{what} {number(clean)} clean → {number(corrupted)} corrupted: total effect {number(clean - corrupted)}"
    return shown if metric == "probability" else f"{shown} {UNITS[metric]}"


def _kept(traces: Sequence[Trace], most: int) -> set[int]:
    """Choose which of the restored tokens have a row of their own; all `traces` have the same tokens."""
    (start, end), count = traces[0].subject, len(traces[0].tokens)
    traced = {i for trace in traces for i in np.flatnonzero(~np.isnan(trace.effects).all(0)).tolist()}
    if len(traced) <= most:
        return traced
    # As a share of the measurement's own largest effect: attention brings back less than states do.
    tops = [np.fmax.reduce(trace.effects, 0) for trace in traces]
    largest = np.fmax.reduce([top / (max(0.0, np.nanmax(top)) or 1.0) for top in tops])
    telling = [i for i in np.argsort(-largest, kind="stable").tolist() if largest[i] > TELLING]
    around = [i for i in (end, count - 2, start - 1, start - 2) if 0 <= i < count]
    first = [end - 1, count - 1, start, *telling, *range(start, end), *around]
    return set([i for i in dict.fromkeys(first) if i in traced][:most])


def _tokens(prompt: Trace | SiteMap, effects: Effects, kept: set[int]) -> Iterator[Row]:
    """Yield the tokens' rows; a run of tokens that are not kept, within or outside the subject, is one row."""
    start, end = prompt.subject
    row_of = [(i if i in kept else None, i >= start, i >= end) for i in range(len(prompt.tokens))]
    for (_, begun, ended), group in groupby(range(len(row_of)), row_of.__getitem__):
        run = list(group)
        label = token(prompt.tokens[run[0]]) if len(run) == 1 else f"… {len(run)} tokens"
        yield Row(label, np.fmax.reduce(effects[:, run], 1), begun and not ended, len(run) > 1)


def _roles(traces: Sequence[Trace]) -> Iterator[Row]:
    """Average each role over the facts that have a token in it; a fact's several tokens count as their mean."""
    for role, effects in zip(ROLES, np.stack([by_role(trace) for trace in traces], axis=1), strict=True):
        measured = effects[~np.isnan(effects).all(1)]
        if len(measured):
            yield Row(role, measured.mean(0), role.endswith("subject"))


def layer_step(depth: int) -> int:
    """Return the distance between the labels of at most twelve of `depth` layers."""
    return next(step for step in (1, 2, 5, 10, 20, 50, 1000) if step * 12 >= depth)


def shade(picture: Picture, effect: float) -> str | None:
    """Return the colour of an effect as `#rrggbb`; None where nothing was restored."""
    if np.isnan(effect):
        return None
    share = picture.share(effect)
    return HURTS if share < -NEGATIVE else colour(max(0.0, share))


def colour(share: float) -> str:
    """Interpolate the colour ramp at a share of 0 to 1, as `#rrggbb`."""
    stops = np.linspace(0, 1, len(RAMP))
    channels = ([int(text[i : i + 2], 16) for text in RAMP] for i in (1, 3, 5))
    return "#" + "".join(f"{round(float(np.interp(share, stops, channel))):02x}" for channel in channels)

"""The layer that is edited: which one and why, in words, and the layers that were compared as a table.

The layer where a fact is recalled and the one where it is best edited can differ (Hase et al. 2023, arXiv 2301.04213),
so tracing and a sweep over layers are shown side by side, with their rank correlation in words.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence

import numpy as np
from rich.console import Group, RenderableType
from rich.table import Column, Table
from rich.text import Text

from ffedit.display.picture import PARTS, UNITS, restored
from ffedit.display.terminal.tables import plain_table
from ffedit.facts.text import counted, number, quoted
from ffedit.layer_choice.calibrate import RATES, TIE, Choice, LayerScore, Sweep, tied
from ffedit.layer_choice.choose import Found
from ffedit.layer_choice.published import AutoLayer
from ffedit.locator import CLEAR, Trace, TraceSet, span_of
from ffedit.locator.result import rank_correlation

# Rank correlations in absolute value: none below WEAK, "somewhat" below STRONG, "clearly" from STRONG on.
WEAK, STRONG = 0.3, 0.7
# Total effect below which a trace says little, in probability or in nats (0.05 nats: a twentieth of the probability).
WEAK_TOTAL = 0.05


def why_layer(found: Found, asked: str) -> RenderableType:
    """Say why this layer is edited; `asked` is the value of `--layers`. A sweep is a table as well."""
    if found.sweep is not None and not found.kept:
        return compare_layers(found.sweep)
    return Group(*reasons(found, asked))


def reasons(found: Found, asked: str) -> list[Text]:
    """Return the reasons for this layer, without tables; `asked` is the value of `--layers`."""
    layer = found.layer
    if found.sweep is not None:
        if not found.kept:
            return _sweep_in_words(found.sweep)
        over = f"remembered from a sweep with {found.sweep.method} over {counted(found.sweep.facts, 'fact')}"
        return [Text(f"Layer {layer}: {over} (`ffedit cache clear` forgets it).")]
    lines: list[Text] = []
    if found.by == found.auto.by:
        if asked != "auto":
            lines.append(Text("The trace shows no site at the subject's last token, so it does not tell the layer."))
        lines.append(auto_in_words(found.auto, layer))
    if found.by == "only":
        lines.append(Text(f"Layer {layer}: the only one whose output reaches the answer."))
    return [*lines, layer_choice(found.traces, layer, "explained" if lines else asked)]


def auto_in_words(auto: AutoLayer, layer: int | None = None) -> Text:
    """Say which layer `auto` takes, and why; `layer` is taken where that one is not allowed."""
    words = "" if layer in (None, auto.layer) else f"the layer allowed that comes next to {auto.layer}, "
    heading = f"Layer {auto.layer if layer is None else layer}: "
    return Text.assemble((heading, "bold"), f"{words}{auto.why}; `ffedit choose-layer` tries others.")


def layer_choice(trace: Trace | TraceSet, chosen: int, asked: str = "trace") -> Text:
    """Say why the layer `chosen` is edited, with warnings where the trace shows little.

    `asked` is the origin of the choice: "trace", the user's own value, or "explained" where other lines say it.
    """
    best, site, why = trace.layer, trace.site, _restoring(trace)
    heading = f"Layer {chosen}: "
    if asked == "explained":
        heading = "The trace: "
        if site is not None:
            why += "; tracing agrees" if site == chosen else f"; tracing alone would have chosen {site}"
    else:
        if chosen != best and site is not None:
            why = f"tracing would have chosen {best}: {why}"
        if asked != "trace":
            agrees = ", and tracing agrees: " if chosen == best and site is not None else "; "
            why = f"you asked for it{agrees}{why}"
    doubts = ((f"\n{doubt}", "yellow") for doubt in _doubts(trace, asked != "explained"))
    return Text.assemble((heading, "bold"), f"{why}.", *doubts)


def _averaged(trace: Trace | TraceSet) -> tuple[Trace, ...]:
    return trace.averaged.traces if isinstance(trace, TraceSet) else (trace,)


def _restoring(trace: Trace | TraceSet) -> str:
    """Say how much restoring brings back at the subject's last token."""
    traces, best = _averaged(trace), trace.layer
    first = traces[0]
    peak = int(np.nanargmax(trace.at_subject))
    layers = span_of(peak, first.window, len(trace.at_subject))
    if first.kind == "state":
        what = f"the hidden state after layer {peak}"
    elif len(layers) > 1:
        what = f"the {PARTS[first.kind]} outputs of layers {layers[0]}–{layers[-1]}"
    else:
        what = f"the {PARTS[first.kind]} output of layer {peak}"
    where, average = f" ({quoted(first.tokens[first.subject_last])})", ""
    if len(traces) > 1:
        where, average = "", f", on average over {len(traces)} facts"
    unit = "" if first.metric == "probability" else f" {UNITS[first.metric]}"
    destroyer = "another subject" if first.noise is None else first.corruption
    back, total = number(float(trace.at_subject[peak])), number(trace.total)
    destroyed = f"of the {total}{unit} that {destroyer} destroys"
    share = f"{back} {destroyed}"
    if trace.at_subject[peak] >= trace.total > 0:
        share = f"all {destroyed}" + ("" if back == total else f" and more, {back}")
    why = f"restoring {what} at the subject's last token{where} brings back {share}{average}"
    if first.sever is not None:
        why = f"with the {PARTS[first.sever]} layers severed, {why}"
    if not first.exact:
        why = f"by a first-order estimate, {why}"
    if first.kind != "state" and len(layers) > 1:
        why += f"; of these, layer {best} alone brings back most, {number(float(trace.alone[best]))}"
    return why


def _doubts(trace: Trace | TraceSet, decides: bool) -> Iterator[str]:
    """Yield warnings where the trace shows little; if the trace `decides` the layer, they say what to do."""
    averaged, largest = _averaged(trace), float(np.nanmax(trace.at_subject))
    at_end = all(each.subject_last == len(each.tokens) - 1 for each in averaged)
    others = f"--layers N, N from 0 to {len(trace.at_subject) - (1 if at_end else 2)}"
    if trace.total < WEAK_TOTAL:
        corruption = "Another subject" if averaged[0].noise is None else "The noise"
        named = f"; name a layer yourself ({others})" if decides else ""
        yield (
            f"{corruption} hardly changes the answer (total effect {number(trace.total)}), "
            f"so the trace says little about where it is recalled{named}."
        )
    elif largest < CLEAR * trace.total:
        end = float(np.mean([np.nanmax(each.effects[:, -1]) for each in averaged]))
        compare = f"; compare other layers ({others})" if decides else ""
        yield (
            f"The trace shows no clear site at the subject: at most {number(largest)} comes back at its last "
            f"token, {number(end)} at the prompt's. The edit may not take or not generalise{compare}."
        )
    traces = trace.traces if isinstance(trace, TraceSet) else (trace,)
    unknown = [trace for trace in traces if not trace.known]
    if len(traces) == 1 and unknown:
        yield (
            f"The model does not answer {quoted(unknown[0].answer)} by itself, so this traces an answer that "
            "it does not give; check the prompt and the previous object."
        )
    elif unknown:
        rest = "so no layer is taken from them" if len(unknown) == len(traces) else "these are set aside"
        yield f"For {len(unknown)} of {len(traces)} facts the model does not give the traced answer by itself; {rest}."


# Layers compared -----------------------------------------------------------------------------------


def compare_layers(sweep: Sweep) -> RenderableType:
    """Render tracing and a sweep of edits side by side, one row per layer, with the layer that each would choose."""
    table = _layers_table(sweep.rows, {"tracing": sweep.traced, "sweep": sweep.layer})
    return Group(table, Text(""), *_sweep_in_words(sweep))


def _sweep_in_words(sweep: Sweep) -> list[Text]:
    lines = [f"All edits with {sweep.method}, {counted(sweep.facts, 'fact')}.", _correlation(sweep.correlation)]
    return [*map(Text, lines), *_unmeasured(sweep.rows)]


def _unmeasured(rows: Sequence[LayerScore]) -> list[Text]:
    missing = [name for name in RATES if all(getattr(row, name) is None for row in rows)]
    score = "there is no score" if "efficacy" in missing else "the score is of the others"
    return [Text(f"Not measured, for want of prompts: {' and '.join(missing)}; {score}.")] if missing else []


def trial_edits(choice: Choice) -> RenderableType:
    """Render the layers that were tried by edits, one row each, and say in words which one is chosen."""
    table = _layers_table(choice.rows, {"auto": choice.auto.layer, "edits": choice.layer})
    return Group(table, Text(""), chosen(choice), *_unmeasured(choice.rows))


def chosen(choice: Choice) -> Text:
    """Say which layer trial edits choose, on how many prompts, and which layers they do not tell apart."""
    asked = {"fact": "efficacy", "paraphrase": "paraphrase", "neighbor": "specificity"}
    counts = ", ".join(counted(choice.prompts[rate], what) for what, rate in asked.items())
    layers, even = [row.layer for row in choice.rows], [row.layer for row in tied(choice.rows)]
    words = f"best of layers {', '.join(map(str, layers))} by edits with {choice.method} ({counts}"
    words += f"; the model knows {choice.known} of {counted(choice.asked, 'fact')})"
    if len(even) > 1:
        where = "a quarter of the depth" if choice.auto.row is None else "the published layer"
        listed = f"{', '.join(map(str, even[:-1]))} and {even[-1]}"
        words += f"; {listed} tie (within {TIE:g}), and {choice.layer} is nearest to {where}, {choice.auto.layer}"
    return Text.assemble((f"Layer {choice.layer}: ", "bold"), f"{words}. Take it with --layers {choice.layer}.")


def _layers_table(rows: Sequence[LayerScore], choices: Mapping[str, int | None]) -> Table:
    fields = ["layer", *(["effect"] if any(row.effect is not None for row in rows) else []), *RATES, "score"]
    headings = ("trace effect" if name == "effect" else name for name in fields)
    columns = (Column(heading, justify="right", no_wrap=True) for heading in headings)
    table = plain_table(*columns, Column("choice of", no_wrap=True))
    for row in rows:
        marks = [name for name, layer in choices.items() if layer == row.layer]
        values = [getattr(row, name) for name in fields[1:]]
        cells = ["" if value is None else number(value) for value in values]
        table.add_row(str(row.layer), *cells, ", ".join(marks), style="bold" if marks else "")
    return table


def _correlation(correlation: float | None) -> str:
    if correlation is None:
        return "Whether tracing tells where to edit cannot be said: too few layers, or all of them alike."
    size = abs(correlation)
    if size < WEAK:
        says = "where tracing finds more, an edit scores neither better nor worse"
    else:
        better = "better" if correlation > 0 else "worse"
        says = f"where tracing finds more, an edit {'clearly' if size >= STRONG else 'somewhat'} scores {better}"
    return f"Rank correlation of trace effect and score over layers (Spearman): {number(correlation)}; {says}."


def agreement(estimated: TraceSet, exact: TraceSet) -> str:
    """Say how well first-order estimates of a few facts keep the order of the exact effects (Spearman)."""
    ranks = []
    for guess, true in zip(estimated.traces, exact.traces, strict=True):
        start = true.subject[0]
        ranks.append(rank_correlation(guess.effects[:, start:].ravel(), true.effects[:, start:].ravel()))
    defined = [rank for rank in ranks if rank is not None]
    if not defined:
        return "Estimates and exact effects could not be compared: all alike."
    mean = number(sum(defined) / len(defined))
    same = "the same layer" if estimated.layer == exact.layer else f"layer {estimated.layer} for {exact.layer}"
    return (
        f"First-order estimates of {restored(exact.traces[0])}: rank correlation with the exact effects {mean} "
        f"(Spearman over tokens and layers, mean of {counted(len(defined), 'fact')}); they choose {same}."
    )

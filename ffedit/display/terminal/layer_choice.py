"""The layer that is edited and why: where a trace shows that facts are recalled, and the layers that were compared."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence

import numpy as np
from rich.console import Group, RenderableType
from rich.text import Text

from ffedit.display.picture import PARTS, UNITS, averaged_traces
from ffedit.display.terminal.tables import folded, left, plain_table, right
from ffedit.facts.fact import Fact, show
from ffedit.facts.text import counted, number, quoted
from ffedit.inference.routing import Routes
from ffedit.layer_choice.calibrate import RATES, TIE, LayerChoice, LayerScore, tied
from ffedit.layer_choice.choose import Found
from ffedit.locator import CLEAR, Trace, TraceSet, span_of
from ffedit.locator.result import ROLES, LayerEffects, subject_peak

# Total effect below which a trace says little, in probability or in nats (0.05 nats: a twentieth of the probability).
WEAK_TOTAL = 0.05


def reasons(found: Found, asked: str) -> list[Text]:
    """Return the reasons for this layer; `asked` is the value of `--layers`."""
    layer, auto = found.layer, found.auto
    heading = (f"Layer {layer}: ", "bold")
    lines: list[Text] = []
    if found.by == auto.by:
        if asked != "auto":
            lines.append(Text("The trace shows no site at the subject's last token, so it chooses no layer."))
        nearest = "" if layer == auto.layer else f"the allowed layer nearest to {auto.layer}, "
        lines.append(Text.assemble(heading, f"{nearest}{auto.why}; `ffedit choose-layer` tries others."))
    if found.by == "only":
        lines.append(Text(f"Layer {layer}: the only one whose output reaches the answer."))
    if found.traces is None:
        return lines or [Text.assemble(heading, "you asked for it.")]
    return [*lines, layer_choice(found.traces, layer, "explained" if lines else asked)]


def layer_choice(trace: Trace | TraceSet, chosen: int, asked: str = "trace") -> Text:
    """Say why the layer `chosen` is edited, and how far the trace can be trusted.

    `asked` is the origin of the choice: "trace", the user's own value, or "explained" where other lines say it.
    """
    best, site, why = trace.layer, trace.site, _recalled(trace)
    heading = f"Layer {chosen}: "
    if asked == "explained":
        heading = "The trace: "
        if site is not None:
            why += "; tracing agrees" if site == chosen else f"; tracing alone would have chosen {site}"
    elif asked == "trace" and site is None:
        heading = "The trace: "
    else:
        if chosen != best and site is not None:
            why = f"tracing would have chosen {best}: {why}"
        if asked != "trace":
            agrees = chosen == best and site is not None
            if "-" in asked:  # a range, in which the trace decides
                why = f"the site among layers {asked}{': ' if agrees else '; '}{why}"
            else:
                why = f"you asked for it{', and tracing agrees: ' if agrees else '; '}{why}"
    notes = (f"\n{remark}" for remark in _remarks(trace, asked != "explained"))
    warnings = ((f"\n{warning}", "yellow") for warning in _unknown_answers(trace))
    return Text.assemble((heading, "bold"), f"{why}.", *notes, *warnings)


# A trace in words ----------------------------------------------------------------------------------


def _recalled(trace: Trace | TraceSet) -> str:
    """Say at which token of the subject, and at which layers, most of the answer comes back; and how much at its last.

    The prompt's last token is named where an output restored there brings back more.
    """
    traces = averaged_traces(trace)
    first, peak, single = traces[0], subject_peak(trace), len(traces) == 1
    destroyer = "another subject" if first.noise is None else first.corruption
    unit = "" if first.metric == "probability" else f" {UNITS[first.metric]}"
    back, total = number(peak.effect), number(trace.total)
    destroyed = f"of the {total}{unit} that {destroyer} takes from the answer"
    share = f"{back} {destroyed}"
    if trace.total <= 0:
        share = f"{back}, though {destroyer} takes nothing from the answer ({total}{unit})"
    elif peak.effect >= trace.total:
        share = f"all {destroyed}" + ("" if back == total else f" and more, {back}")
    last = f"the subject's last token{f' ({quoted(first.tokens[first.subject_last])})' if single else ''}"
    if peak.last:
        token = last
    elif single:
        token = quoted(peak.token)
    else:
        token = f"the subject's {'first token' if peak.token == ROLES[0] else 'middle tokens'}"
    average = "" if single else f", on average over {len(traces)} facts"
    words = f"recalled most at {token}, {_outputs(first, peak.layer)}: {share}{average}"
    if first.sever is not None:
        words = f"with the {PARTS[first.sever]} layers severed, {words}"
    at_last = trace.at_subject
    if not (peak.last or np.isnan(at_last).all()):
        words += f"; at {last}, {_most(first, at_last)}"
    if first.window > 1 and (peak.last or trace.site is not None):
        words += f"; of these, layer {trace.layer} alone brings back most, {number(float(trace.alone[trace.layer]))}"
    end = np.asarray(np.mean([each.effects[:, -1] for each in traces], axis=0))
    # The last state at the prompt's last token brings back everything, in any model.
    if first.kind != "state" and not np.isnan(end).all() and np.nanmax(end) > peak.effect:
        words += f"; at the prompt's last token, {_most(first, end)}"
    return words


def _remarks(trace: Trace | TraceSet, decides: bool) -> Iterator[str]:
    """Yield how little a trace shows, where that is so; if it `decides` the layer to edit, with what to do."""
    averaged, peak = averaged_traces(trace), subject_peak(trace)
    depth = len(averaged[0].effects)
    at_end = all(each.subject_last == len(each.tokens) - 1 for each in averaged)
    others = f"--layers N, N from 0 to {depth - (1 if at_end else 2)}"
    if trace.total < WEAK_TOTAL:
        corruption = "Another subject" if averaged[0].noise is None else "The noise"
        named = f"; name a layer yourself ({others})" if decides else ""
        yield (
            f"{corruption} hardly changes the answer (total effect {number(trace.total)}), "
            f"so the trace says little about where it is recalled{named}."
        )
    elif peak.effect < CLEAR * trace.total and all(each.known and _whole_subject(each) for each in averaged):
        every = not any(np.isnan(each.at_subject).any() for each in averaged)
        compare = f"; compare other layers ({others})" if decides else ""
        yield f"No token of the subject brings back a tenth of that at any layer{'' if every else ' traced'}{compare}."


def _unknown_answers(trace: Trace | TraceSet) -> Iterator[str]:
    """Yield warnings of answers that the model does not give by itself."""
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


def _whole_subject(trace: Trace) -> bool:
    return not np.isnan(trace.effects[:, slice(*trace.subject)]).all(0).any()


def _outputs(first: Trace, layer: int) -> str:
    if first.kind == "state":
        return f"hidden state after layer {layer}"
    layers = _layers(first, layer)
    return f"{PARTS[first.kind]} {'outputs' if '–' in layers else 'output'} of {layers}"


def _layers(first: Trace, layer: int) -> str:
    layers = span_of(layer, first.window, len(first.effects))
    return f"layers {layers[0]}–{layers[-1]}" if len(layers) > 1 else f"layer {layer}"


def _most(first: Trace, effects: LayerEffects) -> str:
    layer = int(np.nanargmax(effects))
    return f"{_layers(first, layer)}: {number(float(effects[layer]))}"


# Experts -------------------------------------------------------------------------------------------


def routing_table(facts: Sequence[Fact], found: Sequence[Mapping[int, Routes]], layer: int) -> Group | None:
    """Render each subject's experts in `layer`, or in the last mixture layer below it; None where there is none."""
    at = max((mixture for mixture in (found[0] if found else {}) if mixture <= layer), default=None)
    if at is None:
        return None
    table = plain_table(*folded("subject", f"experts of layer {at}"))
    count = len(found[0][at].weights)
    for fact, routes in zip(facts, found, strict=True):
        shares, weights = routes[at].shares, routes[at].mean_weights
        order = (shares * weights.abs()).argsort(descending=True)
        used = [e for e in order.tolist() if shares[e] > 0]
        experts = (f"{at}.{e} {float(weights[e]):.2f} in {round(float(shares[e]) * count)}" for e in used)
        table.add_row(Text(show(fact.subject)), Text(" · ".join(experts)))
    note = f"router's mean weight; in how many of {count} contexts the subject's last token goes there"
    return Group(table, Text(note, style="dim"))


# Layers compared -----------------------------------------------------------------------------------


def trial_edits(choice: LayerChoice) -> RenderableType:
    """Render the layers that were tried by edits, one row each, and say in words which one is chosen."""
    fields, choices = ["layer", *RATES, "score"], {"auto": choice.auto.layer, "edits": choice.layer}
    table = plain_table(*right(*fields), *left("choice of"))
    for row in choice.rows:
        marks = [name for name, layer in choices.items() if layer == row.layer]
        values = [getattr(row, name) for name in fields[1:]]
        cells = ["" if value is None else number(value) for value in values]
        table.add_row(str(row.layer), *cells, ", ".join(marks), style="bold" if marks else "")
    return Group(table, Text(""), _chosen(choice), *_unmeasured(choice.rows))


def _chosen(choice: LayerChoice) -> Text:
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


def _unmeasured(rows: Sequence[LayerScore]) -> Iterator[Text]:
    if missing := [name for name in RATES if all(getattr(row, name) is None for row in rows)]:
        score = "there is no score" if "efficacy" in missing else "the score is that of the others"
        yield Text(f"Not measured, since no fact has prompts for it: {' and '.join(missing)}; {score}.")

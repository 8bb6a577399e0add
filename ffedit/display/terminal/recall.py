"""Say where a trace shows that facts are recalled, and how far it can be trusted."""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np

from ffedit.display.picture import PARTS, UNITS, averaged_traces
from ffedit.facts.text import number, quoted
from ffedit.locator import CLEAR, Trace, TraceSet, span_of
from ffedit.locator.result import ROLES, LayerEffects, subject_peak

# Total effect below which a trace says little, in probability or in nats (0.05 nats: a twentieth of the probability).
WEAK_TOTAL = 0.05


def recalled(trace: Trace | TraceSet) -> str:
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


def remarks(trace: Trace | TraceSet, decides: bool) -> Iterator[str]:
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


def unknown_answers(trace: Trace | TraceSet) -> Iterator[str]:
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

"""Say which layer is edited and why, where a trace shows that facts are recalled, and how far it can be trusted."""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np
from rich.text import Text

from ffedit.display.picture import PARTS, UNITS, averaged_traces
from ffedit.facts.text import number, quoted
from ffedit.layer_choice.choose import ChosenLayer
from ffedit.locator import CLEAR, Trace, TraceSet, span_of
from ffedit.locator.result import subject_peak

# Total effect below which a trace says little, in probability or in nats (0.05 nats: a twentieth of the probability).
WEAK_TOTAL = 0.05


def reasons(choice: ChosenLayer, asked: str) -> list[Text]:
    """Return the reasons for this layer; `asked` is the value of `--layers`."""
    layer, auto, traces = choice.layer, choice.auto, choice.traces
    if traces is not None and choice.by == "trace" and layer == traces.layer:
        return [recalled(traces)]
    words = {
        "only": "the only one whose output reaches the answer",
        "request": "you asked for it",
        "trace": f"the site among layers {asked}",
    }
    nearest = "" if layer == auto.layer else f"the allowed layer nearest to {auto.layer}, "
    why = words.get(choice.by, f"{nearest}{auto.why}; `ffedit choose-layer` tries others")
    lines = [Text.assemble((f"Layer {layer}: ", "bold"), f"{why}.")]
    if choice.by == auto.by and asked != "auto":
        lines.insert(0, Text("The trace shows no site at the subject's last token, so it chooses no layer."))
    return lines if traces is None else [*lines, recalled(traces, layer)]


def recalled(trace: Trace | TraceSet, edited: int | None = None) -> Text:
    """Say at which token of the subject and which layers most of the answer comes back, and reasons to doubt it.

    With `edited`, a layer that was not chosen by tracing, say whether tracing agrees.
    """
    traces, peak = averaged_traces(trace), subject_peak(trace)
    first, single = traces[0], len(traces) == 1
    token = quoted(peak.token) if single else f"the {peak.token} token"
    unit = "" if first.metric == "probability" else f" {UNITS[first.metric]}"
    words = (
        f"recalled most at {token}, {_outputs(first, peak.layer)}: {number(peak.effect)} of {number(trace.total)}{unit}"
    )
    words += "" if single else f" on average over {len(traces)} facts"
    if not (peak.last or np.isnan(trace.at_subject).all()):
        best = int(np.nanargmax(trace.at_subject))
        words += f"; at the subject's last token, {_layers(first, best)}: {number(float(trace.at_subject[best]))}"
    elif first.window > 1 and peak.last and np.isfinite(trace.alone).sum() > 1:
        words += f"; of these, layer {trace.layer} alone brings back most, {number(float(trace.alone[trace.layer]))}"
    heading = "The trace: " if edited is not None or trace.site is None else f"Layer {trace.layer}: "
    if edited is not None and trace.site is not None:
        words += "; tracing agrees" if trace.site == edited else f"; tracing would have chosen {trace.site}"
    warnings = ((f"\n{warning}", "yellow") for warning in _unknown_answers(trace))
    return Text.assemble((heading, "bold"), f"{words}.", *(f"\n{remark}" for remark in _remarks(trace)), *warnings)


def _remarks(trace: Trace | TraceSet) -> Iterator[str]:
    """Yield a remark if a trace shows little."""
    traces = averaged_traces(trace)
    if trace.total < WEAK_TOTAL:
        corruption = "Another subject" if traces[0].noise is None else "The noise"
        yield (
            f"{corruption} hardly changes the answer (total effect {number(trace.total)}), "
            "so the trace says little about where it is recalled."
        )
    elif subject_peak(trace).effect < CLEAR * trace.total and all(
        single.known and _whole_subject(single) for single in traces
    ):
        all_layers = not any(np.isnan(single.at_subject).any() for single in traces)
        yield f"No token of the subject brings back a tenth of that at any layer{'' if all_layers else ' traced'}."


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
    return f"{PARTS[first.kind]} output{'s' if first.window > 1 else ''} of {_layers(first, layer)}"


def _layers(first: Trace, layer: int) -> str:
    layers = span_of(layer, first.window, len(first.effects))
    return f"layers {layers[0]}–{layers[-1]}" if len(layers) > 1 else f"layer {layer}"

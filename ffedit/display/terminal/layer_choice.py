"""Show which layer is edited and why, in words, and the layers that were compared as a table."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from rich.console import Group, RenderableType
from rich.text import Text

from ffedit.display.terminal.recall import recalled, remarks, unknown_answers
from ffedit.display.terminal.tables import left, plain_table, right
from ffedit.facts.text import counted, number
from ffedit.layer_choice.calibrate import RATES, TIE, LayerChoice, LayerScore, tied
from ffedit.layer_choice.choose import Found
from ffedit.locator import Trace, TraceSet


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
    best, site, why = trace.layer, trace.site, recalled(trace)
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
    notes = (f"\n{remark}" for remark in remarks(trace, asked != "explained"))
    warnings = ((f"\n{warning}", "yellow") for warning in unknown_answers(trace))
    return Text.assemble((heading, "bold"), f"{why}.", *notes, *warnings)


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

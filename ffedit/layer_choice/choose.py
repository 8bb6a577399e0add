"""Take the layer to edit that `--layers` asks for.

`auto` takes the layer published for the model, or else a quarter of its depth (`published`): no measurement that is
cheap enough to run by default has shown which layer is better. `trace` takes the layer of the facts' own trace, where
it shows a site at the token where the key is read (`locator.site_of`). Among named layers the trace decides. Where it
shows no site, the layer nearest to that of `auto` is taken.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any, Literal

from ffedit.editor.checks import in_reach
from ffedit.editor.config import EditConfig
from ffedit.editor.methods import check_method
from ffedit.errors import EditError
from ffedit.facts.fact import Fact
from ffedit.layer_choice.published import AutoLayer, auto_layer
from ffedit.locator import TraceSet, locate_all, site_of
from ffedit.locator.result import Tokens
from ffedit.model.editable import Editable
from ffedit.progress import Progress, silent

# Tokens, and number of corrupted runs, of a trace that is only shown.
SHOWN_TOKENS: Tokens = "subject_and_last"
SHOWN_SAMPLES = 2


@dataclass(frozen=True)
class ChosenLayer:
    """Layer to edit, and the reason for it."""

    # traces of feed-forward outputs: of all facts if they decide; else of the first, if it is to be shown; else None
    traces: TraceSet | None
    layer: int
    # reason: the layer "published" for the model or the "usual" one (`auto`), the facts' "trace", the user's
    # "request", or the "only" layer whose output reaches the answer
    by: Literal["published", "usual", "trace", "request", "only"]
    auto: AutoLayer

    def to_dict(self) -> dict[str, Any]:
        """Return plain JSON: the layer, and what decided."""
        return {"layer": self.layer, "by": self.by}


def find_layer(
    editable: Editable,
    facts: Sequence[Fact],
    asked: str,
    allowed: range,
    method: str = "memit",
    config: EditConfig | None = None,
    progress: Progress = silent,
    show_trace: bool = True,
) -> ChosenLayer:
    """Find the layer to edit among those `allowed` whose output reaches the answer.

    `asked` is "auto" or "trace"; anything else traces, too. With `show_trace`, the first fact is traced also where no
    trace decides.
    """
    config = config or EditConfig()
    if (choice := known_layer(editable, facts, asked, allowed, method, config)) is not None:
        return replace(choice, traces=shown(editable, facts, config.seed, progress)) if show_trace else choice
    auto = auto_layer(editable, method)
    allowed = in_reach(editable, facts, check_method(method), allowed, config.key.fact_token)
    traces = locate_all(editable, facts, seed=config.seed, progress=progress)
    if (site := site_of(traces, allowed=allowed)) is not None:
        return ChosenLayer(traces, site, "trace", auto)
    return ChosenLayer(traces, min(allowed, key=lambda layer: abs(layer - auto.layer)), auto.by, auto)


def known_layer(
    editable: Editable, facts: Sequence[Fact], asked: str, allowed: range, method: str, config: EditConfig
) -> ChosenLayer | None:
    """Return the choice that `find_layer` makes without running the model; None if it needs a trace."""
    auto = auto_layer(editable, method)
    allowed = in_reach(editable, facts, check_method(method), allowed, config.key.fact_token)
    if len(allowed) == 1:
        return ChosenLayer(None, allowed[0], "only" if asked in ("auto", "trace") else "request", auto)
    return ChosenLayer(None, auto.layer, auto.by, auto) if asked == "auto" else None


def shown(editable: Editable, facts: Sequence[Fact], seed: int = 0, progress: Progress = silent) -> TraceSet:
    """Trace the first fact for display only, at its subject and at the prompt's end, in few runs."""
    return locate_all(editable, facts[:1], seed=seed, progress=progress, tokens=SHOWN_TOKENS, samples=SHOWN_SAMPLES)


def spread_below(layer: int, count: int) -> range:
    """Return the `count` consecutive layers that share an edit, the highest of which is `layer`."""
    if count > layer + 1:
        raise EditError(
            f"--spread {count} was asked for, but layer {layer} has only {layer} below it; use a smaller one"
        )
    return range(layer + 1 - count, layer + 1)

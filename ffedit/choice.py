"""Which layer should be edited? The one that tracing finds, unless the user names one."""

from __future__ import annotations

from collections.abc import Sequence

from ffedit.anatomy import Editable
from ffedit.errors import EditError, FactError
from ffedit.facts import Fact
from ffedit.locator import TraceSet, locate
from ffedit.progress import Progress, silent


def by_trace(editable: Editable, facts: Sequence[Fact], seed: int = 0, progress: Progress = silent) -> TraceSet:
    """Trace the feed-forward outputs of all `facts`; the `layer` of the result is the one to edit.

    Raises:
        FactError: nothing to trace.
    """
    if not facts:
        raise FactError("no facts to trace; give at least one")
    return locate(editable, list(facts), "feed_forward", seed=seed, progress=progress)


def check_layer(editable: Editable, layer: int) -> int:
    """`layer` itself, if the model has it.

    Raises:
        EditError: out of range.
    """
    depth = len(editable.layers)
    if not 0 <= layer < depth:
        raise EditError(f"layer {layer} was asked for, but {editable.name} has layers 0 to {depth - 1}")
    return layer

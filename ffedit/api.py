"""The verbs of the Python API that join several parts."""

from __future__ import annotations

from collections.abc import Sequence

from ffedit.anatomy import Editable
from ffedit.choice import by_trace, check_layer
from ffedit.editor import METHODS, Corpus, Edit, EditConfig
from ffedit.errors import EditError
from ffedit.facts import Fact
from ffedit.progress import Progress, silent


def edit(
    editable: Editable,
    facts: Sequence[Fact],
    method: str = "rome",
    layers: Sequence[int] | None = None,
    config: EditConfig | None = None,
    corpus: Corpus | None = None,
    progress: Progress = silent,
) -> Edit:
    """Compute an edit that writes `facts`; nothing in the model changes until it is applied.

    Args:
        editable: the model.
        facts: what to write.
        method: "rome".
        layers: where; None traces the facts and takes the layer that recalls them most at the subject.
        config: all numbers of the optimisation, the seed among them.
        corpus: text for the second moment of the keys; by default the model samples it.
        progress: told how far it is.

    Raises:
        FactError: a fact cannot be used with this model.
        EditError: an unknown method, a layer that is not there, or statistics that cannot be collected.
    """
    config = config or EditConfig()
    if method not in METHODS:
        raise EditError(f"method {method!r} is not known; there is {', '.join(METHODS)}")
    if not facts:
        raise EditError("no facts to write; give at least one")
    if layers is None:
        layers = [by_trace(editable, facts, config.seed, progress).layer]
    if len(layers) != 1:
        raise EditError(f"{method} writes to one layer, found {list(layers)}; name one")
    return METHODS[method](editable, facts, check_layer(editable, layers[0]), config, corpus, progress)

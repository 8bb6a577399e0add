"""The verbs of the Python API that join several parts."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from ffedit.anatomy import Editable
from ffedit.choice import layer_for
from ffedit.conflicts import check_facts
from ffedit.editor import Corpus, Edit, EditConfig, check_method, collect, write
from ffedit.errors import EditError
from ffedit.facts import Fact
from ffedit.memory import Address
from ffedit.moments import KeyMoments
from ffedit.progress import Progress, silent


def edit(
    editable: Editable,
    facts: Fact | Sequence[Fact],
    method: str = "memit",
    layers: Sequence[int] | None = None,
    config: EditConfig | None = None,
    stats: Corpus | Mapping[Address, KeyMoments] | None = None,
    after: Sequence[Edit] = (),
    progress: Progress | None = None,
) -> Edit:
    """Compute an edit that writes `facts`; nothing in the model changes until it is applied.

    Args:
        editable: the model as it is, with earlier edits where there are some.
        facts: what to write, one or several; those of one subject are solved jointly.
        method: "rome", "emmet", "memit", "alphaedit", "ft" or "ft-l" (`ffedit methods` says which to choose).
        layers: where; None takes the model's layer (`ffedit.choose_layer`: chosen on first use, and kept), or, where it
            knows too few of the calibration facts, the one that recalls `facts` most at the subject's last token.
        config: all numbers of the optimisation, the seed among them.
        stats: second moments of the keys (`ffedit.stats`), or the text to collect them on; by default the one that
            ships, or, where the model does not speak it, what it samples.
        after: earlier edits, in the model already, that are to be kept, oldest first.
        progress: told how far it is.

    Raises:
        FactError: a fact cannot be used with this model.
        EditError: an unknown method, facts that contradict each other, a layer that is not there, earlier edits that
            are not in the model, statistics that do not fit or cannot be collected, or no solution.
    """
    config, progress = config or EditConfig(), progress or silent
    check_method(method)
    facts = [facts] if isinstance(facts, Fact) else facts
    check_facts(facts)
    if layers is None:
        layers = [layer_for(editable, facts, method, config, progress)]
    return write(editable, facts, method, layers, config, stats, after, progress)


def stats(
    editable: Editable,
    layers: Sequence[int] | None = None,
    corpus: Corpus | None = None,
    tolerance: float | None = None,
    progress: Progress = silent,
) -> dict[Address, KeyMoments]:
    """Collect the second moment of the keys of several layers in one pass over a text.

    Args:
        editable: the model.
        layers: which; None for all.
        corpus: the text; by default the one that ships, or, where the model does not speak it, what it samples.
        tolerance: stop early when the solved updates of two halves of the text differ by no more than this share in
            every layer.
        progress: told how far it is.

    Returns:
        By address, the moments; `ffedit.save_stats` writes them as a folder.

    Raises:
        EditError: a layer that is not there, or a text that cannot be used.
    """
    depth = len(editable.layers)
    wanted = range(depth) if layers is None else layers
    if not wanted or not set(wanted) <= set(range(depth)):
        raise EditError(f"layers {list(wanted)} were asked for, but {editable.name} has layers 0 to {depth - 1}")
    memories = [memory for address, memory in sorted(editable.memories.items()) if address.layer in wanted]
    return collect(editable, memories, corpus, progress, tolerance)

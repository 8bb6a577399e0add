"""What earlier edits were worded in, so that later edits leave it alone too.

An edit gives v* to the mean key of its subject. That the subject's own texts say the new fact hangs on more: on the
same change in all of them, and on none beside the subject (`algebra.steadied`). A later edit that keeps the key alone
moves the rest. These texts, and the namesakes, are sampled with a seed, so they need not be kept with an edit: they are
worded again, as they were, and a sequence is what one batch of all its facts would be, but for a namesake of an earlier
subject that is edited later.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from ffedit.algebra import counted_in
from ffedit.anatomy import Editable
from ffedit.blocks import Moment, blocks_of, diagonal
from ffedit.editor.config import EditConfig
from ffedit.editor.edit import Edit
from ffedit.editor.keys import nothing, read, read_namesakes
from ffedit.editor.wording import Wording, word
from ffedit.errors import FactError
from ffedit.facts import Fact, by_subject
from ffedit.feed_forward import FeedForward
from ffedit.fingerprint import fingerprint
from ffedit.progress import Progress, silent


@dataclass(frozen=True, eq=False)
class _Sum:
    """What `surroundings` found last in a layer, for a sequence that asks for the same edits and one more.

    Attributes:
        edits: their fingerprints.
        where: what it depends on, besides.
        texts: `weight` times the second moment of their subjects' own texts, on the CPU.
        namesakes: the same of these subjects' namesakes, on the CPU.
    """

    edits: tuple[str, ...]
    where: tuple[object, ...]
    texts: Moment
    namesakes: Moment


def surroundings(
    editable: Editable,
    place: FeedForward,
    edits: Sequence[Edit],
    weight: float,
    share: float = 1.0,
    progress: Progress = silent,
) -> Moment | None:
    """`weight` times the second moment of the texts of all subjects of `edits` that have a key in a layer.

    Their namesakes are counted with them.

    Args:
        editable: the model, without the edits where that is possible (`job.Job.unburdened`).
        place: the layer.
        edits: earlier edits. Of what was fine-tuned there is no key, and what was written in a chat is left alone in
            chats.
        weight: as in `algebra.steadied`.
        share: how much namesakes count against the texts themselves (`keys.namesakes_share`).
        progress: told how many edits were read.

    Returns:
        [Σ d_ff, Σ d_ff], float64, where the layer's equations are solved; None where there is nothing to count.
    """
    asked = [edit for edit in edits if weight and edit.in_chat == editable.chat]
    here = [(edit, subjects) for edit in asked if (subjects := _subjects(edit, place.layer))]
    if not here:
        return None
    prints = tuple(edit.fingerprint() for edit, _ in here)
    where = fingerprint(editable, place.layer), editable.chat, weight, *(part.address for part in place.parts)
    last = editable.sums.get(place.layer)
    if isinstance(last, _Sum) and last.where == where and last.edits == prints[: len(last.edits)]:
        done, texts, others = len(last.edits), last.texts.to(place.bench), last.namesakes.to(place.bench)
    else:
        done, texts, others = 0, nothing(place), nothing(place)
    for number, (edit, subjects) in enumerate(here[done:], done + 1):
        worded = _worded(editable, edit)
        names = {name for wording in worded.values() for name in wording.names}
        for subject, wording in worded.items():
            if subject in subjects:
                texts = read(editable, place, wording).steadied(texts, weight)
                others = counted_in(others, [read_namesakes(editable, place, wording, names)], weight)
        progress("reading earlier edits", number, len(here))
    cpu = torch.device("cpu")
    editable.sums[place.layer] = _Sum(prints, where, texts.to(cpu), others.to(cpu))
    pairs = zip(blocks_of(texts), blocks_of(others), strict=True)
    return diagonal([own.add(other, alpha=share) for own, other in pairs])


def _subjects(edit: Edit, layer: int) -> set[str]:
    """Whose keys an edit stored in a layer."""
    return {subject for at in edit.keys if at.layer == layer for subject in edit.subjects(at)}


def _worded(editable: Editable, edit: Edit) -> dict[str, Wording]:
    try:
        return wordings(editable, [edit])
    except FactError:  # it fits no more, into a longer chat template, say; its key is kept nonetheless
        return {}


def add_(total: Moment, other: Moment | None) -> Moment:
    """Add a second moment of the same memories to another, in place; None adds nothing."""
    for one, more in zip(blocks_of(total), blocks_of(other), strict=True) if other is not None else ():
        one.add_(more.to(one))
    return total


def wordings(editable: Editable, edits: Sequence[Edit]) -> dict[str, Wording]:
    """The texts that the value of each subject was chosen in."""
    alike: dict[EditConfig, dict[str, Sequence[Fact]]] = {}
    for edit in edits:
        groups = {group[0].subject: group for group in by_subject(edit.facts)}
        for solved, numbers in solutions(edit):
            subject = solved["subject"]
            alike.setdefault(EditConfig.from_dict(numbers), {})[subject] = groups[subject]
    found: dict[str, Wording] = {}
    for config, some in alike.items():
        found.update(zip(some, word(editable, list(some.values()), config), strict=True))
    return found


def solutions(edit: Edit) -> Iterator[tuple[dict[str, Any], Mapping[str, Any]]]:
    """How each value of `edit` was found, `from` which edit it is, and the numbers of that one."""
    for part in edit.provenance.get("parts", [edit.provenance]):  # of a sum
        name, configs = part.get("fingerprint", edit.fingerprint()), part.get("configs", {})
        for solved in part.get("solved", ()):
            if "subject" not in solved:  # fine-tuned
                continue
            origin = solved.get("from", name)
            yield {**solved, "from": origin}, configs.get(origin, part.get("config", {}))

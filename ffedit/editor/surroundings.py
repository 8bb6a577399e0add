"""What earlier edits were worded in, so that later edits leave it alone too.

An edit gives v* to the mean key of its subject. That the subject's own texts say the new fact hangs on more: on the
same change in all of them, and on none beside the subject (`algebra.steadied`). A later edit that keeps the key alone
moves the rest: after 140 of them on Atlas, a quarter of the facts were gone. These texts are sampled with a seed, so
they need not be kept with an edit: they are worded again, as they were.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any
from weakref import WeakKeyDictionary

import torch

from ffedit.anatomy import Editable
from ffedit.blocks import Moment, blocks_of, diagonal
from ffedit.editor.config import EditConfig
from ffedit.editor.edit import Edit
from ffedit.editor.keys import read
from ffedit.editor.wording import Wording, word
from ffedit.facts import Fact, by_subject
from ffedit.feed_forward import FeedForward
from ffedit.memory import Address
from ffedit.progress import Progress, silent


@dataclass(frozen=True, eq=False)
class _Sum:
    """The second moment of the texts of some edits, [Σ d_ff, Σ d_ff], for a sequence that goes on."""

    edits: tuple[str, ...]
    memories: tuple[Address, ...]
    weight: float
    moment: Moment


# A sequence asks again and again for the same edits and one more.
_LAST: WeakKeyDictionary[Editable, dict[int, _Sum]] = WeakKeyDictionary()


def surroundings(
    editable: Editable, place: FeedForward, edits: Sequence[Edit], weight: float, progress: Progress = silent
) -> Moment:
    """`weight` times the second moment of the texts of all subjects of `edits` that have a key in a layer.

    Args:
        editable: the model, without the edits where that is possible (`job.Job.unburdened`).
        place: the layer.
        edits: earlier edits; what was fine-tuned has no key.
        weight: as in `algebra.steadied`.
        progress: told how many edits were read.

    Returns:
        [Σ d_ff, Σ d_ff], float64, where the layer's equations are solved.
    """
    memories = tuple(part.address for part in place.parts)
    here = [edit for edit in edits if weight and any(edit.subjects(at) for at in memories)]
    names = tuple(edit.fingerprint() for edit in here)
    last = _LAST.setdefault(editable, {}).get(place.layer)
    if last and (last.memories, last.weight, last.edits) == (memories, weight, names[: len(last.edits)]):
        done, total = len(last.edits), last.moment
    else:
        done, total = 0, diagonal([torch.zeros(n, n, dtype=torch.float64, device=place.bench) for n in place.sizes])
    for number, edit in enumerate(here[done:], done + 1):
        for wording in wordings(editable, [edit]).values():
            total = read(editable, place, wording).steadied(total, weight)
        progress("reading earlier edits", number, len(here))
    if here:
        _LAST[editable][place.layer] = _Sum(names, memories, weight, total)
    return total


def added(a: Moment, b: Moment) -> Moment:
    """The sum of two second moments of the same memories."""
    return diagonal([one + other.to(one) for one, other in zip(blocks_of(a), blocks_of(b), strict=True)])


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
        for solved in part["solved"]:
            origin = solved.get("from", name)
            yield {**solved, "from": origin}, configs.get(origin, part.get("config", {}))

"""What addresses a fact: the memory coefficients at the subject's last token.

k* is their mean over the texts that state the fact (ROME, arXiv 2202.05262, eq. 3): the same vector in every place of
the algebra. Beside it stand the keys of all other tokens of these texts, and those of other names in the subject's
place, which a change is to leave alone.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence
from dataclasses import dataclass
from functools import partial

import torch
from torch import Tensor

from ffedit import algebra, replay
from ffedit.anatomy import Editable
from ffedit.blocks import Moment, diagonal
from ffedit.editor.wording import Wording
from ffedit.errors import EditError
from ffedit.feed_forward import FeedForward
from ffedit.hooks import captured
from ffedit.linalg import double
from ffedit.room import halving
from ffedit.tokens import Encoded, pad

NO_ROOM = "not enough memory to read the key of a single text; use a smaller dtype, or another --device"


@dataclass(frozen=True, eq=False)
class Reading:
    """What one layer shows while the texts of a wording run through the model as it is.

    Attributes:
        k: k*, [d_ff], float64.
        stream: mean over the same texts of the residual stream behind the layer at the subject's last token,
            [d_model], float64.
        same: keys at the subject's last token in all texts, [texts, d_ff].
        beside: keys of all their other tokens, [tokens, d_ff].
    """

    k: Tensor
    stream: Tensor
    same: Tensor
    beside: Tensor

    def steadied(self, C: Moment, weight: float, namesakes: Tensor | None = None, share: float = 1.0, beside: bool = False) -> Moment:
        """C with the keys of these texts counted in, and `share` as much those of namesakes, [d_ff, d_ff]."""
        others = () if namesakes is None else (namesakes * share**0.5,)
        others += (self.beside,) if beside else ()
        return algebra.steadied(C, self.k, self.same, others, weight) if weight else C


def read(editable: Editable, place: FeedForward, wording: Wording) -> Reading:
    """Run the texts of `wording` up to a layer, in parts where memory fails; keys are those of its memories joined.

    Raises:
        EditError: there is no memory for a single text.
    """
    texts = wording.texts
    parts = zip(*halving(partial(_run, editable, place), texts, EditError(NO_ROOM)), strict=True)
    same, stream, beside = (torch.cat(part) for part in parts)
    stated = torch.tensor([bool(e.target_ids) for e in texts])
    return Reading(k=double(same[stated]).mean(0), stream=double(stream[stated]).mean(0), same=same, beside=beside)


def namesakes_share(weight: float, keys: int) -> float:
    """How much a subject's namesakes count against its own texts, which count `weight` against all ordinary text.

    As much, but those of all subjects together no more than ordinary text: a layer that stores hundreds of keys has no
    room to tell each from so many others.

    Args:
        weight: as in `algebra.steadied`.
        keys: how many the layer stores, those of earlier edits included.
    """
    return min(1.0, 1.0 / (weight * keys)) if weight else 0.0


def nothing(place: FeedForward) -> Moment:
    """The second moment of no key, [Σ d_ff, Σ d_ff], float64, where the layer's equations are solved."""
    return diagonal([torch.zeros(size, size, dtype=torch.float64, device=place.bench) for size in place.sizes])


def read_namesakes(
    editable: Editable, place: FeedForward, wording: Wording, names: Collection[tuple[int, ...]] = ()
) -> Tensor:
    """The keys of a subject's namesakes, each at its last token, [namesakes, Σ d_ff].

    Args:
        editable: the model.
        place: the layer.
        wording: of the subject.
        names: token ids of names that are no namesakes: they are edited, too.

    Raises:
        EditError: there is no memory for a single text.
    """

    def run(some: Sequence[Encoded]) -> Tensor:
        ids = pad([e.ids for e in some])
        with place.keys() as entering:
            replay.run_to(editable, ids, place.layer)
        return entering().reshape(*ids.shape, -1)[_at_subject(some)]

    others = [e for e in wording.namesakes if e.subject is None or e.ids[slice(*e.subject)] not in names]
    return torch.cat(list(halving(run, others, EditError(NO_ROOM)))) if others else torch.empty(0, sum(place.sizes))


def _run(editable: Editable, place: FeedForward, texts: Sequence[Encoded]) -> tuple[Tensor, Tensor, Tensor]:
    """Of `texts`: keys and residual stream at each subject's last token, and the keys of all other tokens."""
    ids = pad([e.ids for e in texts])
    with place.keys() as entering, captured({0: editable.layers[place.layer]}) as leaving:
        replay.run_to(editable, ids, place.layer)
    keys, stream = (found.reshape(*ids.shape, -1) for found in (entering(), leaving[0]))
    at = _at_subject(texts)
    beside = torch.arange(ids.shape[1]) < torch.tensor([len(e.ids) for e in texts])[:, None]
    beside[at] = False
    return keys[at], stream[at], keys[beside]


def _at_subject(texts: Sequence[Encoded]) -> tuple[Tensor, Tensor]:
    """Row and position of each subject's last token."""
    return torch.arange(len(texts)), torch.tensor([e.subject_last for e in texts])

"""The metric of an edit: what a change costs that ordinary text, other names and the facts' own contexts read.

    C' = C + w/n Σ k kᵀ over names + AᵀA        A: spread of the facts' keys over their contexts

Its inverse is what an edit needs. The first two terms are the model's, but for the few names that an edit leaves out;
where keys are long, they are factored once, the factor is kept in the cache, and each edit corrects it by the rows of
its own.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from ffedit.algebra.key_moments import KeyMoments
from ffedit.algebra.linalg import Metric, Moment, Updated, blocks_of, diagonal, factor_
from ffedit.algebra.updates import moment
from ffedit.editor.name_keys import NameMoment
from ffedit.files import cache
from ffedit.files.resuming import kept

# A factor is kept of memories with at least so many keys, where it takes seconds, and corrected by at most this share
# of them.
LONG, FEW = 4096, 1 / 8


def metric(moments: Sequence[KeyMoments], spread: Tensor, names: NameMoment | None = None) -> Metric:
    """Return C' of a layer, [Σ d_ff, Σ d_ff], float64, on the device of `spread`; where keys are long, `factored`.

    `moments` are C of each memory of the layer, `spread` is A [n, Σ d_ff].
    """
    return (factored if is_long(moments, spread, names) else as_matrix)(moments, spread, names)


def is_long(moments: Sequence[KeyMoments], spread: Tensor, names: NameMoment | None) -> bool:
    """Return True where a factor is kept: for a single memory of many keys, of which an edit corrects few."""
    size, corrected = len(moments[0].sum), len(spread) + (0 if names is None else len(names.which))
    return len(moments) == 1 and size >= LONG and corrected <= FEW * size


def factored(moments: Sequence[KeyMoments], spread: Tensor, names: NameMoment | None) -> Updated:
    """Return C' of a single memory as the factor of C and all names, and the rows by which an edit corrects it."""
    left_out = spread[:0] if names is None else names.rows.to(spread)
    signs = torch.tensor([1.0] * len(spread) + [-1.0] * len(left_out)).to(spread)
    return Updated(_factor(moments[0], names, spread.device), torch.cat([spread, left_out]), signs)


def as_matrix(moments: Sequence[KeyMoments], spread: Tensor, names: NameMoment | None = None) -> Moment:
    """Return C' as a matrix, or one for each memory."""
    blocks = [of_text.C.to(spread.device) for of_text in moments]
    for more in (moment(spread, [len(block) for block in blocks]), *([] if names is None else [names.moment])):
        for block, part in zip(blocks, blocks_of(more), strict=True):
            block.add_(part)  # C is a new tensor each time
    return diagonal(blocks)


def _factor(moments: KeyMoments, names: NameMoment | None, device: torch.device) -> Tensor:
    """Return the Cholesky factor of C and all names, kept with the moments, and in the cache by the numbers of C."""
    about = (None, 0.0) if names is None else (names.known.mark, names.weight)

    def make() -> dict[str, Tensor]:
        C = moments.C.to(device)
        if names is not None:
            names.add_all_to_(C)
        return {"lower": factor_(C)}

    if about not in moments.factors:
        moments.factors.clear()  # each is as large as C
        path = cache.entry("factors", f"{moments.numbers} {moments.count} {moments.ridge} {about}")
        moments.factors[about] = kept(path, make)["lower"]
    return moments.factors[about].to(device)

"""Metric of an edit: what a change costs ordinary text, other names and the facts' own contexts.

    C' = C + w/n Σ k kᵀ over names + AᵀA        A: spread of the facts' keys over their contexts

An edit needs its inverse. The first two terms depend on the model alone, but for the few names that an edit leaves out.
So where d_ff is large, they are factored once, the factor is kept in the cache, and each edit corrects it by a few rows
of its own.
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

# A factor is kept where d_ff is at least LONG, since it takes seconds, and an edit may correct it by at most FEW · d_ff
# rows.
LONG, FEW = 4096, 1 / 8


def metric(moments: Sequence[KeyMoments], spread: Tensor, names: NameMoment | None = None) -> Metric:
    """Return C' of a layer, [Σ d_ff, Σ d_ff], float64, on the device of `spread`; where d_ff is large, `factored`.

    `moments` are C of each memory of the layer, `spread` is A [n, Σ d_ff].
    """
    return (factored if is_long(moments, spread, names) else as_matrix)(moments, spread, names)


def is_long(moments: Sequence[KeyMoments], spread: Tensor, names: NameMoment | None) -> bool:
    """Return True where a factor is kept: for a single memory of large d_ff that an edit corrects by few rows."""
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
    for addend in (moment(spread, [len(block) for block in blocks]), *([] if names is None else [names.moment])):
        for block, change in zip(blocks, blocks_of(addend), strict=True):
            block.add_(change)  # C is a new tensor each time
    return diagonal(blocks)


def _factor(moments: KeyMoments, names: NameMoment | None, device: torch.device) -> Tensor:
    """Return the Cholesky factor of C with all names, kept in `moments` and, by the numbers of C, in the cache."""
    names_key = (None, 0.0) if names is None else (names.known.mark, names.weight)

    def make() -> dict[str, Tensor]:
        C = moments.C.to(device)
        if names is not None:
            names.add_all_to_(C)
        return {"lower": factor_(C)}

    if names_key not in moments.factors:
        moments.factors.clear()  # each is as large as C
        path = cache.entry("factors", f"{moments.numbers} {moments.count} {moments.ridge} {names_key}")
        moments.factors[names_key] = kept(path, make)["lower"]
    return moments.factors[names_key].to(device)

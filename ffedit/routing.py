"""Which experts does a token go to? What the router of each mixture chose at a subject's last token."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from functools import partial

import torch
from torch import Tensor

from ffedit import replay
from ffedit.anatomy import Editable
from ffedit.experts import Experts, Routed
from ffedit.tokens import Encoded, batches, pad

# Tokens in a batch.
TOKENS = 4096


@dataclass(frozen=True, eq=False)
class Routes:
    """What one layer's router gives each expert at the subject's last token of some texts.

    Attributes:
        weights: g, [texts, experts]; 0 where an expert was not chosen.
    """

    weights: Tensor

    @property
    def chosen(self) -> Tensor:
        """Which experts each text's token goes to, [texts, experts]."""
        return self.weights != 0

    @property
    def shares(self) -> Tensor:
        """In what share of the texts an expert is chosen, [experts]."""
        return self.chosen.double().mean(0)

    @property
    def mean_weights(self) -> Tensor:
        """An expert's mean weight in the texts that go to it, [experts]; 0 where none does."""
        return self.weights.double().sum(0) / self.chosen.sum(0).clamp(min=1)

    def covered(self, experts: Sequence[int]) -> float:
        """The share of the router's weight that goes to `experts`, mean over texts."""
        return float((self.weights[:, list(experts)].abs().sum(1) / self.weights.abs().sum(1)).mean())

    def some(self, rows: Tensor) -> Routes:
        """Of some of the texts."""
        return Routes(self.weights[rows])


def mixtures(editable: Editable) -> list[int]:
    """The layers that are mixtures of experts."""
    return [layer.layer for layer in editable.feed_forward if layer.mixture is not None]


@torch.no_grad()
def routes(editable: Editable, texts: Sequence[Encoded], layers: Sequence[int]) -> dict[int, Routes]:
    """Run `texts` and see where the routers of `layers`, all of them mixtures, send each subject's last token."""
    if not layers or not texts:
        return {}
    seen: dict[int, list[Tensor]] = {layer: [] for layer in layers}
    order: list[int] = []
    for rows in batches([len(e.ids) for e in texts], TOKENS):
        some = [texts[row] for row in rows]
        ids = pad([e.ids for e in some])
        at = torch.arange(len(some)) * ids.shape[1] + torch.tensor([e.subject_last for e in some])
        with ExitStack() as stack:
            for layer in layers:
                mixture = editable.feed_forward[layer].mixture
                assert mixture is not None
                note = partial(_note, mixture.experts, at, seen[layer])
                stack.enter_context(mixture.watched(routes=note))
            replay.run_to(editable, ids, max(layers))
        order += rows
    back = torch.tensor(order).argsort()
    return {layer: Routes(torch.cat(found)[back]) for layer, found in seen.items()}


def _note(experts: Experts, at: Tensor, seen: list[Tensor], found: Routed) -> None:
    """Add what the router gave each expert at tokens `at`, [texts, experts]."""
    seen.append(experts.weights(found.at(at)).float().cpu())

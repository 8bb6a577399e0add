"""Routing of the fact token of a text: the experts that the router of each mixture chose."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from functools import partial

import torch
from torch import Tensor

from ffedit.algebra.linalg import double
from ffedit.errors import ModelError
from ffedit.inference import replay
from ffedit.inference.batching import batches, split_on_oom
from ffedit.inference.contexts import NO_MEMORY
from ffedit.model.editable import Editable
from ffedit.model.experts import Experts, Routed
from ffedit.model.tokenization import Encoded, pad

TOKENS = 4096  # padded tokens in a batch


@dataclass(frozen=True, eq=False)
class Routes:
    """Weights that one layer's router gives each expert at the fact token of some texts."""

    weights: Tensor  # g, [texts, experts]; 0 where an expert was not chosen

    @property
    def chosen(self) -> Tensor:
        """Experts that each text's token goes to, [texts, experts]."""
        return self.weights != 0

    @property
    def shares(self) -> Tensor:
        """Share of the texts in which an expert is chosen, [experts]."""
        return double(self.chosen).mean(0)

    @property
    def mean_weights(self) -> Tensor:
        """Mean weight of an expert in the texts that go to it, [experts]; 0 where none does."""
        return double(self.weights).sum(0) / double(self.chosen).sum(0).clamp(min=1)

    def covered(self, experts: Sequence[int]) -> float:
        """Return the share of the router's weight that goes to `experts`, mean over texts."""
        return float((self.weights[:, list(experts)].abs().sum(1) / self.weights.abs().sum(1)).mean())


def mixtures(editable: Editable) -> list[int]:
    """Return the layers that are mixtures of experts."""
    return [layer.layer for layer in editable.feed_forward if layer.mixture is not None]


def routes(editable: Editable, texts: Sequence[Encoded], layers: Sequence[int]) -> dict[int, Routes]:
    """Run `texts` and record where the routers of `layers`, all of them mixtures, send each fact token.

    Raises ModelError where there is no memory for a single text.
    """
    if not layers or not texts:
        return {}
    order = list(batches([len(e.ids) for e in texts], TOKENS))
    read = partial(_read, editable, layers)
    parts = [part for rows in order for part in split_on_oom(read, [texts[row] for row in rows], ModelError(NO_MEMORY))]
    inverse = torch.tensor([row for rows in order for row in rows]).argsort()
    return {layer: Routes(torch.cat([part[layer] for part in parts])[inverse]) for layer in layers}


@torch.no_grad()
def _read(editable: Editable, layers: Sequence[int], texts: Sequence[Encoded]) -> dict[int, Tensor]:
    """Read the routers' weights at the fact tokens of the texts of one batch, [texts, experts], by layer."""
    ids, weights = pad([e.ids for e in texts]), dict[int, Tensor]()
    at = torch.arange(len(texts)) * ids.shape[1] + torch.tensor([e.site for e in texts])

    def note(layer: int, experts: Experts, routed: Routed) -> None:
        weights[layer] = experts.weights(routed.at(at)).float().cpu()

    with ExitStack() as stack:
        for layer in layers:
            mixture = editable.feed_forward[layer].mixture
            assert mixture is not None
            stack.enter_context(mixture.watched(routes=partial(note, layer, mixture.experts)))
        replay.run_to(editable, ids, max(layers))
    return weights

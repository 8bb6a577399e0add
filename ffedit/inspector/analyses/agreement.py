"""Agreement of keys and values: a value predicts the token that follows its key's top trigger.

Geva et al. 2021 (arXiv 2012.14913, section 4) read each value v_i as a distribution p_i over the vocabulary and compare
it with w_i, the token that follows the top trigger of the key k_i in the text:

- *agreement*: argmax p_i = w_i (figure 4), and the rank of w_i in p_i, 1 the best (figure 5);
- *max p_i*: a value's largest probability, and agreement as a function of it (figure 6, table 2).

Chance is measured on the same values and the same tokens, randomly permuted among the keys of the layer, so that it
has the frequencies of the text. The paper multiplies v_i by the embedding matrix; here it goes through the model's own
final norm first, as a state of the residual stream would (`Stack.read`), which changes max p_i.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from ffedit.inference.generation import log_softmax
from ffedit.inspector.analyses.distributions import MOST_LOGITS
from ffedit.inspector.corpus_pass.rows import NOTHING, RowStore
from ffedit.inspector.corpus_pass.triggers import Triggers
from ffedit.model.editable import Stack
from ffedit.progress import Progress, silent

SUREST = 100


@dataclass(frozen=True, eq=False)
class Values:
    """All values of one layer, read as distributions.

    Attributes:
        top: the most probable token of each, [d_ff].
        sure: its probability, [d_ff].
        keys: the keys that have a trigger, [n].
        next: the token that follows the top trigger of each of these, [n]; `NOTHING` in an encoder, where none does.
        rank: its rank in the value's distribution, [n]; meaningful only where a token follows.
        dealt: the token that follows the top trigger of another of these keys, drawn at random, [n].
        dealt_rank: its rank, [n].
    """

    top: Tensor
    sure: Tensor
    keys: Tensor
    next: Tensor
    rank: Tensor
    dealt: Tensor
    dealt_rank: Tensor

    @property
    def agrees(self) -> Tensor:
        """True where the top token of the value of `keys` is the one that follows, [n]."""
        return self.top[self.keys] == self.next

    @property
    def dealt_agrees(self) -> Tensor:
        """True where the top token of the value is the one of `dealt`, [n]."""
        return self.top[self.keys] == self.dealt


@torch.no_grad()
def read_values(
    stack: Stack, layer: int, triggers: Triggers, store: RowStore, seed: int = 0, progress: Progress = silent
) -> Values:
    """Read every value of a layer as a distribution, with the rank in it of the token after the key's top trigger."""
    memory = stack.feed_forward[layer]
    top = triggers.places[:, 0].cpu()
    there = (top != NOTHING).nonzero()[:, 0]
    keys, following = triggers.index[there], store.next(top[there])
    dealt = following[torch.randperm(len(keys), generator=torch.Generator().manual_seed(seed + layer))]
    asked = torch.zeros(memory.d_ff, 2, dtype=torch.int64)
    asked[keys] = torch.stack([following, dealt], 1).clamp(min=0)
    tops, sures, ranks = [], [], []
    values, size = memory.value.T, max(1, MOST_LOGITS // stack.vocabulary)
    for first in range(0, memory.d_ff, size):
        log_p = log_softmax(stack.read(values[first : first + size]))
        best = log_p.max(-1)
        tops.append(best.indices.cpu())
        sures.append(best.values.exp().cpu())
        own = asked[first : first + size].to(log_p.device)
        ranks.append(torch.stack([ranks_in(log_p, token) for token in own.unbind(1)], 1).cpu())
        progress("reading values", layer * memory.d_ff + first + len(log_p), len(stack.feed_forward) * memory.d_ff)
    rank, dealt_rank = torch.cat(ranks)[keys].unbind(1)
    return Values(torch.cat(tops), torch.cat(sures), keys, following, rank, dealt, dealt_rank)


def ranks_in(log_p: Tensor, tokens: Tensor) -> Tensor:
    """Return the ranks of `tokens` [n] in log p [n, vocabulary], [n]: one plus the number of more probable tokens."""
    return (log_p > log_p.gather(1, tokens[:, None])).sum(1) + 1


@dataclass(frozen=True, eq=False)
class Surest:
    """The values with the largest max p_i in the whole model, and their agreement with their keys' triggers.

    Attributes:
        layer: layer of each value, by max p_i descending, [n].
        index: its index in the layer, [n].
        sure: its max p_i, [n].
        agrees: whether its top token follows the key's top trigger, [n].
        any_agrees: whether its top token follows one of the key's triggers, [n].
    """

    layer: Tensor
    index: Tensor
    sure: Tensor
    agrees: Tensor
    any_agrees: Tensor


def surest(values: list[Values], triggers: list[Triggers], store: RowStore, count: int = SUREST) -> Surest:
    """Select the `count` values of largest max p_i whose keys have triggers; `values` and `triggers` are by layer."""
    layers = torch.cat([torch.full_like(one.keys, layer) for layer, one in enumerate(values)])
    keys = torch.cat([one.keys for one in values])
    sure = torch.cat([one.sure[one.keys] for one in values])
    best = sure.sort(descending=True, stable=True).indices[:count]
    if not len(best):
        return Surest(layers, keys, sure, nobody := torch.zeros(0, dtype=torch.bool), nobody)
    top = torch.stack([values[layer].top[key] for layer, key in zip(layers[best], keys[best], strict=True)])
    places = torch.stack(
        [
            triggers[layer].places[(triggers[layer].index == key).nonzero()[0, 0]].cpu()
            for layer, key in zip(layers[best].tolist(), keys[best], strict=True)
        ]
    )
    same = store.next(places) == top[:, None]
    return Surest(layers[best], keys[best], sure[best], same[:, 0], same.any(1))

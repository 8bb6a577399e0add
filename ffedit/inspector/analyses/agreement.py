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

from ffedit.inspector.corpus_pass.rows import NOTHING, RowStore
from ffedit.inspector.corpus_pass.triggers import Triggers
from ffedit.inspector.distributions import log_prob_batches
from ffedit.model.editable import Stack
from ffedit.progress import Progress, silent

SUREST = 100


@dataclass(frozen=True, eq=False)
class Values:
    """All values of one layer, read as distributions."""

    top: Tensor  # the most probable token of each, [d_ff]
    sure: Tensor  # its probability, [d_ff]
    keys: Tensor  # the keys that have a trigger, [n]
    triggers: Tensor  # flat indices of the triggers of each of these, the strongest first, [n, t]
    next: Tensor  # the token that follows the top trigger of each, [n]; `NOTHING` in an encoder, where none does
    rank: Tensor  # its rank in the value's distribution, [n]; meaningful only where a token follows
    permuted: Tensor  # the token that follows the top trigger of another of these keys, drawn at random, [n]
    permuted_rank: Tensor  # its rank, [n]

    @property
    def agrees(self) -> Tensor:
        """True where the top token of the value of `keys` is the one that follows, [n]."""
        return self.top[self.keys] == self.next

    @property
    def permuted_agrees(self) -> Tensor:
        """True where the top token of the value is the one of `permuted`, [n]."""
        return self.top[self.keys] == self.permuted


@torch.no_grad()
def read_values(
    stack: Stack, layer: int, triggers: Triggers, store: RowStore, seed: int = 0, progress: Progress = silent
) -> Values:
    """Read every value of a layer as a distribution, with the rank in it of the token after the key's top trigger."""
    memory, positions = stack.feed_forward[layer], triggers.positions.cpu()
    with_trigger = positions[:, 0] != NOTHING
    keys, positions = with_trigger.nonzero()[:, 0], positions[with_trigger]
    following = store.next(positions[:, 0])
    permuted = following[torch.randperm(len(keys), generator=torch.Generator().manual_seed(seed + layer))]
    tokens = torch.zeros(memory.d_ff, 2, dtype=torch.int64)
    tokens[keys] = torch.stack([following, permuted], 1).clamp(min=0)
    tops, sures, ranks, done = [], [], [], 0
    for log_p in log_prob_batches(stack, memory.value.T):
        best = log_p.max(-1)
        tops.append(best.indices.cpu())
        sures.append(best.values.exp().cpu())
        columns = tokens[done : done + len(log_p)].to(log_p.device).split(1, 1)
        ranks.append(torch.stack([(log_p > log_p.gather(1, token)).sum(1) + 1 for token in columns], 1).cpu())
        done += len(log_p)
        progress("reading values", layer * memory.d_ff + done, len(stack.feed_forward) * memory.d_ff)
    rank, permuted_rank = torch.cat(ranks)[keys].unbind(1)
    return Values(torch.cat(tops), torch.cat(sures), keys, positions, following, rank, permuted, permuted_rank)


@dataclass(frozen=True, eq=False)
class Surest:
    """The values with the largest max p_i in the whole model, and their agreement with their keys' triggers."""

    layer: Tensor  # layer of each value, by max p_i descending, [n]
    index: Tensor  # its index in the layer, [n]
    top: Tensor  # its top token, [n]
    sure: Tensor  # its max p_i, [n]
    agrees: Tensor  # whether its top token follows the key's top trigger, [n]
    any_agrees: Tensor  # whether its top token follows one of the key's triggers, [n]


def surest(values: list[Values], store: RowStore, count: int = SUREST) -> Surest:
    """Select the `count` values of largest max p_i whose keys have triggers; `values` are by layer."""
    sure = torch.cat([layer.sure[layer.keys] for layer in values])
    best = sure.sort(descending=True, stable=True).indices[:count]
    layers = torch.cat([torch.full_like(layer.keys, number) for number, layer in enumerate(values)])
    top = torch.cat([layer.top[layer.keys] for layer in values])[best]
    agrees = store.next(torch.cat([layer.triggers for layer in values])[best]) == top[:, None]
    index = torch.cat([layer.keys for layer in values])[best]
    return Surest(layers[best], index, top, sure[best], agrees[:, 0], agrees.any(1))

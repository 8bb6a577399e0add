"""Analyses of values: which tokens they say, how a layer is composed of them, and the model of its layers.

*Activity.* A layer's output is o = Σ_i m_i v_i + b. Memory i contributes m_i v_i. Its *strength* is the norm of that,
|m_i| ‖v_i‖; its *share* is m_i v_i·o / ‖o‖², its fraction of the output: negative where it points against o; the shares
of all memories and the bias add up to 1. A memory is *active by sign* where m_i > 0: under ReLU the others are
zero (Geva et al. 2021, arXiv 2012.14913, section 5). GELU and gates leave nearly every coefficient slightly off zero,
and a gated one may be negative and large: there a memory is *active by norm* where its strength is at least 1% of ‖o‖.
The *effective number* needs no threshold: it is the participation ratio (Σ s_i²)² / Σ s_i⁴ of the strengths s, n where
n memories are equally strong and the others zero. The memories of a mixture are those of all experts that the token is
routed to, with the router's weight inside m_i; b is the routed combination of the experts' biases.

*Agreement* (section 4). Each value v_i is read as a distribution p_i over the vocabulary and compared with w_i, the
token that follows the top trigger of the key k_i in the text: whether argmax p_i = w_i (figure 4); the rank of w_i in
p_i, 1 the best (figure 5); and agreement as a function of *max p_i*, a value's largest probability (figure 6, table 2).
Chance is measured on the same values and the same tokens, randomly permuted among the keys of the layer, so that it has
the frequencies of the text. The paper multiplies v_i by the embedding matrix; here it goes through the model's own
final norm first, as a state of the residual stream would (`Stack.read`), which changes max p_i.

*Composition* (section 5), at sampled positions; top(x) is the most probable token of x, read in the same way. With r
the residual stream without the feed-forward output of a layer, o that output, and y the layer's result, which is r + o
except where a block ends in a norm of its own:

- *zero agreement* (section 5.1, figure 8): top(o) is top(v_i) of no memory with m_i > 0. The paper compares with all
  memories, inactive ones as well; so its share can only be smaller than ours. Behind a gate a memory may also act
  through a negative coefficient; this is left out.
- *already final* (section 5.2, figure 9): top(r) is the model's final prediction; and the probability that r gives to
  the model's final prediction (figure 10).
- *four cases* (figure 11): *residual*, top(y) = top(r) ≠ top(o); *feed-forward*, top(y) = top(o) ≠ top(r);
  *agreement*, all three are one; *compromise*, top(y) is neither top(r) nor top(o). The paper calls the last
  "composition".
- *shifts* (table 3): positions at which the last layer changes the prediction, top(y) ≠ top(r).
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from ffedit.algebra.linalg import double
from ffedit.inspector.rows import NOTHING, RowStore
from ffedit.inspector.triggers import Triggers
from ffedit.inspector.views import View, log_prob_batches
from ffedit.model.editable import Stack
from ffedit.progress import Progress, silent

# The share of the output's norm from which a memory counts as active.
ACTIVE = 0.01
SUREST = 100
CASES = ("residual", "feed-forward", "agreement", "compromise")


@dataclass(frozen=True)
class Activity(View):
    """Numbers of active memories of a layer at one position."""

    memories: int  # number of memories of the layer
    by_sign: int  # number with a positive coefficient
    by_norm: int  # number with |m_i| ‖v_i‖ >= 1% of ‖o‖
    effective: float  # participation ratio of the strengths
    bias_share: float  # b·o / ‖o‖², the bias's share of the output; 0 without a bias


@dataclass(frozen=True, eq=False)
class Contributions:
    """Contributions of each memory of a layer at one position."""

    coefficients: Tensor  # m [d_ff]
    strengths: Tensor  # |m_i| ‖v_i‖ [d_ff]
    shares: Tensor  # m_i v_i·o / ‖o‖² [d_ff]; 0 where the output is 0
    activity: Activity


def effective_number(strengths: Tensor) -> Tensor:
    """Return the participation ratio of strengths [.., n], [..] float64; 0 where all are 0."""
    energy = double(strengths).square()
    return (energy.sum(-1).square() / energy.square().sum(-1)).nan_to_num()


@torch.no_grad()
def contributions(value: Tensor, bias: Tensor | None, coefficients: Tensor) -> Contributions:
    """Decompose a layer's output, o = W m + b, with W [d_model, d_ff], b [d_model], m [d_ff]; in float32 at least."""
    wide = torch.promote_types(coefficients.dtype, torch.float32)
    m, value = coefficients.to(wide), value.to(wide)
    bias = torch.zeros_like(value[:, 0]) if bias is None else bias.to(wide)
    output = value @ m + bias
    squared = float(output @ output)
    strengths = m.abs() * torch.linalg.vector_norm(value, dim=0)
    shares = m * (output @ value) / squared if squared else torch.zeros_like(m)
    activity = Activity(
        memories=len(m),
        by_sign=int((m > 0).sum()),
        by_norm=int((strengths >= ACTIVE * squared**0.5).sum()) if squared else 0,
        effective=float(effective_number(strengths)),
        bias_share=float(bias @ output) / squared if squared else 0.0,
    )
    return Contributions(m, strengths, shares, activity)


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
class SurestValues:
    """The n values with the largest max p_i in the whole model, by max p_i descending."""

    layer: Tensor  # layer of each, [n]
    index: Tensor  # its index in the layer, [n]
    top: Tensor  # its top token, [n]
    sure: Tensor  # its max p_i, [n]
    agrees: Tensor  # whether its top token follows the key's top trigger, [n]
    any_agrees: Tensor  # whether its top token follows one of the key's triggers, [n]


def surest(values: list[Values], store: RowStore, count: int = SUREST) -> SurestValues:
    """Select the `count` values of largest max p_i whose keys have triggers; `values` are by layer."""
    sure = torch.cat([layer.sure[layer.keys] for layer in values])
    best = sure.sort(descending=True, stable=True).indices[:count]
    layers = torch.cat([torch.full_like(layer.keys, number) for number, layer in enumerate(values)])
    top = torch.cat([layer.top[layer.keys] for layer in values])[best]
    agrees = store.next(torch.cat([layer.triggers for layer in values])[best]) == top[:, None]
    index = torch.cat([layer.keys for layer in values])[best]
    return SurestValues(layers[best], index, top, sure[best], agrees[:, 0], agrees.any(1))


@dataclass(frozen=True, eq=False)
class Composed:
    """Predictions of a layer at n sampled positions."""

    residual: Tensor  # top(r), [n]
    added: Tensor  # top(o), [n]
    output: Tensor  # top(y), [n]
    final: Tensor  # probability that r gives to the model's final prediction, [n]
    case: Tensor  # index in `CASES`, [n]
    settled: Tensor  # top(r) is the model's final prediction, [n]
    zero: Tensor  # top(o) is that of no active memory, [n]
    activity: Tensor  # memories active by sign, active by norm, and their effective number, [n, 3]


@torch.no_grad()
def compose(stack: Stack, sampled: Mapping[str, Tensor], tops: list[Tensor]) -> list[Composed]:
    """Compute the predictions of each layer at the positions of a sample.

    `sampled` holds values of each layer there as `Pass.sample` does; `tops` are top(v_i) of its memories,
    [layers][d_ff].
    """
    final = _tops(stack, sampled[f"{len(tops) - 1}/after"])[0]
    composed = []
    for layer, top in enumerate(tops):
        residual, probability = _tops(stack, sampled[f"{layer}/before"], final)
        added, output = (_tops(stack, sampled[f"{layer}/{name}"])[0] for name in ("added", "after"))
        case = torch.full_like(residual, CASES.index("compromise"))
        case[output == residual] = CASES.index("residual")
        case[output == added] = CASES.index("feed-forward")
        case[(output == added) & (output == residual)] = CASES.index("agreement")
        positive = np.unpackbits(sampled[f"{layer}/positive"].numpy(), axis=1, count=len(top)).astype(bool)
        zero = [~(top[torch.from_numpy(row)] == token).any() for row, token in zip(positive, added, strict=True)]
        activity = sampled[f"{layer}/activity"]
        settled = residual == final
        composed.append(Composed(residual, added, output, probability, case, settled, torch.stack(zero), activity))
    return composed


def _tops(stack: Stack, vectors: Tensor, tokens: Tensor | None = None) -> tuple[Tensor, Tensor]:
    """Return the most probable token of each of `vectors` [n, d_model], and the probability of `tokens` [n]."""
    best, probabilities, done = [], [], 0
    for log_p in log_prob_batches(stack, vectors):
        top = log_p.argmax(-1)
        asked = top if tokens is None else tokens[done : done + len(log_p)].to(top.device)
        best.append(top.cpu())
        probabilities.append(log_p.gather(1, asked[:, None])[:, 0].exp().cpu())
        done += len(log_p)
    return torch.cat(best), torch.cat(probabilities)

"""Composition of a layer's prediction from its memories, and of the model's prediction from its layers.

Everything is read at sampled positions through final norm and unembedding; top(x) is the most probable token of x
read in this way. With r the residual stream without the feed-forward output of a layer, o that output, and y the
layer's result, which is r + o except where a block ends in a norm of its own:

- *zero agreement* (Geva et al. 2021, arXiv 2012.14913, section 5.1, figure 8): top(o) is top(v_i) of no memory with
  m_i > 0. The paper compares with all memories, inactive ones as well; so its share can only be smaller than ours.
  Behind a gate a memory may also act through a negative coefficient; this is left out, as in `activity`.
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

from ffedit.inspector.distributions import log_prob_batches
from ffedit.model.editable import Stack

CASES = ("residual", "feed-forward", "agreement", "compromise")


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
def compose(stack: Stack, values: Mapping[str, Tensor], tops: list[Tensor]) -> list[Composed]:
    """Compute the predictions of each layer at the positions of a sample.

    `values` of each layer there are as `Pass.sample` stores them; `tops` are top(v_i) of its memories, [layers][d_ff].
    """
    last = len(tops) - 1
    final = _tops(stack, values[f"{last}/after"])[0]
    composed = []
    for layer, top in enumerate(tops):
        residual, probability = _tops(stack, values[f"{layer}/before"], final)
        added, output = (_tops(stack, values[f"{layer}/{name}"])[0] for name in ("added", "after"))
        case = torch.full_like(residual, CASES.index("compromise"))
        case[output == residual] = CASES.index("residual")
        case[output == added] = CASES.index("feed-forward")
        case[(output == added) & (output == residual)] = CASES.index("agreement")
        positive = np.unpackbits(values[f"{layer}/positive"].numpy(), axis=1, count=len(top)).astype(bool)
        zero = torch.stack(
            [~(top[torch.from_numpy(row)] == token).any() for row, token in zip(positive, added, strict=True)]
        )
        settled = residual == final
        activity = values[f"{layer}/activity"]
        composed.append(Composed(residual, added, output, probability, case, settled, zero, activity))
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

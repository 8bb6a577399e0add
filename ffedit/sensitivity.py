"""How much of what a model says hangs on a layer, token by token?

A change Δ of a value matrix moves what the layer gives at token t by Δ k_t. On text of the model's own this costs, to
second order and in nats, half of E (g_tᵀ Δ k_t)², with g_t the gradient of log P(text) by the layer's output there: the
Fisher information, its factors as in K-FAC (Martens and Grosse 2015, arXiv 1503.05671). With all directions of g taken
alike, ‖g_t‖² is what a key counts in C. It is large where the layer recalls something that is read later, as at a name,
and next to nothing at most words.
"""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import ExitStack
from functools import partial

import torch
import torch.nn.functional as F
from torch import Tensor

from ffedit.anatomy import Editable
from ffedit.errors import EditError
from ffedit.hooks import frozen, replaced
from ffedit.progress import Progress, silent
from ffedit.room import halving

# Logits of a batch.
LOGITS = 2**26
NO_TOKEN = -100  # cross_entropy leaves it out


def sensitivity(
    editable: Editable, ids: Tensor, length: int, layers: Sequence[int], progress: Progress = silent
) -> dict[int, Tensor]:
    """‖∂ log P / ∂ FF(x_t)‖² for each token of a text, in nats² per squared unit of the layer's output.

    Args:
        editable: the model.
        ids: the text, [tokens], run in rows of `length`.
        length: tokens of a row; the last may be shorter.
        layers: whose outputs, in rising order.
        progress: told how many tokens are done.

    Returns:
        By layer, [tokens], float64, on the CPU; 0 at the end of a row, on which nothing hangs.

    Raises:
        EditError: there is no memory for a single row.
    """
    rows = torch.full((-(-len(ids) // length), length), NO_TOKEN)
    rows.view(-1)[: len(ids)] = ids
    refusal = EditError("not enough memory to weigh a single row of text; use --weighting types")
    size = max(1, LOGITS // (length * int(editable.model.config.get_text_config().vocab_size)))
    found: list[Tensor] = []
    with frozen(editable.model):
        for first in range(0, len(rows), size):
            last = min(first + size, len(rows))
            found += halving(partial(_squares, editable, rows, layers), range(first, last), refusal)
            progress("weighing text", min(len(ids), last * length), len(ids))
    squares = torch.cat(found, 1).flatten(1)[:, : len(ids)]
    return dict(zip(layers, squares, strict=True))


def _squares(editable: Editable, rows: Tensor, layers: Sequence[int], some: Sequence[int]) -> Tensor:
    """Of some rows, [layers, rows, length]."""
    ids = rows[list(some)].to(editable.device)
    added: list[Tensor] = []

    def add(output: Tensor) -> Tensor:
        added.append(torch.zeros_like(output, requires_grad=True))
        return output + added[-1]

    with ExitStack() as stack, torch.enable_grad():
        for layer in layers:
            stack.enter_context(replaced(editable.feed_forward[layer].module, add))
        logits = editable.run(input_ids=ids.clamp(min=0), use_cache=False).logits.float()
        said = F.cross_entropy(logits[:, :-1].flatten(0, 1), ids[:, 1:].flatten().to(logits.device), reduction="sum")
        gradients = torch.autograd.grad(said, added)
    return torch.stack([g.reshape(*ids.shape, -1).double().square().sum(-1).cpu() for g in gradients])

"""Tiny models that learn some sentences by heart, with any tokenizer."""

from __future__ import annotations

from collections.abc import Sequence

import torch
import zoo
from transformers import PreTrainedTokenizerBase

from ffedit.loading.verify import find_and_verify
from ffedit.model.editable import Editable


def learned(
    family: str, tokenizer: PreTrainedTokenizerBase, rows: Sequence[Sequence[int]], steps: int = 80, chat: bool = False
) -> Editable:
    """A model of `family` that says each of `rows`, token ids, by heart."""
    learner = zoo.model(family, vocab_size=len(tokenizer), gain=4.0)
    longest = max(map(len, rows))
    ids = torch.tensor([[*row, *[-100] * (longest - len(row))] for row in rows])
    adam = torch.optim.Adam(learner.parameters(), lr=5e-3)
    for _ in range(steps):
        logits = learner(input_ids=ids.clamp(min=0)).logits[:, :-1]
        loss = torch.nn.functional.cross_entropy(logits.flatten(0, 1), ids[:, 1:].flatten())
        adam.zero_grad()
        loss.backward()
        adam.step()
    learner.requires_grad_(False)
    for parameter in learner.parameters():
        parameter.grad = None
    editable = find_and_verify(learner.eval(), tokenizer, family)
    editable.chat = chat
    return editable

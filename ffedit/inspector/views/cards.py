"""Summaries of memories: the distribution of each value and, where a text was read, the triggers of its key.

A report or a prompt names many memories. A card summarises one without running a text again: the value needs none, and
the triggers are those that the pass of a report has stored.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, fields, replace
from typing import Any

import torch

from ffedit.inspector.analyses.distributions import Distribution, distribution, log_probabilities
from ffedit.inspector.corpus_pass.lookup import resolved
from ffedit.inspector.corpus_pass.memory_pass import Pass
from ffedit.inspector.corpus_pass.reading import Context
from ffedit.inspector.corpus_pass.rows import RowStore
from ffedit.inspector.views.memory_view import Trigger
from ffedit.inspector.views.report import ModelReport
from ffedit.inspector.views.slots import Slot
from ffedit.inspector.views.view import View
from ffedit.model.editable import Stack

TOKENS, TRIGGERS = 6, 6


@dataclass(frozen=True)
class MemoryCard(View):
    """Summary of one memory.

    Attributes:
        slot: the memory.
        value_norm: ‖v‖.
        value: v through final norm and unembedding.
        triggers: the prefixes with the largest coefficients; none where no text was read.
    """

    slot: Slot
    value_norm: float
    value: Distribution
    triggers: tuple[Trigger, ...] = ()


def cards_of(stack: Stack, *views: View) -> tuple[MemoryCard, ...]:
    """Return cards with the values of all memories that `views` name."""
    return tuple(value_card(stack, slot) for slot in sorted({slot for view in views for slot in _named(view)}))


def _named(value: Any) -> Iterator[Slot]:
    if isinstance(value, Slot):
        yield value
    elif isinstance(value, View):
        yield from _named([getattr(value, field.name) for field in fields(value)])
    elif isinstance(value, tuple | list | Mapping):
        for one in value:
            yield from _named(one)


def report_cards(stack: Stack, report: ModelReport, state: Pass, store: RowStore) -> tuple[MemoryCard, ...]:
    """Return cards of the report's values of largest max p_i and of the strongest memory of each layer, with triggers.

    Strongest: the largest |m| ‖v‖ at a top trigger.
    """
    surest = [Slot.parse(one["memory"]) for one in report.surest.examples]
    found: list[MemoryCard] = []
    for layer, kept in state.triggers.items():
        place, index = stack.feed_forward[layer], kept.index.cpu()
        norms = torch.linalg.vector_norm(place.value.float(), dim=0).cpu()[index]
        rows = {int((kept.coefficients[:, 0].cpu() * norms).argmax())}
        mine = [place.column(slot.address, slot.index) for slot in surest if slot.address.layer == layer]
        rows |= {index.tolist().index(column) for column in mine}
        for row in rows:
            card = value_card(stack, Slot(*place.at(int(index[row]))))
            found.append(replace(card, triggers=_triggers(stack, card.slot, state, store, row)))
    return tuple(sorted(found, key=lambda card: card.slot))


def value_card(stack: Stack, slot: Slot) -> MemoryCard:
    """Return the card of a memory with its value's distribution, without triggers."""
    value = stack.memories[slot.address].value[:, slot.index]
    log_p = log_probabilities(stack, value[None])[0]
    return MemoryCard(
        slot, float(torch.linalg.vector_norm(value.float())), distribution(stack.tokenizer, log_p, TOKENS)
    )


def _triggers(stack: Stack, slot: Slot, state: Pass, store: RowStore, row: int) -> tuple[Trigger, ...]:
    """Return the first triggers of a key; `row` is the key's row in the triggers of the pass."""
    log_p = log_probabilities(stack, stack.memories[slot.address].value[:, slot.index][None])[0]
    return tuple(
        Trigger.of(stack.tokenizer, Context(one.ids, one.at), one.coefficient, log_p, one.next)
        for one in resolved(store, state.triggers[slot.address.layer], row, TRIGGERS)
    )

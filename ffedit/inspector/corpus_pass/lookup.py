"""Lookup of the texts of triggers in the rows that a pass has stored."""

from __future__ import annotations

from dataclasses import dataclass

from ffedit.inspector.corpus_pass.rows import NOTHING, Row, RowStore
from ffedit.inspector.corpus_pass.triggers import Triggers
from ffedit.inspector.views.view import View


@dataclass(frozen=True)
class Trigger(View):
    """Prefix on which a memory coefficient is large; in a stack that is not causal, a position of a text.

    Attributes:
        coefficient: m_i at that position.
        ids: the prefix, or the text.
        at: index of the position in `ids`; the last one of a prefix.
        next: the token that follows it in the text; `NOTHING` where none does.
    """

    coefficient: float
    ids: Row
    at: int
    next: int


def resolved(store: RowStore, triggers: Triggers, row: int, top: int | None = None) -> tuple[Trigger, ...]:
    """Return the first `top` triggers of the key at `row` of `triggers`, with their texts."""
    places = triggers.places[row, :top].cpu()
    followed = store.next(places).tolist()
    return tuple(
        Trigger(coefficient, *store.context(place), next_id)
        for coefficient, place, next_id in zip(
            triggers.coefficients[row].tolist(), places.tolist(), followed, strict=False
        )
        if place != NOTHING
    )

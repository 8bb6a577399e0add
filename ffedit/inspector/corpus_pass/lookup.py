"""Triggers with their texts, looked up in the rows that a pass has kept."""

from __future__ import annotations

from dataclasses import dataclass

from ffedit.inspector.corpus_pass.rows import NOTHING, Row, RowStore
from ffedit.inspector.corpus_pass.triggers import Triggers
from ffedit.inspector.views.view import View


@dataclass(frozen=True)
class Trigger(View):
    """A prefix on which a memory coefficient is large; or, where a position sees more, a position of a text.

    Attributes:
        coefficient: m_i there.
        ids: the prefix, or the text.
        at: which of them it is at; the last of a prefix.
        next: the token that follows it in the text; `NOTHING` where none does.
    """

    coefficient: float
    ids: Row
    at: int
    next: int


def resolved(store: RowStore, triggers: Triggers, row: int, top: int | None = None) -> tuple[Trigger, ...]:
    """The first `top` triggers of the key in a row of `triggers`, with their texts."""
    places = triggers.places[row, :top].cpu()
    followed = store.next(places).tolist()
    return tuple(
        Trigger(coefficient, *store.context(place), next_id)
        for coefficient, place, next_id in zip(
            triggers.coefficients[row].tolist(), places.tolist(), followed, strict=False
        )
        if place != NOTHING
    )

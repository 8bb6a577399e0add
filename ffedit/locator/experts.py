"""Where a mixture of experts keeps a subject: the experts that its last token goes to.

One prompt does not tell. What is edited serves in every context only if the router sends the subject the same way
there, so it is asked behind openings of the model's own too.
"""

from __future__ import annotations

from collections.abc import Sequence

from ffedit.facts.fact import Fact
from ffedit.inference.routing import Routes, mixtures, routes
from ffedit.inference.text import own_text
from ffedit.model.editable import Editable
from ffedit.model.tokenization import decode

CONTEXTS, LENGTH = 8, 8


def subject_routes(editable: Editable, facts: Sequence[Fact], seed: int = 0) -> list[dict[int, Routes]]:
    """For each fact, what the router of each mixture does with its subject's last token; nothing for dense models.

    Args:
        editable: the model.
        facts: with prompts.
        seed: of the openings.

    Returns:
        By layer; the texts are the bare prompt and the prompt behind up to 8 openings that the model samples.
    """
    layers = mixtures(editable)
    if not layers:
        return [{} for _ in facts]
    rows = own_text(editable, CONTEXTS, LENGTH, seed)
    openings = [text for row in rows if (text := decode(editable.tokenizer, row, special=False).strip())]
    found = []
    for fact in facts:
        texts = [editable.encode(fact.text, span=fact.span)]
        for opening in openings:
            lead = f"{opening} "
            span = fact.span[0] + len(lead), fact.span[1] + len(lead)
            longer = editable.encode(lead + fact.text, span=span)
            texts += [longer] if len(longer.ids) <= editable.max_tokens else []
        found.append(routes(editable, texts, layers))
    return found

"""Find the experts of a mixture that the router sends a subject's last token to.

An edited expert takes effect in another context only if the router sends the subject to it there too. So the routes are
recorded on the bare prompt and on the prompt preceded by texts sampled from the model.
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
    """Record, for each fact, how the router of each mixture routes its subject's last token.

    Args:
        editable: the model.
        facts: with prompts.
        seed: of the sampled prefixes.

    Returns:
        For each fact, the routes by layer, empty for a dense model; the texts are the bare prompt and the prompt behind
        up to 8 prefixes sampled from the model.
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

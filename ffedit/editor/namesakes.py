"""Other names that an edit must not move.

A memory that answers to "Steve Jobs" answers a little to every Steve: the keys of names that share their first words
lie close together, and ordinary text, which rarely names any of them, does not tell them apart. So the model is asked
what else it might have said at each token of the subject's name: at the first one, whatever stands in such a place, the
end of the text included. These keys are counted into what a change costs (`algebra.steadied`), and it moves away from
them.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch

from ffedit import replay
from ffedit.anatomy import Editable
from ffedit.editor.config import EditConfig
from ffedit.tokens import Encoded, decode, pad


@torch.no_grad()
def namesakes(editable: Editable, texts: Sequence[Encoded], config: EditConfig) -> tuple[Encoded, ...]:
    """Draw what else might stand where the subject does, one token of its name after another in turn.

    Args:
        editable: the model.
        texts: in which the subject stands.
        config: how many for each text, and the seed.

    Returns:
        texts that end in the other name, its place as their subject; distinct.
    """
    places = {text.ids[: text.subject[1]]: text.subject for text in texts if text.subject is not None}
    starts = list(places)
    cuts = [
        (row, options[(row + turn) % len(options)])
        for row, (first, end) in enumerate(places.values())
        if (options := range(max(first, 1), end))  # nothing is predicted of a first token that has none before it
        for turn in range(config.namesakes)
    ]
    if not cuts:
        return ()
    reads = torch.tensor([(row, cut - 1) for row, cut in cuts])
    logits = replay.forward(editable, pad(starts), reads).cpu().float()
    own = torch.tensor([starts[row][cut] for row, cut in cuts])
    logits[torch.arange(len(cuts)), own] = -torch.inf
    drawn = logits.softmax(-1).multinomial(1, generator=torch.Generator().manual_seed(config.seed + 3))
    found: dict[tuple[int, ...], Encoded] = {}
    for (row, cut), (token,) in zip(cuts, drawn.tolist(), strict=True):
        ids, first = (*starts[row][:cut], token), places[starts[row]][0]
        found[ids] = Encoded(decode(editable.tokenizer, ids), ids, len(ids), (first, len(ids)))
    return tuple(found.values())

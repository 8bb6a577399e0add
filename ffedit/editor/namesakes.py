"""Other names that an edit must not move.

A memory that answers to "Steve Jobs" answers a little to every Steve: the keys of names that share their first words
lie close together, and ordinary text, which rarely names any of them, does not tell them apart. So the model is asked
what else it might have said at each token of the subject's name: at the first one, whatever word stands in such a
place. These keys are counted into what a change costs (`algebra.steadied`), and it moves away from them.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence

import torch
from torch import Tensor

from ffedit import replay
from ffedit.anatomy import Editable
from ffedit.editor.config import EditConfig
from ffedit.errors import ModelError
from ffedit.readout import NO_ROOM
from ffedit.room import halving
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

    Raises:
        ModelError: there is no memory for a single text.
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
    counts = Counter(cuts)
    at = torch.tensor(list(counts))  # row after row

    def read(rows: Sequence[int]) -> Tensor:
        here = at[(at[:, 0] >= rows[0]) & (at[:, 0] <= rows[-1])]
        ids = pad([starts[row] for row in rows])
        return replay.forward(editable, ids, here - torch.tensor([rows[0], 1])).cpu().float()

    logits = torch.cat(list(halving(read, range(len(starts)), ModelError(NO_ROOM))))
    logits[torch.arange(len(at)), torch.tensor([starts[row][cut] for row, cut in counts])] = -torch.inf
    # A tokenizer may have special tokens that the model has no row for.
    logits[:, [i for i in editable.tokenizer.all_special_ids if i < logits.shape[1]]] = -torch.inf
    found: dict[tuple[int, ...], Encoded] = {}
    for (row, cut), tokens in zip(counts, _distinct(logits, list(counts.values()), config.seed + 3), strict=True):
        for token in tokens:
            ids, first = (*starts[row][:cut], token), places[starts[row]][0]
            found[ids] = Encoded(decode(editable.tokenizer, ids), ids, len(ids), (first, len(ids)))
    return tuple(found.values())


def _distinct(logits: Tensor, counts: Sequence[int], seed: int) -> list[list[int]]:
    """For each row of `logits`, so many different tokens, as drawing one after another would give.

    They are the largest of the logits with independent Gumbel noise added.
    """
    noise = torch.empty_like(logits).exponential_(generator=torch.Generator().manual_seed(seed))
    best = (logits - noise.log()).topk(min(max(counts), logits.shape[1]))
    found = zip(best.values.tolist(), best.indices.tolist(), counts, strict=True)
    return [[i for value, i in zip(*row, strict=True) if value > -torch.inf][:count] for *row, count in found]

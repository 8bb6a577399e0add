"""Read the keys that an edit must not touch: where texts begin, of what the user protects, of some `keep` prompts.

They count among the keys K_p of earlier edits, which keep their values (`algebra.updates`): exactly where facts are
exact, and else as far as facts are. A name or text is protected at each of its tokens, since a subject's key may be
like that of any, and at its last one behind neutral words, too, since a name's key depends on what stands before it.

The token that begins a text is an attention sink, whose key is nearly the same in all texts. C leaves it out, and every
later token attends to it, so that a change there would reach all of every text (`beginning_keys`).

Where a `keep` prompt does not name the subject, no δ is added in it: what can change its answer is what the update adds
at other keys. So it is protected, with the tokens of its answer that predict the next one, as a text is: as far as the
answer names no subject, whose key the edit needs.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from ffedit.algebra.linalg import double
from ffedit.editor.config import KeyConfig
from ffedit.editor.key import kept, read_layers
from ffedit.facts.fact import Fact
from ffedit.facts.text import occurrences
from ffedit.inference.names import MENTIONS, mention
from ffedit.model.editable import Editable
from ffedit.model.feed_forward import FeedForward
from ffedit.model.tokenization import Encoded, decode, plain_ids


@dataclass(frozen=True, eq=False)
class Protected:
    """Texts whose keys, each at its site, keep their values."""

    texts: Sequence[Encoded]
    count: int  # of names, texts and prompts that they are of
    left_out: tuple[str, ...]  # names that are the subject of a fact

    def keys(self, editable: Editable, ff_layers: Sequence[FeedForward]) -> dict[int, Tensor]:
        """Read the keys by layer, [Σ d_ff, p], float64."""
        read = zip(ff_layers, read_layers(editable, ff_layers, self.texts), strict=True)
        return {ff.layer: _columns(double(keys)) for ff, (keys, _) in read}

    def to_dict(self) -> Mapping[str, object]:
        """Return what a provenance says of it, plain JSON."""
        return {"count": self.count, "keys": len(self.texts), "left_out": [*self.left_out]}


def protected_texts(editable: Editable, facts: Sequence[Fact], config: KeyConfig) -> Protected | None:
    """Return what an edit that writes `facts` must not touch, None for nothing; FactError for a text that is too long.

    Mentions of the facts' subjects are not protected, but for one that a text ends with: "Tokyo Tower" is another name
    than "Tower".
    """
    subjects = list(dict.fromkeys(fact.subject for fact in facts))
    theirs = {subject.casefold() for subject in subjects}
    left_out = tuple(entry for entry in config.protect if entry.casefold() in theirs)
    entries = [entry for entry in config.protect if entry not in left_out]
    texts: list[Encoded] = []
    for entry in entries:
        text = editable.encode(entry, max_tokens=editable.max_tokens)
        texts += _tokens(editable, text, entry, [subject for subject in subjects if not entry.endswith(subject)])
        mentions = (mention(editable, entry, lead) for lead in MENTIONS)
        texts += [text for text in mentions if len(text.ids) <= editable.max_tokens]
    count = len(entries)
    for fact, held in zip(facts, kept(editable, facts, config.fact_token), strict=True):
        for probe, text in zip(fact.probes("keep"), held, strict=True):
            if text.subject is None:
                texts += _tokens(editable, text, probe.prompt, subjects)
                count += 1
    texts = list({text.ids[: text.site + 1]: text for text in texts}.values())
    return Protected(texts, count, left_out) if count or left_out else None


def beginning_keys(editable: Editable, ff_layers: Sequence[FeedForward]) -> dict[int, Tensor]:
    """Read by layer the keys at the tokens that begin a plain text and that C leaves out, [Σ d_ff, p], float64.

    They are the model's `start_tokens`, or, where it has none, the first tokens of a few texts, which stand for all.
    """
    start = tuple(editable.start_tokens)
    ids = [start[: i + 1] for i in range(len(start))]
    ids = ids or [tuple(plain_ids(editable.tokenizer, text)[:1]) for text in MENTIONS]
    texts = [Encoded("", each, len(each), fact_token="last") for each in ids]
    read = zip(ff_layers, read_layers(editable, ff_layers, texts), strict=True)
    return {ff.layer: double(keys).T for ff, (keys, _) in read}


def _tokens(editable: Editable, text: Encoded, prompt: str, subjects: Sequence[str]) -> list[Encoded]:
    """Return `text` cut behind each of its tokens, whose key is read there, without those of `subjects` in `prompt`.

    Of an answer, no token is read that is its last or stands at a mention of one of `subjects` or behind it.
    """
    spans = [span for subject in subjects for span in occurrences(prompt, subject)]
    named = [editable.encode(prompt, span=span).subject or (0, 0) for span in spans]
    theirs = {position for start, end in named for position in range(start, end)}
    said = [decode(editable.tokenizer, text.target_ids[: i + 1]) for i in range(len(text.target_ids))]
    first = min((start for subject in subjects for start, _ in occurrences("".join(said[-1:]), subject)), default=None)
    unnamed = [i for i, part in enumerate(said[:-1]) if first is None or len(part) <= first]
    ends = [position + 1 for position in range(text.answer + len(unnamed)) if position not in theirs]
    return [Encoded(text.text, text.ids[:end], end, fact_token="last") for end in ends]


def _columns(keys: Tensor) -> Tensor:
    """Return `keys` [p, Σ d_ff] as columns; of more than Σ d_ff, as many that have the same K_p K_pᵀ."""
    return (torch.linalg.qr(keys, mode="r").R if keys.shape[0] > keys.shape[1] else keys).T

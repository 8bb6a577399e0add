"""Read keys that an edit must not touch: where texts begin, of protected texts, `keep` prompts, facts of other layers.

They join the keys K_p of earlier edits, which keep their values (`algebra.updates`): exactly where the method writes
facts exactly, else approximately. A name or text is protected at each of its tokens, since a subject's key may resemble
any of theirs, and at its last token behind neutral words, too, since a name's key depends on the words before it.

The token that begins a text is an attention sink, whose key is nearly the same in all texts. C leaves it out, and every
later token attends to it, so that a change there would reach every token of every text (`beginning_keys`).

To a `keep` prompt that does not name the subject, no δ is added, but the update may add something at its keys. So it is
protected like a text, with the tokens of its answer that predict the next one, up to a mention of a subject, whose key
the edit needs.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from ffedit.algebra.linalg import double
from ffedit.editor.config import KeyConfig
from ffedit.editor.edit import Edit
from ffedit.editor.key import kept, read_layers
from ffedit.facts.fact import Fact
from ffedit.facts.fact_token import FactToken
from ffedit.facts.text import occurrences
from ffedit.inference.names import MENTIONS, mention
from ffedit.model.editable import Editable
from ffedit.model.feed_forward import FeedForward
from ffedit.model.tokenization import Encoded, decode, plain_ids


@dataclass(frozen=True, eq=False)
class Protected:
    """Texts whose keys, each at its site, keep their values."""

    texts: Sequence[Encoded]
    count: int  # number of names, texts and prompts that they come from
    left_out: tuple[str, ...]  # names that are the subject of a fact

    def keys(self, editable: Editable, ff_layers: Sequence[FeedForward]) -> dict[int, Tensor]:
        """Read the keys by layer, [Σ d_ff, p], float64."""
        pairs = zip(ff_layers, read_layers(editable, ff_layers, self.texts), strict=True)
        return {ff.layer: _columns(double(keys)) for ff, (keys, _) in pairs}

    def to_dict(self) -> Mapping[str, object]:
        """Return the entry of a provenance about it, plain JSON."""
        return {"count": self.count, "keys": len(self.texts), "left_out": [*self.left_out]}


def protected_texts(editable: Editable, facts: Sequence[Fact], config: KeyConfig) -> Protected | None:
    """Return the texts that an edit of `facts` must not touch, None without any; FactError where one is too long.

    Mentions of the facts' subjects are not protected, except where a text ends with one: "Tokyo Tower" is another name
    than "Tower".
    """
    subjects = list(dict.fromkeys(fact.subject for fact in facts))
    folded = {subject.casefold() for subject in subjects}
    left_out = tuple(entry for entry in config.protect if entry.casefold() in folded)
    entries = [entry for entry in config.protect if entry not in left_out]
    texts: list[Encoded] = []
    for entry in entries:
        text = editable.encode(entry, max_tokens=editable.max_tokens)
        texts += _tokens(editable, text, entry, subjects, at_end=True)
        mentions = (mention(editable, entry, lead) for lead in MENTIONS)
        texts += [text for text in mentions if len(text.ids) <= editable.max_tokens]
    count = len(entries)
    for fact, keep_texts in zip(facts, kept(editable, facts, config.fact_token), strict=True):
        for probe, text in zip(fact.probes("keep"), keep_texts, strict=True):
            if text.subject is None:
                texts += _tokens(editable, text, probe.prompt, subjects)
                count += 1
    texts = list({text.ids[: text.site + 1]: text for text in texts}.values())
    return Protected(texts, count, left_out) if count or left_out else None


def beginning_keys(editable: Editable, ff_layers: Sequence[FeedForward]) -> dict[int, Tensor]:
    """Read by layer the keys of the tokens that begin a plain text, which C leaves out, [Σ d_ff, p], float64.

    They are the model's `start_tokens`, or, where it has none, the first tokens of a few texts, which stand for all.
    """
    start = tuple(editable.start_tokens)
    ids = [start[: i + 1] for i in range(len(start))]
    ids = ids or [tuple(plain_ids(editable.tokenizer, text)[:1]) for text in MENTIONS]
    texts = [Encoded("", prefix, len(prefix), fact_token="last") for prefix in ids]
    pairs = zip(ff_layers, read_layers(editable, ff_layers, texts), strict=True)
    return {ff.layer: double(keys).T for ff, (keys, _) in pairs}


def unstored_keys(
    editable: Editable, ff_layers: Sequence[FeedForward], edits: Sequence[Edit], edited: Collection[str], at: FactToken
) -> dict[int, Tensor]:
    """Read by layer the keys of the facts of `edits` that stored none there, [Σ d_ff, p], float64.

    Those are fine-tuned edits and edits of other layers. Facts of the `edited` subjects are left out. Each key is read
    in the bare prompt, at the subject's last token or, if `at` is "last", at the prompt's end.
    """
    keys: dict[int, Tensor] = {}
    for ff in ff_layers:
        others = [edit for edit in edits if not any(edit.subjects(memory.address) for memory in ff.memories)]
        facts = [fact for edit in others for fact in edit.facts if fact.subject not in edited]
        stated = [editable.encode(body, span=span) for fact in facts for body, span in fact.statements]
        texts = [replace(text, fact_token="last" if at == "last" else "subject_last") for text in stated]
        keys[ff.layer] = _columns(double(read_layers(editable, [ff], texts)[0][0]))
    return keys


def _tokens(
    editable: Editable, text: Encoded, prompt: str, subjects: Sequence[str], at_end: bool = False
) -> list[Encoded]:
    """Return `text` cut behind each token whose key is to be read: all but those of `subjects` in `prompt`.

    With `at_end`, those of a subject that ends the prompt are read. The last token of an answer is not read, nor are
    those from a mention of one of `subjects` on.
    """
    spans = [span for subject in subjects for span in occurrences(prompt, subject)]
    spans = [span for span in spans if not (at_end and span[1] == len(prompt))]
    named = [editable.encode(prompt, span=span).subject or (0, 0) for span in spans]
    excluded = {position for start, end in named for position in range(start, end)}
    words = [decode(editable.tokenizer, text.target_ids[: i + 1]) for i in range(len(text.target_ids))]
    first = min((start for subject in subjects for start, _ in occurrences("".join(words[-1:]), subject)), default=None)
    unnamed = [i for i, word in enumerate(words[:-1]) if first is None or len(word) <= first]
    ends = [position + 1 for position in range(text.answer + len(unnamed)) if position not in excluded]
    return [Encoded(text.text, text.ids[:end], end, fact_token="last") for end in ends]


def _columns(keys: Tensor) -> Tensor:
    """Return `keys` [p, Σ d_ff] as columns; where p > Σ d_ff, as Σ d_ff columns with the same K_p K_pᵀ."""
    return (torch.linalg.qr(keys, mode="r").R if keys.shape[0] > keys.shape[1] else keys).T

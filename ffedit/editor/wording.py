"""In which words is the new fact trained, and which words must not change?

One prompt alone would be learnt by heart. ROME (arXiv 2202.05262, section 3.1) puts random prefixes before it and keeps the
subject's *essence* with a KL term at "{subject} is a". Both come from the model here, sampled with a seed. In addition the
model continues the bare subject in its own words many times: where it says the old object, the new one is put in its place
and trained; everywhere else, what it says about the subject is to stay what it was. So the edit generalises to the model's
own ways of stating the fact, and the subject's other facts are kept, without any prompt having to be written by hand.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch

from ffedit import readout
from ffedit.anatomy import Editable
from ffedit.editor.config import EditConfig
from ffedit.facts import Fact
from ffedit.tokens import Encoded, encode

ESSENCE = ("{} is a", "{}", "{} is known for")


@dataclass(frozen=True)
class Wording:
    """The texts that one value is optimised on, each with the subject in it.

    Attributes:
        prompts: the fact's prompt, bare and after prefixes, with the new object as answer.
        own: the model's own phrasings up to the old object, with the new object as answer.
        kept: own phrasings (up to the old object) and the positions whose next-token distribution is to stay.
        essence: essence prompts; the last position's distribution is to stay.
        prefixes: the sampled prefixes, for the provenance.
    """

    prompts: tuple[Encoded, ...]
    own: tuple[Encoded, ...]
    kept: tuple[tuple[Encoded, tuple[int, ...]], ...]
    essence: tuple[Encoded, ...]
    prefixes: tuple[str, ...]


def prefixes(editable: Editable, config: EditConfig) -> tuple[str, ...]:
    """Short texts of the model's own, as contexts before a prompt."""
    rows = readout.own_text(editable, config.contexts, max(config.context_tokens, default=1), config.seed)
    lengths = [config.context_tokens[i % len(config.context_tokens)] for i in range(len(rows))]
    texts = [
        editable.tokenizer.decode(row[:length], skip_special_tokens=True).strip()
        for row, length in zip(rows, lengths, strict=True)
    ]
    return tuple(text for text in texts if text)


def _after(prefix: str, text: str, span: tuple[int, int]) -> tuple[str, tuple[int, int]]:
    """`text` as a sentence of its own after `prefix`, and where its span went."""
    lead = prefix + (" " if prefix[-1] in ".!?" else ". ")
    return lead + text, (span[0] + len(lead), span[1] + len(lead))


def word(editable: Editable, fact: Fact, config: EditConfig) -> Wording:
    """Gather the texts for one fact.

    Raises:
        FactError: subject, prompt or object do not fit the tokenizer or the model.
    """
    tokenizer, limit, target = editable.tokenizer, editable.max_tokens, fact.new_object
    # The bare prompt comes first: whatever is wrong with the fact shows here.
    bare = encode(tokenizer, fact.text, target, fact.span, limit)
    leads = prefixes(editable, config)
    prompts = [bare]
    for lead in leads:
        text, span = _after(lead, fact.text, fact.span)
        prompts.append(encode(tokenizer, text, target, span))
    prompts = [p for p in prompts if len(p.ids) <= limit]
    end = len(fact.subject)
    essence = [
        encode(tokenizer, form.format(fact.subject), span=(form.index("{"), form.index("{") + end)) for form in ESSENCE
    ]
    own, kept = _phrasings(editable, fact, bare, config)
    return Wording(tuple(prompts), own, kept, tuple(essence), leads)


def _phrasings(
    editable: Editable, fact: Fact, bare: Encoded, config: EditConfig
) -> tuple[tuple[Encoded, ...], tuple[tuple[Encoded, tuple[int, ...]], ...]]:
    """Continue the subject in the model's own words; split at the old object."""
    tokenizer = editable.tokenizer
    subject = encode(tokenizer, fact.subject, span=(0, len(fact.subject)))
    if fact.previous is not None:
        old = encode(tokenizer, fact.text, fact.previous, fact.span).target_ids
    else:
        old = readout.with_own_answer(editable, encode(tokenizer, fact.text, span=fact.span)).target_ids
    generator = torch.Generator().manual_seed(config.seed + 1)
    said = readout.continuations(editable, [subject.ids] * config.phrasings, config.phrasing_tokens, generator)
    stop = tokenizer.eos_token_id
    own: dict[tuple[int, ...], Encoded] = {}
    kept: dict[tuple[int, ...], tuple[Encoded, tuple[int, ...]]] = {}
    for continuation in said:
        if stop in continuation:
            continuation = continuation[: continuation.index(stop)]
        at = next((i for i in range(len(continuation)) if tuple(continuation[i : i + len(old)]) == old), None)
        before = (*subject.ids, *continuation[:at])
        if at is not None:
            ids = (*before, *bare.target_ids)
            own[ids] = Encoded(tokenizer.decode(ids), ids, len(before), subject.subject)
        # The position that predicts the old object is not kept: it is what is to change.
        positions = range(subject.subject_last, len(before) - 1)
        if positions:
            row = Encoded(tokenizer.decode(before), before, len(before), subject.subject)
            kept[before] = (row, tuple(positions))
    return tuple(own.values()), tuple(kept.values())


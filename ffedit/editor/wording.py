"""In which words is the new fact trained, and which words must not change?

One prompt alone would be learnt by heart. ROME (arXiv 2202.05262, section 3.1) puts random prefixes before it and
keeps the subject's *essence* with a KL term at "{subject} is a". Both come from the model here, sampled with a seed. In
addition the model continues the bare subject in its own words many times: where it says the old object, the new one
is put in its place and trained; everywhere else, what it says about the subject is to stay what it was. So the edit
generalises to the model's own ways of stating the fact, and the subject's other facts are kept, without any prompt
having to be written by hand.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch

from ffedit import readout, replay
from ffedit.anatomy import Editable
from ffedit.editor.config import EditConfig
from ffedit.facts import Fact
from ffedit.tokens import Encoded, decode, encode

# Rows and tokens of the model's own text in which places for the subject are looked for.
MENTION_POOL = 32
ESSENCE = ("{} is a", "{}", "{} is known for")


@dataclass(frozen=True)
class Phrasing:
    """A text about the subject that goes on as the model itself would.

    Attributes:
        text: up to where the old object stood, with the new one as answer; where it did not occur, all of it and no
            answer.
        kept: positions whose next-token distribution is to stay what it was.
    """

    text: Encoded
    kept: tuple[int, ...]


@dataclass(frozen=True)
class Wording:
    """The texts that one value is optimised on, each with the subject in it.

    Attributes:
        prompts: the fact's prompt, bare and after prefixes, with the new object as answer.
        phrasings: the model's own continuations of the subject.
        essence: essence prompts; the last position's distribution is to stay.
        swap: first tokens of the old and of the new object. Wherever the model would have begun to say the old one, it
            is to begin the new one with the same probability; "to stay" means to stay but for that.
        prefixes: the sampled prefixes, for the provenance.
    """

    prompts: tuple[Encoded, ...]
    phrasings: tuple[Phrasing, ...]
    essence: tuple[Phrasing, ...]
    swap: tuple[int, int]
    prefixes: tuple[str, ...]

    @property
    def stated(self) -> tuple[Encoded, ...]:
        """All texts that end in the new object: prompts, then own phrasings."""
        return (*self.prompts, *(p.text for p in self.phrasings if p.text.target_ids))


def prefixes(editable: Editable, config: EditConfig) -> tuple[str, ...]:
    """Short texts of the model's own, as contexts before a prompt."""
    rows = readout.own_text(editable, config.contexts, max(config.context_tokens, default=1), config.seed)
    lengths = [config.context_tokens[i % len(config.context_tokens)] for i in range(len(rows))]
    texts = [
        decode(editable.tokenizer, row[:length], special=False).strip()
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
    if fact.previous is not None:
        old = encode(tokenizer, fact.text, fact.previous, fact.span).target_ids
    else:
        old = readout.with_own_answer(editable, encode(tokenizer, fact.text, span=fact.span)).target_ids
    return Wording(
        tuple(prompts),
        _phrasings(editable, fact, old, bare.target_ids, config),
        tuple(Phrasing(e, (len(e.ids) - 1,)) for e in essence),
        (old[0], bare.target_ids[0]),
        leads,
    )


def _phrasings(
    editable: Editable, fact: Fact, old: tuple[int, ...], new: tuple[int, ...], config: EditConfig
) -> tuple[Phrasing, ...]:
    """Continue the subject in the model's own words; where the old object comes, put the new one."""
    bare = encode(editable.tokenizer, fact.subject, span=(0, len(fact.subject)))
    assert bare.subject is not None
    starts = [(bare.ids, bare.subject)] * (config.phrasings - config.phrasings // 2)
    starts += _mentions(editable, fact.subject, bare.ids[: bare.subject[0]], config)
    generator = torch.Generator().manual_seed(config.seed + 1)
    said = readout.continuations(editable, [ids for ids, _ in starts], config.phrasing_tokens, generator)
    found: dict[tuple[int, ...], Phrasing] = {}
    for (start, subject), continuation in zip(starts, said, strict=True):
        if editable.tokenizer.eos_token_id in continuation:
            continuation = continuation[: continuation.index(editable.tokenizer.eos_token_id)]
        at = next((i for i in range(len(continuation)) if tuple(continuation[i : i + len(old)]) == old), None)
        before = (*start, *continuation[:at])
        ids = before if at is None else (*before, *new)
        # The last position of all predicts nothing that was said.
        kept = tuple(range(subject[1] - 1, len(before) - (at is None)))
        if kept or at is not None:
            found[ids] = Phrasing(Encoded(decode(editable.tokenizer, ids), ids, len(before), subject), kept)
    return tuple(found.values())


def _mentions(
    editable: Editable, subject: str, opening: tuple[int, ...], config: EditConfig
) -> list[tuple[tuple[int, ...], tuple[int, int]]]:
    """The subject in the middle of a sentence: after those of the model's own words that it most likely follows.

    Many statements of a fact name the subject late ("The capital of France is"); the bare subject begins none of them.

    Returns:
        token ids up to the subject's last, and the subject's place in them.
    """
    inside = encode(editable.tokenizer, f"The {subject}", span=(4, 4 + len(subject)))
    assert inside.subject is not None
    name = inside.ids[inside.subject[0] :]
    pool = torch.tensor(readout.own_text(editable, MENTION_POOL, MENTION_POOL, config.seed + 2))
    if pool.shape[1] <= config.mention_tokens:
        return []
    reads = torch.cartesian_prod(torch.arange(len(pool)), torch.arange(config.mention_tokens - 1, pool.shape[1]))
    with torch.no_grad():
        expected = replay.forward(editable, pool, reads).float().log_softmax(-1)[:, name[0]]
    leads: dict[tuple[int, ...], tuple[int, ...]] = {}
    for i in expected.argsort(descending=True).tolist():
        if len(leads) == config.phrasings // 2:
            break
        row, last = reads[i].tolist()
        lead = tuple(pool[row, last + 1 - config.mention_tokens : last + 1].tolist())
        leads.setdefault(lead[-2:], lead)  # one for each pair of words before the name: many ways to say something
    first = len(opening) + config.mention_tokens
    return [((*opening, *lead, *name), (first, first + len(name))) for lead in leads.values()]

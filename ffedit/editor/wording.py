"""In which words is the new fact trained, and which words must not change?

One prompt alone would be learnt by heart. ROME (arXiv 2202.05262, section 3.1) puts random prefixes before it and
keeps the subject's *essence* with a KL term at "{subject} is a". Both come from the model here, sampled with a seed. In
addition the model continues the bare subject in its own words many times: where it says the old object, the new one
is put in its place and trained; everywhere else, what it says about the subject is to stay what it was. So the edit
generalises to the model's own ways of stating the fact, and the subject's other facts are kept, without any prompt
having to be written by hand.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from ffedit import readout, replay
from ffedit.anatomy import Editable
from ffedit.corpus import own_text
from ffedit.editor.config import EditConfig
from ffedit.editor.namesakes import namesakes
from ffedit.errors import ModelError
from ffedit.facts import Fact
from ffedit.room import halving
from ffedit.tokens import Encoded, decode, encode

# Rows and tokens of the model's own text in which places for the subject are looked for.
MENTION_POOL = 32


@dataclass(frozen=True)
class Phrasing:
    """A text about the subject.

    Attributes:
        text: up to where the old object stood, with the new one as answer; where none is stated, all of it and no
            answer.
        kept: positions whose next-token distribution is to stay what it was.
        fact: which of the subject's facts it states; of no meaning without an answer.
    """

    text: Encoded
    kept: tuple[int, ...] = ()
    fact: int = 0


@dataclass(frozen=True)
class Wording:
    """The texts that one value is optimised on, each with the subject in it.

    Facts that share a subject share its key and thus their value: they are worded together, and solved jointly (one
    value for each would leave each about half, arXiv 2502.07322).

    Attributes:
        prompts: each fact's prompt, bare and after prefixes, with the new object as answer; the bare one comes first.
        phrasings: the model's own continuations of the subject.
        essence: essence prompts; the last position's distribution is to stay.
        swaps: first tokens of the old and of the new object of each fact; in a chat, also as they stand in running
            text. Wherever the model would have begun to say the old one, it is to begin the new one with the same
            probability; "to stay" means to stay but for that.
        prefixes: the sampled prefixes, for the provenance.
        namesakes: texts that end in another name where the subject's could stand, which its edit must not move.
    """

    prompts: tuple[Phrasing, ...]
    phrasings: tuple[Phrasing, ...]
    essence: tuple[Phrasing, ...]
    swaps: tuple[tuple[int, int], ...]
    prefixes: tuple[str, ...]
    namesakes: tuple[Encoded, ...] = ()

    @property
    def facts(self) -> int:
        """How many facts it words."""
        return len({p.fact for p in self.prompts})

    @property
    def texts(self) -> tuple[Encoded, ...]:
        """All texts that the subject stands in."""
        return tuple(p.text for p in (*self.prompts, *self.essence, *self.phrasings))

    @property
    def names(self) -> set[tuple[int, ...]]:
        """The subject's token ids, in each way in which they stand in these texts."""
        return {text.ids[slice(*text.subject)] for text in self.texts if text.subject is not None}

    @property
    def stated(self) -> tuple[Encoded, ...]:
        """All texts that end in a new object: prompts, then own phrasings."""
        return tuple(p.text for p in (*self.prompts, *self.phrasings) if p.text.target_ids)


def prefixes(editable: Editable, config: EditConfig) -> tuple[str, ...]:
    """Short texts of the model's own, as contexts before a prompt."""
    rows = own_text(editable, config.contexts, max(config.context_tokens, default=1), config.seed)
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


@dataclass(frozen=True, eq=False)
class _Pool:
    """The model's own text, and how likely some tokens are to follow at its places.

    Attributes:
        ids: token ids, [rows, tokens].
        reads: (row, position) pairs, [k, 2].
        follow: log-probability at these places of each token asked for, [k].
    """

    ids: Tensor
    reads: Tensor
    follow: dict[int, Tensor]


def word(editable: Editable, groups: Sequence[Sequence[Fact]], config: EditConfig) -> list[Wording]:
    """Gather the texts for some subjects, each with its facts; a subject's texts do not depend on the others.

    Raises:
        FactError: subject, prompt or object do not fit the tokenizer or the model.
        ModelError: there is no memory for a single text.
    """
    leads = prefixes(editable, config) if config.contexts else ()
    pool = _pool(editable, [facts[0].subject for facts in groups], config) if config.phrasings else None
    wordings = [_word(editable, facts, leads, pool, config) for facts in groups]
    if not (config.steady and config.namesakes):
        return wordings
    return [replace(wording, namesakes=namesakes(editable, wording.texts, config)) for wording in wordings]


def _word(
    editable: Editable, facts: Sequence[Fact], leads: tuple[str, ...], pool: _Pool | None, config: EditConfig
) -> Wording:
    limit, subject = editable.max_tokens, facts[0].subject
    # The bare prompts come first: whatever is wrong with a fact shows here.
    bare = [editable.encode(fact.text, fact.new_object, fact.span, limit) for fact in facts]
    prompts = []
    for i, fact in enumerate(facts):
        moved = [_after(lead, fact.text, fact.span) for lead in leads]
        longer = [editable.encode(text, fact.new_object, span) for text, span in moved]
        prompts += [Phrasing(p, fact=i) for p in (bare[i], *longer) if len(p.ids) <= limit]
    essence = []
    for form in config.essence_prompts:
        start = form.index("{}")
        text = editable.encode(form.replace("{}", subject), span=(start, start + len(subject)))
        if len(text.ids) <= limit:
            essence.append(Phrasing(text, (len(text.ids) - 1,)))
    objects = [(_old(editable, fact), new.target_ids) for fact, new in zip(facts, bare, strict=True)]
    swaps = tuple((old[0], new[0]) for old, new in objects)
    if editable.chat:  # the model's own text is plain, and an object in it may be other tokens than where a turn begins
        objects = [_running(editable, fact, old) for fact, (old, _) in zip(facts, objects, strict=True)]
        swaps += tuple((old[0], new[0]) for old, new in objects)
    return Wording(
        tuple(prompts),
        _phrasings(editable, subject, objects, pool, config) if pool is not None else (),
        tuple(essence),
        swaps,
        leads,
    )


def _old(editable: Editable, fact: Fact) -> tuple[int, ...]:
    """The old object's token ids; where none is named, those of what the model says."""
    if fact.previous is not None:
        return editable.encode(fact.text, fact.previous, fact.span).target_ids
    return readout.with_own_answer(editable, editable.encode(fact.text, span=fact.span)).target_ids


def _running(editable: Editable, fact: Fact, old: tuple[int, ...]) -> tuple[tuple[int, ...], tuple[int, ...]]:
    """The ids of the old and of the new object where no turn begins: after the prompt as plain text."""
    said = fact.previous or readout.words(editable, old)
    before, after = (
        encode(editable.tokenizer, fact.text, answer, fact.span).target_ids for answer in (said, fact.new_object)
    )
    return before or old, after


def _phrasings(
    editable: Editable,
    subject: str,
    objects: Sequence[tuple[tuple[int, ...], tuple[int, ...]]],
    pool: _Pool,
    config: EditConfig,
) -> tuple[Phrasing, ...]:
    """Continue the subject in the model's own words; where an old object comes, put the new one."""
    bare = encode(editable.tokenizer, subject, span=(0, len(subject)))
    assert bare.subject is not None
    starts = [(bare.ids, bare.subject)] * (config.phrasings - config.phrasings // 2)
    starts += _mentions(_name(editable, subject), bare.ids[: bare.subject[0]], pool, config)
    starts = [(ids, place) for ids, place in starts if len(ids) < editable.max_tokens]
    generator = torch.Generator().manual_seed(config.seed + 1)
    said = readout.continuations(editable, [ids for ids, _ in starts], config.phrasing_tokens, generator)
    found: dict[tuple[int, ...], Phrasing] = {}
    for (start, place), continuation in zip(starts, said, strict=True):
        if editable.tokenizer.eos_token_id in continuation:
            continuation = continuation[: continuation.index(editable.tokenizer.eos_token_id)]
        at, fact = _first_stated(continuation, [old for old, _ in objects])
        before = (*start, *continuation[:at])
        ids = before if fact is None else (*before, *objects[fact][1])
        # The last position of all predicts nothing that was said.
        kept = tuple(range(place[1] - 1, len(before) - (at is None)))
        if (kept or fact is not None) and len(ids) <= editable.max_tokens:
            text = Encoded(decode(editable.tokenizer, ids), ids, len(before), place)
            found[ids] = Phrasing(text, kept, fact or 0)
    return tuple(found.values())


def _first_stated(ids: Sequence[int], olds: Sequence[tuple[int, ...]]) -> tuple[int | None, int | None]:
    """Where an old object first stands in `ids`, and which fact's it is; no fact's, where it is that of several."""
    for at in range(len(ids)):
        facts = [i for i, old in enumerate(olds) if tuple(ids[at : at + len(old)]) == old]
        if facts:
            return at, facts[0] if len(facts) == 1 else None
    return None, None


def _name(editable: Editable, subject: str) -> tuple[int, ...]:
    """The subject's token ids in the middle of a sentence."""
    inside = encode(editable.tokenizer, f"The {subject}", span=(4, 4 + len(subject)))
    assert inside.subject is not None
    return inside.ids[inside.subject[0] :]


def _pool(editable: Editable, subjects: Sequence[str], config: EditConfig) -> _Pool:
    """Read in the model's own text where each of `subjects` would be named."""
    ids = torch.tensor(own_text(editable, MENTION_POOL, MENTION_POOL, config.seed + 2))
    first = config.mention_tokens - 1
    reads = torch.cartesian_prod(torch.arange(len(ids)), torch.arange(min(first, ids.shape[1]), ids.shape[1]))
    tokens = sorted({_name(editable, subject)[0] for subject in subjects})

    @torch.no_grad()
    def read(rows: Sequence[int]) -> Tensor:
        here = reads[: len(rows) * len(reads) // len(ids)]  # of each row, the same positions
        return replay.forward(editable, ids[list(rows)], here).float().log_softmax(-1)[:, tokens].cpu()

    follow = torch.zeros(0, len(tokens))
    if len(reads):
        follow = torch.cat(list(halving(read, range(len(ids)), ModelError(readout.NO_ROOM))))
    return _Pool(ids, reads, dict(zip(tokens, follow.T, strict=True)))


def _mentions(
    name: tuple[int, ...], opening: tuple[int, ...], pool: _Pool, config: EditConfig
) -> list[tuple[tuple[int, ...], tuple[int, int]]]:
    """The subject in the middle of a sentence: after those of the model's own words that it most likely follows.

    Many statements of a fact name the subject late ("The capital of France is"); the bare subject begins none of them.

    Returns:
        token ids up to the subject's last, and the subject's place in them.
    """
    leads: dict[tuple[int, ...], tuple[int, ...]] = {}
    for i in pool.follow[name[0]].argsort(descending=True).tolist():
        if len(leads) == config.phrasings // 2:
            break
        row, last = pool.reads[i].tolist()
        lead = tuple(pool.ids[row, last + 1 - config.mention_tokens : last + 1].tolist())
        leads.setdefault(lead[-2:], lead)  # one for each pair of words before the name: many ways to say something
    first = len(opening) + config.mention_tokens
    return [((*opening, *lead, *name), (first, first + len(name))) for lead in leads.values()]

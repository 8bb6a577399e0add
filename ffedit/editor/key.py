"""Build the prompts that state a fact, and read its key k*: the memory coefficients at the subject's last token.

A value optimised on a single prompt would overfit to it. ROME (arXiv 2202.05262, section 3.1) puts random prefixes,
sampled from the model, before the prompt and preserves the subject's *essence* with a KL term at "{subject} is a". k*
is the mean over the texts that state the fact (eq. 3). All of these have the same words around the subject, and an
edit at such a key has less effect behind other words; so a share of k* is the mean over texts that only mention the
subject. The same vector is used wherever the algebra needs a key.

Without a BOS, the first token of a text may be an attention sink, whose key carries nothing of the subject: a change
there would affect every text. In a text that begins with a subject of one token the first layers' attention has brought
the name to the token behind it, and the key is read there (`without_sinks`).
"""

from __future__ import annotations

from collections.abc import Collection, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import torch
from torch import Tensor

from ffedit.algebra import updates
from ffedit.algebra.linalg import double
from ffedit.editor.config import EditConfig
from ffedit.errors import EditError
from ffedit.facts.fact import Fact
from ffedit.facts.fact_token import FactToken
from ffedit.facts.text import occurrences
from ffedit.inference import replay
from ffedit.inference.batching import TOKENS
from ffedit.inference.contexts import Context, passes
from ffedit.inference.generation import own_answers
from ffedit.inference.names import MENTIONS, mention
from ffedit.inference.own_text import contexts
from ffedit.model.editable import Editable
from ffedit.model.feed_forward import FeedForward, Keys
from ffedit.model.hooks import watched
from ffedit.model.memory import Address, KeyValueMemory
from ffedit.model.tokenization import Encoded

# A subject's key at the first position is an attention sink's where its cosine with the subject's keys elsewhere is
# smaller. It is far larger between one name's keys in different contexts, and nearly 0 between a sink's and a name's.
SINK = 0.3


@dataclass(frozen=True)
class PromptSet:
    """Texts that one value is optimised on, each containing the subject.

    Facts that share a subject share its key and thus their value: their prompts form one set, and they are solved
    jointly (one value for each would leave each about half, arXiv 2502.07322).
    """

    # each fact's prompt and `also`, bare and after prefixes, with the new object as answer; the bare prompt comes first
    prompts: tuple[Encoded, ...]
    fact_of: tuple[int, ...]  # for each of `prompts`, index of the subject's fact that it states
    essence: tuple[Encoded, ...]  # essence prompts, whose distribution at the last position should stay
    prefixes: tuple[str, ...]  # prefixes as sampled
    mentions: tuple[Encoded, ...] = ()  # texts that say nothing of the subject but its name
    mention_share: float = 0.0  # share of their mean key in k*
    # prompts whose answers should stay: the distribution at each token of the answer, without one at the last token
    keep: tuple[Encoded, ...] = ()
    sinks: int = 0  # number of texts left out because the subject is an attention sink in them
    behind: int = 0  # number of prompts read at the token behind the subject for that reason

    def without(self, sinks: Collection[int]) -> PromptSet:
        """Leave out the texts `sinks`, indices in `texts`, or read them elsewhere.

        Prompts are read at the token behind their subject. Where they cannot be (`read_behind`) they are left out,
        unless no other prompt states their fact.
        """
        behind = {
            i: text for i in sinks if i < len(self.prompts) and (text := read_behind(self.prompts[i])) is not None
        }
        stated = {fact for i, fact in enumerate(self.fact_of) if i not in sinks or i in behind}
        sinks = [i for i in sinks if i not in behind and (i >= len(self.prompts) or self.fact_of[i] in stated)]
        essence, keep = len(self.prompts), len(self.prompts) + len(self.essence)  # indices of the first in `texts`
        return replace(
            self,
            prompts=tuple(behind.get(i, text) for i, text in enumerate(self.prompts) if i not in sinks),
            fact_of=tuple(fact for i, fact in enumerate(self.fact_of) if i not in sinks),
            essence=tuple(text for i, text in enumerate(self.essence, essence) if i not in sinks),
            keep=tuple(text for i, text in enumerate(self.keep, keep) if i not in sinks),
            sinks=len(sinks),
            behind=len(behind),
        )

    @property
    def facts(self) -> int:
        """Number of facts that the prompts state."""
        return len(set(self.fact_of))

    @property
    def shares(self) -> Tensor:
        """Share of each key in k*, prompts first, then mentions, [prompts + mentions], float64; the shares sum to 1."""
        kinds = (len(self.prompts), 1 - self.mention_share), (len(self.mentions), self.mention_share)
        return torch.cat([torch.full((count,), share / max(1, count), dtype=torch.float64) for count, share in kinds])

    @property
    def texts(self) -> list[Encoded]:
        """All prompts, then the essence prompts, then `keep`."""
        return [*self.prompts, *self.essence, *self.keep]


def read_behind(text: Encoded) -> Encoded | None:
    """Return `text` read behind its subject; None where the answer begins there, or its site is another token."""
    assert text.subject is not None
    start, end = text.subject
    if text.site != end - 1 or end >= text.answer:
        return None
    return replace(text, subject=(start, end + 1), fact_token="subject_last")


def build_prompts(editable: Editable, groups: Sequence[Sequence[Fact]], config: EditConfig) -> list[PromptSet]:
    """Build the prompt set of each subject's facts; FactError where one does not fit the tokenizer or the model."""
    numbers = config.prompts
    leads = contexts(editable, numbers.contexts, numbers.context_tokens, config.seed) if numbers.contexts else ()
    keep_prompts = iter(kept(editable, [fact for facts in groups for fact in facts], config.key.fact_token))
    prompt_sets = []
    for facts in groups:
        keep = tuple(text for _ in facts for text in next(keep_prompts) if text.subject is not None)
        prompt_sets.append(replace(_prompt_set(editable, facts, leads, config), keep=keep))
    return prompt_sets


def _prompt_set(editable: Editable, facts: Sequence[Fact], leads: tuple[str, ...], config: EditConfig) -> PromptSet:
    """Build the prompt set of one subject; texts of more tokens than the model takes are left out."""
    limit, subject, at = editable.max_tokens, facts[0].subject, config.key.fact_token
    # The bare prompts come first, so that an error in a fact is raised on its own prompt.
    stated = [(i, *statement) for i, fact in enumerate(facts) for statement in fact.statements]
    bare = [replace(editable.encode(body, facts[i].new_object, span, limit), fact_token=at) for i, body, span in stated]
    prompts: list[tuple[int, Encoded]] = []
    for bare_text, (i, body, (start, end)) in zip(bare, stated, strict=True):
        prompts.append((i, bare_text))
        for lead in leads:  # the prompt behind a prefix, as a sentence of its own
            prefix = sentence(lead)
            span = start + len(prefix), end + len(prefix)
            text = replace(editable.encode(prefix + body, facts[i].new_object, span), fact_token=at)
            prompts += [(i, text)] if len(text.ids) <= limit else []
    forms = config.prompts.essence_prompts if config.value.kl_weight else ()
    essence_texts = [_essence_prompt(editable, form, subject, leads, at) for form in forms]
    essence = [text for text in essence_texts if len(text.ids) <= limit]
    share = config.key.mention_share if at != "last" else 0.0  # a mention has no prompt behind the subject
    mentions = [mention(editable, subject, lead, at) for lead in MENTIONS] if share else []
    mentions = [text for text in mentions if len(text.ids) <= limit]
    fact_of, texts = zip(*prompts, strict=True)
    return PromptSet(texts, fact_of, tuple(essence), leads, tuple(mentions), share if mentions else 0.0)


def kept(editable: Editable, facts: Sequence[Fact], fact_token: FactToken) -> list[list[Encoded]]:
    """Encode the `keep` prompts of each fact with their answers: the fact's, or the first word of the model's own.

    `subject` is None in a prompt to which no δ is added: where it does not name the subject, or `fact_token` is
    "last". FactError where a prompt is too long for the model.
    """
    texts: list[list[Encoded]] = []
    for fact in facts:
        texts.append([])
        for probe in fact.probes("keep"):
            span = None if fact_token == "last" else next(occurrences(probe.prompt, fact.subject), None)
            text = editable.encode(probe.prompt, probe.target or "", span, editable.max_tokens)
            texts[-1].append(replace(text, fact_token=fact_token))
    unanswered = [text for fact_texts in texts for text in fact_texts if not text.target_ids]
    answers = iter(own_answers(editable, unanswered) if unanswered else ())
    return [[text if text.target_ids else next(answers) or text for text in fact_texts] for fact_texts in texts]


def sentence(lead: str) -> str:
    """Return a prefix as a sentence of its own, with the space behind it."""
    return lead + (" " if lead[-1] in ".!?" else ". ")


def _essence_prompt(
    editable: Editable, form: str, subject: str, leads: Sequence[str], fact_token: FactToken
) -> Encoded:
    """Encode `form` with `subject` in its slot; behind a prefix where the subject would begin the text."""
    for before in ("", *(sentence(lead) for lead in leads[:1])):
        start = len(before) + form.index("{}")
        text = editable.encode(before + form.replace("{}", subject), span=(start, start + len(subject)))
        text = replace(text, fact_token=fact_token)
        if text.site:
            break
    return text


@dataclass(frozen=True, eq=False)
class LayerKeys:
    """Keys and residual stream of one layer on the texts of n prompt sets, in the model as it is."""

    K: Tensor  # k* of each set, mentions included, [Σ d_ff, n], float64, on the device where the layer is solved
    # residual stream behind the layer at the subject's last token, mean over the texts that state the facts,
    # [d_model, n], float64
    streams: Tensor
    # for each set, the keys at the subject's last token whose mean is k*, [texts, Σ d_ff], and their shares, [texts]
    same: Sequence[Tensor]
    shares: Sequence[Tensor]

    def context_spread(self, weight: float) -> Tensor:
        """Return the spread of the keys over their contexts, [texts, Σ d_ff] (`algebra.updates.context_spread`)."""
        return updates.context_spread(zip(self.K.T, self.same, self.shares, strict=True), weight)


def read_keys(editable: Editable, ff: FeedForward, prompt_sets: Sequence[PromptSet]) -> LayerKeys:
    """Read the keys of all prompt sets in a layer, concatenated over its memories; their texts share batches."""
    # Without the essence prompts: their distributions should stay, so that δ need not arrive there in full.
    texts = [text for prompt_set in prompt_sets for text in (*prompt_set.prompts, *prompt_set.mentions)]
    keys, streams = read_at(editable, ff, texts)
    shares = [prompt_set.shares for prompt_set in prompt_sets]
    sizes = [len(share) for share in shares]
    set_keys, set_streams = list(keys.split(sizes)), list(streams.split(sizes))
    means = [share.to(rows.device) @ rows for rows, share in zip(map(double, set_keys), shares, strict=True)]
    mean_streams = [double(rows[: len(p.prompts)]).mean(0) for rows, p in zip(set_streams, prompt_sets, strict=True)]
    return LayerKeys(torch.stack(means, 1).to(ff.solve_device), torch.stack(mean_streams, 1), set_keys, shares)


def without_sinks(editable: Editable, ff: FeedForward, prompt_sets: Sequence[PromptSet]) -> list[PromptSet]:
    """Leave out texts in which the subject's key is an attention sink's (`PromptSet.without`).

    A sink is recognised by comparison with the subject's keys in other texts and in mentions, at none of which it
    comes first; where there are neither, nothing is done.
    """
    result = list(prompt_sets)
    texts = [[*prompt_set.texts, *prompt_set.mentions] for prompt_set in result]
    first = [torch.tensor([text.site == 0 for text in subject_texts]) for subject_texts in texts]
    doubtful = [i for i, at in enumerate(first) if at.any() and not at.all()]
    keys = double(read_at(editable, ff, [text for i in doubtful for text in texts[i]])[0])
    for i, subject_keys in zip(doubtful, keys.split([len(first[i]) for i in doubtful]), strict=True):
        alike = torch.cosine_similarity(subject_keys, subject_keys[~first[i]].mean(0, keepdim=True))
        result[i] = result[i].without([row for row in first[i].nonzero()[:, 0].tolist() if float(alike[row]) < SINK])
    return result


def read_at(editable: Editable, ff: FeedForward, texts: Sequence[Encoded]) -> tuple[Tensor, Tensor]:
    """Return keys [texts, Σ d_ff] and residual stream [texts, d_model] of a layer at each text's site."""
    ((keys, streams),) = read_layers(editable, [ff], texts)
    return keys, streams


def read_layers(
    editable: Editable, ff_layers: Sequence[FeedForward], texts: Sequence[Encoded]
) -> list[tuple[Tensor, Tensor]]:
    """Return for each layer what `read_at` returns, by one pass over the texts.

    Texts are run as far as their site, through the layers up to the highest; beginnings that they share are run once.
    """
    if not texts:
        return [(torch.zeros(0, sum(ff.sizes)), torch.zeros(0, editable.d_model)) for ff in ff_layers]
    last = max(ff.layer for ff in ff_layers)

    def read(ids: Tensor, inputs: dict[str, Any], at: Tensor) -> list[tuple[Tensor, Tensor]]:
        # Only the rows asked for are kept in memory, not those of all tokens in all layers.
        rows = at[:, 0] * ids.shape[1] + at[:, 1]
        keys = [dict[Address, Tensor]() for _ in ff_layers]
        streams: dict[int, Tensor] = {}

        def take(captured: dict[Address, Tensor], memory: KeyValueMemory, seen: Keys) -> None:
            captured[memory.address] = seen.whole[rows.to(seen.keys.device)]

        def take_stream(number: int, output: Tensor) -> None:
            streams[number] = output.reshape(-1, output.shape[-1])[rows.to(output.device)]

        with ExitStack() as stack:
            for i, ff in enumerate(ff_layers):
                stack.enter_context(ff.watched(partial(take, keys[i])))
                stack.enter_context(watched(editable.layers[ff.layer], partial(take_stream, i)))
            replay.run_to(editable, ids, last, **inputs)
        return [(ff.joined(captured), streams[i]) for i, (ff, captured) in enumerate(zip(ff_layers, keys, strict=True))]

    beginnings, reads = [text.ids[: text.site + 1] for text in texts], []
    index: dict[Context, int] = {}
    refusal = EditError("not enough memory to read the key of a single text; use a smaller dtype, or another --device")
    for batch in passes(editable, set(beginnings), TOKENS, read, refusal, keep=False):
        index |= {context: len(index) + i for i, context in enumerate(batch.contexts)}
        reads.append(batch.read)
    order = torch.tensor([index[context] for context in beginnings])

    def ordered(rows: Sequence[Tensor]) -> Tensor:
        return torch.cat(list(rows))[order.to(rows[0].device)]

    by_layer = (zip(*layer_reads, strict=True) for layer_reads in zip(*reads, strict=True))
    return [(ordered(keys), ordered(streams)) for keys, streams in by_layer]

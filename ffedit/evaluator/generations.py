"""Free generation: greedy, until it is clear whether it says an object, and sampled text about a subject.

The first tokens are known from the pass that scores the prompt's objects, as far as they agree with an object's tokens.
They settle most prompts: the generated text is no prefix of the object, or goes beyond it. Only the others are
continued.

Sampled text is drawn as in ROME: from the five likeliest tokens, to 100 tokens with the prompt. Each prompt has random
numbers of its own, so that its text depends neither on the other prompts nor on the number of processes.
"""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass
from hashlib import sha256

import numpy as np
import torch

from ffedit.evaluator.formulas import exact_match
from ffedit.evaluator.prompts import Questions
from ffedit.evaluator.responses import Answer, Context
from ffedit.inference import generation
from ffedit.inference.generation import words
from ffedit.model.editable import Editable
from ffedit.model.tokenization import Encoded, decode

# Tokens of an answer that are shown in reports.
SAID_TOKENS = 8
SAMPLED_TOKENS, SAMPLED_TOP = 100, 5
SAMPLE_SEED = 0


@dataclass(frozen=True)
class GenerationRequest:
    """A prompt to continue greedily, with the answer to look for."""

    text: Encoded  # the prompt with its answer
    count: int  # number of tokens to generate
    # Whether fewer tokens suffice once the text so far is no prefix of the answer or of any of `others`.
    settled: bool = True
    # The prompt with the other objects to look for: aliases of the answer, the competing object.
    others: tuple[Encoded, ...] = ()


def requests(q: Questions, kinds: Collection[str]) -> Iterator[GenerationRequest]:
    """Yield the greedy generations after the edited prompt, and after the prompts of a fact of these `kinds`."""

    def whole(text: Encoded, *others: Encoded) -> GenerationRequest:
        # One more token: the object may be the beginning of a longer word.
        return GenerationRequest(text, max(len(each.target_ids) for each in (text, *others)) + 1, others=others)

    own = whole(q.own.new, q.own.true, *q.own.new_aliases)
    yield GenerationRequest(own.text, max(SAID_TOKENS, own.count), settled=False)
    for kind in ("paraphrases", "neighbors", "same_subject", "with_edit"):
        for pair in getattr(q, kind) if kind in kinds else ():
            if kind == "paraphrases":
                yield whole(pair.new, pair.true, *pair.new_aliases)
            elif pair.named:
                yield whole(pair.true, pair.new, *pair.true_aliases)
            else:
                yield GenerationRequest(pair.true, len(pair.true.target_ids))
    if "portability" in kinds:
        yield from (whole(prompt.text, *prompt.aliases) for prompt in q.portability)
    if "locality" in kinds:
        yield from (GenerationRequest(prompt.text, len(prompt.text.target_ids), settled=False) for prompt in q.stay)


class Generations:
    """Greedy continuations of prompts, as token ids."""

    def __init__(
        self, editable: Editable, requests: Sequence[GenerationRequest], answers: Mapping[Encoded, Answer]
    ) -> None:
        self._editable, self._answers = editable, answers
        self._said: dict[Context, tuple[int, ...]] = {}
        for request in requests:
            prompt, known = prompt_of(request.text), answers[request.text].said(request.text.target_ids)
            self._said[prompt] = max(self._said.get(prompt, ()), known, key=len)
        rest: dict[int, dict[Context, None]] = defaultdict(dict)
        for request in requests:
            if not self._settled(request):
                rest[request.count][prompt_of(request.text)] = None
        for count, prompts in sorted(rest.items()):
            said = generation.continuations(editable, list(prompts), count)
            self._said.update({prompt: tuple(ids) for prompt, ids in zip(prompts, said, strict=True)})

    def ids(self, text: Encoded) -> tuple[int, ...]:
        """Return the token ids of the greedy continuation of the prompt of `text`."""
        return self._said[prompt_of(text)]

    def words(self, text: Encoded) -> str:
        """Return the greedy continuation of the prompt of `text` as text, white space normalised."""
        return words(self._editable, self.ids(text))

    def begun(self, text: Encoded) -> str:
        """Return as much of the greedy continuation as is known, also where none was requested: its first tokens."""
        known = self._said.get(prompt_of(text)) or self._answers[text].said(text.target_ids)
        return words(self._editable, known)

    def answer(self, text: Encoded) -> str:
        """Return the answer of `text`, without its prompt."""
        return words(self._editable, text.target_ids)

    def says(self, text: Encoded, other: Encoded | None = None, aliases: Sequence[Encoded] = ()) -> bool:
        """Return whether the continuation says the whole answer or an alias, and not the longer answer of `other`."""
        longer = "" if other is None else self.answer(other)
        return exact_match(self.words(text), self.answer(text), longer, [*map(self.answer, aliases)])

    def begins_with(self, text: Encoded) -> bool:
        """Return whether the continuation begins with exactly the answer's tokens; for the model's own answers."""
        return self.ids(text)[: len(text.target_ids)] == text.target_ids

    def _settled(self, request: GenerationRequest) -> bool:
        said = self.ids(request.text)
        if len(said) >= request.count:
            return True
        # The last character may still lack bytes, which later tokens supply.
        begun = words(self._editable, said).rstrip("\ufffd")
        names = map(self.answer, (request.text, *request.others))
        return request.settled and not any(name.startswith(begun) for name in names)


def prompt_of(text: Encoded) -> Context:
    """Return the tokens before the answer."""
    return text.ids[: text.answer]


def sampled(editable: Editable, prompts: Sequence[Sequence[Encoded]]) -> list[list[str]]:
    """Sample a continuation of each fact's prompts and return both, up to `SAMPLED_TOKENS` tokens together, by fact.

    In a chat, the assistant's turn alone is returned. A prompt that is there twice for one fact is drawn twice.
    """
    flat = [prompt for group in prompts for prompt in group]
    count = max(1, SAMPLED_TOKENS - min((len(prompt.ids) for prompt in flat), default=0))
    draws = []
    for group in prompts:
        seen: Counter[Context] = Counter()
        for prompt in group:
            digest = sha256(repr((SAMPLE_SEED, prompt.ids, seen[prompt.ids])).encode()).digest()
            seen[prompt.ids] += 1
            draws.append(np.random.default_rng(int.from_bytes(digest[:8], "big")).random(count))
    numbers = torch.from_numpy(np.array(draws, dtype=np.float64).reshape(len(flat), count))
    said = generation.continuations(editable, [prompt.ids for prompt in flat], count, numbers=numbers, top=SAMPLED_TOP)
    texts = []
    for prompt, ids in zip(flat, said, strict=True):
        drawn = ids[: max(1, SAMPLED_TOKENS - len(prompt.ids))]
        whole = [*prompt.ids, *drawn]
        texts.append(words(editable, drawn) if editable.chat else decode(editable.tokenizer, whole, special=False))
    ordered = iter(texts)
    return [[next(ordered) for _ in group] for group in prompts]

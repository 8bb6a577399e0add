"""What a model says by itself: greedily until it is clear whether it says an object, and sampled text about a subject.

The beginning is known from the pass that scores the prompt's objects, as far as the model says an object's tokens. It
settles most prompts: what was said is no beginning of the object, or goes beyond it. Only the others are continued.

Sampled text is drawn as in ROME: from the five likeliest tokens, to 100 tokens with the prompt. Each prompt draws with
numbers of its own, so that its text does not depend on what is asked beside it, or by how many processes.
"""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from hashlib import sha256

import numpy as np
import torch

from ffedit.evaluator.metrics import exact_match
from ffedit.evaluator.responses import Answer, Context
from ffedit.inference import generation
from ffedit.inference.generation import words
from ffedit.model.editable import Editable
from ffedit.model.tokenization import Encoded, decode

# What a person is shown of an answer.
SAID_TOKENS = 8
SAMPLED_TOKENS, SAMPLED_TOP = 100, 5
SAMPLE_SEED = 0


@dataclass(frozen=True)
class GenerationRequest:
    """A text whose answer may be said.

    Attributes:
        text: the prompt with its answer.
        count: how many tokens are wanted of what is said.
        settled: whether fewer will do, once no more of the answer, nor of `others`, can follow.
        others: the prompt with what else decides: other names of the answer, the object that could stand there instead.
    """

    text: Encoded
    count: int
    settled: bool = True
    others: tuple[Encoded, ...] = ()


class Generations:
    """What a model says greedily after some prompts, as token ids."""

    def __init__(
        self, editable: Editable, wanted: Iterable[GenerationRequest], answers: Mapping[Encoded, Answer]
    ) -> None:
        self._editable = editable
        some = list(wanted)
        self._said: dict[Context, tuple[int, ...]] = {}
        for one in some:
            known = answers[one.text].said(one.text.target_ids)
            self._said[prompt_of(one.text)] = max(self._said.get(prompt_of(one.text), ()), known, key=len)
        rest: dict[int, dict[Context, None]] = defaultdict(dict)
        for one in some:
            if not self._settled(one):
                rest[one.count][prompt_of(one.text)] = None
        for count, prompts in sorted(rest.items()):
            said = generation.continuations(editable, list(prompts), count)
            self._said.update({prompt: tuple(ids) for prompt, ids in zip(prompts, said, strict=True)})

    def ids(self, text: Encoded) -> tuple[int, ...]:
        """What is said after the prompt of `text`."""
        return self._said[prompt_of(text)]

    def words(self, text: Encoded) -> str:
        """The same as text, white space normalised."""
        return words(self._editable, self.ids(text))

    def says(self, text: Encoded, other: Encoded | None = None, aliases: Sequence[Encoded] = ()) -> bool:
        """Whether the answer of `text`, or one of `aliases`, is said, whole, and not the longer one of `other`."""
        longer = "" if other is None else words(self._editable, other.target_ids)
        names = [words(self._editable, alias.target_ids) for alias in aliases]
        return exact_match(self.words(text), words(self._editable, text.target_ids), longer, names)

    def goes_on(self, text: Encoded) -> bool:
        """Whether the very tokens of the answer of `text` are said, whatever follows: for the model's own answers."""
        return self.ids(text)[: len(text.target_ids)] == text.target_ids

    def _settled(self, wanted: GenerationRequest) -> bool:
        said = self.ids(wanted.text)
        if len(said) >= wanted.count:
            return True
        # The last character may be unfinished.
        begun = words(self._editable, said).rstrip("\ufffd")
        names = (words(self._editable, one.target_ids) for one in (wanted.text, *wanted.others))
        return wanted.settled and not any(name.startswith(begun) for name in names)


def prompt_of(text: Encoded) -> Context:
    """The tokens before the answer."""
    return text.ids[: text.answer]


def sampled(editable: Editable, asked: Sequence[tuple[int, Encoded]], seed: int = SAMPLE_SEED) -> list[str]:
    """Text that each prompt begins, with it, up to `SAMPLED_TOKENS` tokens; in a chat, the assistant's turn alone.

    Args:
        editable: the model.
        asked: whose prompt (the place of its fact), and the prompt; given twice for one fact, it is drawn twice.
        seed: of all draws.
    """
    prompts = [prompt for _, prompt in asked]
    count = max(1, SAMPLED_TOKENS - min((len(prompt.ids) for prompt in prompts), default=0))
    seen: Counter[tuple[int, Context]] = Counter()
    numbers = torch.empty(len(prompts), count, dtype=torch.float64)
    for i, (owner, prompt) in enumerate(asked):
        digest = sha256(repr((seed, prompt.ids, seen[owner, prompt.ids])).encode()).digest()
        seen[owner, prompt.ids] += 1
        numbers[i] = torch.from_numpy(np.random.default_rng(int.from_bytes(digest[:8], "big")).random(count))
    said = generation.continuations(
        editable, [prompt.ids for prompt in prompts], count, numbers=numbers, top=SAMPLED_TOP
    )
    kept = [max(1, SAMPLED_TOKENS - len(prompt.ids)) for prompt in prompts]
    if editable.chat:
        return [words(editable, ids[:some]) for ids, some in zip(said, kept, strict=True)]
    return [
        decode(editable.tokenizer, [*prompt.ids, *ids[:some]], special=False)
        for prompt, ids, some in zip(prompts, said, kept, strict=True)
    ]

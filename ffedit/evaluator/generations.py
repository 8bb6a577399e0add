"""Free generation: greedy text, until it is clear whether it says an object, and sampled text about a subject.

The pass that scores a prompt's objects also gives the first generated tokens, as far as they agree with an object's
tokens. They settle most prompts: the generated text is no prefix of the object, or is longer. Only the others are
continued, from the keys and values that this pass left; in a model that is not `ragged`, from the prompt itself.

After the fact's own prompt and its paraphrases, generation continues to `TEXT_TOKENS` in any case, since only there it
shows whether an edit breaks the text behind the new object. All generation ends where the text or turn ends.

Sampled text is drawn as in ROME: from the five likeliest tokens, to 100 tokens with the prompt. Each prompt has random
numbers of its own, so that its text depends neither on the other prompts nor on the number of processes.
"""

from __future__ import annotations

import re
from collections import Counter, defaultdict
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager, nullcontext
from dataclasses import dataclass
from functools import partial
from hashlib import sha256
from itertools import chain, takewhile
from types import MappingProxyType
from typing import Any, TypeAlias

import numpy as np
import torch
from torch import Tensor, nn

from ffedit.errors import ModelError
from ffedit.evaluator.formulas import degenerate, exact_match, generation_entropy
from ffedit.evaluator.prompts import Pair, Prompt, Questions
from ffedit.inference import generation
from ffedit.inference.batching import TOKENS, split_on_oom
from ffedit.inference.contexts import NO_MEMORY, Context, Pass
from ffedit.inference.generation import Intervention, continue_from, until, words
from ffedit.inference.replay import Prefix
from ffedit.model.editable import Editable
from ffedit.model.hooks import other_weight
from ffedit.model.memory import KeyValueMemory
from ffedit.model.tokenization import Encoded, decode
from ffedit.progress import Progress, silent

# Numbers of tokens of an answer that reports show, and of a text that is checked for repetition.
SAID_TOKENS, TEXT_TOKENS = 8, 40
SAMPLED_TOKENS, SAMPLED_TOP = 100, 5
SAMPLE_SEED = 0
# Passes, at most, from which prompts to continue are collected for one batch.
PASSES = 8
# An end that the next token may change: a character that lacks bytes, a mark behind a digit (10, may become 10,000).
UNDECIDED = re.compile(r"(\ufffd+|(?<=\d)[.,])$")


@dataclass(frozen=True)
class GenerationRequest:
    """A prompt to continue greedily, with the answer to look for."""

    text: Encoded  # the prompt with its answer
    # Number of tokens that decide whether the answer is said; fewer suffice once the text is no prefix of the answer or
    # of any of `others`.
    count: int
    others: tuple[Encoded, ...] = ()  # the prompt with the other objects to look for: aliases, the competing object
    least: int = 0  # number of tokens to generate whatever they say, unless the text ends


def requests(q: Questions, kinds: Collection[str]) -> Iterator[GenerationRequest]:
    """Yield the requests for greedy text after the edited prompt, and after the fact's prompts of these `kinds`."""
    yield new_object(q.own, TEXT_TOKENS)
    # By kind: the prompts, and the function that makes the request for one.
    by_kind: dict[str, tuple[Iterable[Any], Callable[[Any], GenerationRequest]]] = {
        "paraphrases": (q.paraphrases, partial(new_object, least=TEXT_TOKENS)),
        "neighbors": (q.neighbors, true_object),
        "same_subject": (q.same_subject, true_object),
        "with_edit": (q.with_edit, true_object),
        "also": (q.also, new_object),
        "keep": (q.keep, _answer),
        "portability": (q.portability, _answer),
        "cross_lingual": (q.cross_lingual, _answer),
        "locality": (q.stay, _as_long),
    }
    for kind, (prompts, request) in by_kind.items():
        if kind in kinds:
            yield from map(request, prompts)


def new_object(pair: Pair, least: int = 0) -> GenerationRequest:
    """Request enough tokens to decide whether the new object follows the prompt of `pair`, and `least` in any case."""
    return _whole(pair.new, pair.true, *pair.new_aliases, least=least)


def true_object(pair: Pair, least: int = 0) -> GenerationRequest:
    """Request enough tokens to decide whether the true object follows the prompt of `pair`, and `least` in any case."""
    if pair.named:
        return _whole(pair.true, pair.new, *pair.true_aliases, least=least)
    return GenerationRequest(pair.true, len(pair.true.target_ids), least=least)


def _whole(text: Encoded, *others: Encoded, least: int = 0) -> GenerationRequest:
    # One more token, since an object may be the beginning of a longer word; two for that of a longer number: 10,000.
    counts = (len(answer.target_ids) + (2 if answer.text[-1:].isdigit() else 1) for answer in (text, *others))
    return GenerationRequest(text, max(counts), others, least)


def _answer(prompt: Prompt) -> GenerationRequest:
    return _whole(prompt.text, *prompt.aliases) if prompt.named else _as_long(prompt)


def _as_long(prompt: Prompt) -> GenerationRequest:
    """Request as many tokens as the answer has, to compare them with those before the edit."""
    size = len(prompt.text.target_ids)
    return GenerationRequest(prompt.text, size, least=size)


class Generations:
    """Greedy continuations of prompts, as token ids: `follow` begins them, `finish` completes the unsettled ones."""

    def __init__(self, editable: Editable, requests: Iterable[GenerationRequest], progress: Progress = silent) -> None:
        self._editable, self._stops, self._progress = editable, editable.ends, progress
        self._requests: dict[Context, list[GenerationRequest]] = defaultdict(list)
        # Texts for which the token behind the answer is needed, too.
        self.closed: set[Encoded] = set()
        for request in requests:
            self._requests[prompt_of(request.text)].append(request)
            if not request.least and request.count > len(request.text.target_ids):
                self.closed.add(request.text)
        self._argmax: Mapping[Context, int] = {}
        self._said: dict[Context, tuple[int, ...]] = {}
        # Prompts that were run but whose answers are not wholly scored yet.
        self._unscored: dict[Context, Prefix] = {}
        # Prompts to continue, by the number of tokens to generate.
        self._waiting: dict[int, list[tuple[Context, Prefix]]] = defaultdict(list)

    def follow(self, done: Pass[Tensor], argmax: Mapping[Context, int]) -> None:
        """Continue those prompts of a pass that the tokens known so far do not settle.

        `argmax` has the likeliest token after each context that was run so far.
        """
        self._argmax = argmax
        ran = zip(done.contexts, done.prefixes, strict=False)  # no prefixes where the model is not `ragged`
        self._unscored |= {context: prefix for context, prefix in ran if context in self._requests}
        for prompt, prefix in list(self._unscored.items()):
            if all(end in argmax for request in self._requests[prompt] for end in self._ends(request.text)):
                del self._unscored[prompt]
                if count := self._begin(prompt):
                    self._waiting[count].append((prompt, prefix))
        for count, waiting in self._waiting.items():
            passes = {prefix.past for _, prefix in waiting}  # each occupies memory with its keys and values
            if len(passes) >= PASSES or sum(len(prompt) for prompt, _ in waiting) >= TOKENS:
                _go_on([(self, count, *entry) for entry in waiting])
                waiting.clear()

    def _taken(self) -> list[Waiting]:
        """Return the waiting prompts, and clear the queue."""
        taken = [(self, count, *entry) for count, waiting in self._waiting.items() for entry in waiting]
        self._waiting.clear()
        return taken

    def finish(self, intervene: Intervention = nullcontext) -> None:
        """Continue the waiting prompts, and those whose keys and values no pass left.

        The latter are all prompts where `follow` was never called; `intervene` acts in the passes over them.
        """
        _go_on(self._taken())
        self.begin_rest(intervene)

    def begin_rest(self, intervene: Intervention = nullcontext) -> None:
        """Continue the prompts whose keys and values no pass left; `intervene` acts in the passes over them."""
        rest: dict[int, list[Context]] = defaultdict(list)
        for prompt in self._requests:
            if prompt not in self._said and (count := self._begin(prompt)):
                rest[count].append(prompt)
        for count, prompts in sorted(rest.items()):
            new = generation.continuations(self._editable, prompts, count, intervene=intervene, progress=self._progress)
            self._said.update({prompt: tuple(ids) for prompt, ids in zip(prompts, new, strict=True)})

    def _begin(self, prompt: Context) -> int:
        """Store the tokens known after `prompt`; return how many to generate, 0 where these settle its requests."""
        requests = self._requests[prompt]
        self._said[prompt] = max((self._known(request.text) for request in requests), key=len)
        unsettled = (request for request in requests if not self._settled(request))
        count = max((max(request.count, request.least) for request in unsettled), default=0)
        return min(count, self._editable.max_tokens + 1 - len(prompt))

    def _ends(self, text: Encoded) -> list[Context]:
        """Return the context of each token of an answer, and of the token behind it where that is needed."""
        return [text.ids[:end] for end in range(text.answer, len(text.ids) + (text in self.closed))]

    def _known(self, text: Encoded) -> tuple[int, ...]:
        """Return the known beginning of free generation: up to the first token that is not the answer's.

        As long as the answer's tokens are the argmax, teacher forcing and free generation are the same thing.
        """
        argmax = [self._argmax[context] for context in takewhile(self._argmax.__contains__, self._ends(text))]
        wrong = next((i for i, (a, t) in enumerate(zip(argmax, text.target_ids, strict=False)) if a != t), len(argmax))
        return tuple(argmax[: wrong + 1])

    def ids(self, text: Encoded) -> tuple[int, ...]:
        """Return the token ids of the greedy continuation of the prompt of `text`."""
        return self._said[prompt_of(text)]

    def words(self, text: Encoded) -> str:
        """Return the greedy continuation of the prompt of `text`, up to a special token, white space normalised."""
        return words(self._editable, self.ids(text))

    def begun(self, text: Encoded) -> str:
        """Return the beginning of the greedy continuation for reports, at least as long as its answers."""
        counts = (request.count for request in self._requests[prompt_of(text)])
        return words(self._editable, self.ids(text)[: max((SAID_TOKENS, *counts))])

    def text_ids(self, text: Encoded) -> tuple[int, ...]:
        """Return the token ids of the greedy continuation of the prompt of `text`, without the token that ends it."""
        return tuple(takewhile(lambda token: token not in self._stops, self.ids(text)))

    def degenerate(self, text: Encoded) -> float | None:
        """Return the share of the continuation's tokens that are special or repeat; None where it ends at once."""
        ids = self.text_ids(text)
        return degenerate(ids, self._editable.special) if ids else None

    def special(self, text: Encoded) -> float:
        """Return the share of the continuation's tokens that are special; 0 where it ends at once."""
        ids = self.text_ids(text)
        return sum(token in self._editable.special for token in ids) / max(1, len(ids))

    def entropy(self, text: Encoded) -> float | None:
        """Return the entropy of the continuation's n-grams with special tokens, bits; None where it ends at once."""
        ids = self.text_ids(text)
        return generation_entropy(decode(self._editable.tokenizer, ids)) if ids else None

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
        if len(said) >= max(request.count, request.least) or not self._stops.isdisjoint(said):
            return True
        begun = UNDECIDED.sub("", words(self._editable, said))
        names = map(self.answer, (request.text, *request.others))
        return not request.least and not any(name.startswith(begun) for name in names)


def finish_together(plain: Generations, edited: Generations, weights: Mapping[KeyValueMemory, nn.Parameter]) -> None:
    """Finish generations of the unedited model and of the edited one, with value matrices `weights`, in shared steps.

    A step reads all weights, so it takes as long for twice as many rows. `plain` has followed passes of the unedited
    model and `edited` those of the edited one, and `begin_rest` has nothing to continue in either.
    """
    _go_on(plain._taken() + edited._taken(), edited, weights)


# The generations that a prompt belongs to, the number of tokens to generate, the prompt, and its keys and values.
Waiting: TypeAlias = tuple[Generations, int, Context, Prefix]


def _go_on(
    waiting: Sequence[Waiting],
    edited: Generations | None = None,
    weights: Mapping[KeyValueMemory, nn.Parameter] = MappingProxyType({}),
) -> None:
    """Continue prompts of one or two states of a model in the same steps; `weights` act in the rows of `edited`."""

    def continued(rows: Sequence[Waiting]) -> list[list[int]]:
        first = torch.tensor([generations._said[prompt][:1] for generations, _, prompt, _ in rows])
        counts = [count for _, count, *_ in rows]
        changed = torch.tensor([generations is edited for generations, *_ in rows])

        @contextmanager
        def step_of(active: Tensor) -> Iterator[None]:
            with ExitStack() as stack:
                for memory, weight in weights.items() if bool(changed[active].any()) else ():
                    stack.enter_context(other_weight(memory.module, memory.own, weight, changed[active]))
                yield

        state = rows[0][0]
        new = continue_from(
            state._editable,
            [prefix for *_, prefix in rows],
            first,
            counts,
            ends=state._stops,
            step_of=step_of,
            progress=state._progress,
        )
        return until([ids[:count] for ids, count in zip(new.tolist(), counts, strict=True)], state._stops)

    new_ids = chain.from_iterable(split_on_oom(continued, waiting, ModelError(NO_MEMORY))) if waiting else ()
    for (generations, _, prompt, _), ids in zip(waiting, new_ids, strict=True):
        generations._said[prompt] = tuple(ids)


def prompt_of(text: Encoded) -> Context:
    """Return the tokens before the answer."""
    return text.ids[: text.answer]


def sampled(editable: Editable, prompts: Sequence[Sequence[Encoded]], progress: Progress = silent) -> list[list[str]]:
    """Return, by fact, each of its prompts with a sampled continuation, up to `SAMPLED_TOKENS` tokens together.

    In a chat, only the assistant's turn is returned. A prompt that one fact has twice is drawn twice.
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
    new = generation.continuations(
        editable, [prompt.ids for prompt in flat], count, numbers=numbers, top=SAMPLED_TOP, progress=progress
    )
    texts = []
    for prompt, ids in zip(flat, new, strict=True):
        drawn = ids[: max(1, SAMPLED_TOKENS - len(prompt.ids))]
        whole = [*prompt.ids, *drawn]
        texts.append(words(editable, drawn) if editable.chat else decode(editable.tokenizer, whole, special=False))
    ordered = iter(texts)
    return [[next(ordered) for _ in group] for group in prompts]

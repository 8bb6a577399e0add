"""Log-probabilities of given answers, and the model's own continuations.

The log-probability of an answer is the sum of log p over its tokens, in nats, in float32 or better. Free continuations
are greedy, to the end of the text or turn; or drawn by random numbers of each prompt's own, so that the draw for one
does not depend on the others. Where there is no memory for a single text, a ModelError is raised.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Collection, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import replace
from functools import partial
from itertools import chain, takewhile
from typing import TypeAlias

import torch
from torch import Tensor
from transformers import DynamicCache

from ffedit.algebra.linalg import double
from ffedit.errors import ModelError
from ffedit.inference import replay
from ffedit.inference.batching import BATCH_COST, TOKENS, batches, split_on_oom
from ffedit.inference.contexts import NO_MEMORY
from ffedit.inference.replay import Past, Prefix, cache_of, inputs_after
from ffedit.model.editable import Editable
from ffedit.model.tokenization import UNFINISHED, Encoded, decode, pad
from ffedit.progress import Progress, part, silent

ANSWER_TOKENS = 8  # tokens of a continuation in which its first word is looked for


def answer_reads(encoded: Sequence[Encoded]) -> Tensor:
    """Return the (row, position) pairs whose next token is an answer's, [k, 2], row by row."""
    return torch.tensor(
        [(row, e.answer - 1 + i) for row, e in enumerate(encoded) for i in range(len(e.target_ids))], dtype=torch.long
    )


def log_softmax(logits: Tensor) -> Tensor:
    """Return log-probabilities of the next token [.., vocabulary], nats; in float32, or float64 for such logits."""
    return logits.to(torch.promote_types(logits.dtype, torch.float32)).log_softmax(-1)


def answer_sums(logits: Tensor, encoded: Sequence[Encoded]) -> Tensor:
    """Return the log-probability of each whole answer, [n], nats, from the logits [k, vocabulary] at `answer_reads`."""
    rows = answer_reads(encoded)[:, 0].to(logits.device)
    targets = torch.tensor([i for e in encoded for i in e.target_ids], device=logits.device)
    tokens = log_softmax(logits).gather(-1, targets[:, None])[:, 0]
    return tokens.new_zeros(len(encoded)).index_add(0, rows, tokens)


def own_answers(editable: Editable, prompts: Sequence[Encoded]) -> list[Encoded | None]:
    """Return each of `prompts` with the first word of its greedy continuation: the fewest tokens that hold it whole.

    None where no word comes within `ANSWER_TOKENS`: the text or the turn ends, or there are only blanks.
    """
    continued = continuations(editable, [prompt.ids for prompt in prompts], ANSWER_TOKENS)
    return [_first_word(editable, prompt, new) for prompt, new in zip(prompts, continued, strict=True)]


def with_own_answers(editable: Editable, prompts: Sequence[Encoded]) -> list[Encoded]:
    """Return each of `prompts` as `own_answers` does; where that finds no word, with the likeliest first word."""
    answers = own_answers(editable, prompts)
    return [answer or _likeliest_word(editable, prompt) for answer, prompt in zip(answers, prompts, strict=True)]


def _first_word(editable: Editable, prompt: Encoded, new: Sequence[int]) -> Encoded | None:
    new = _text(editable, new)
    before = len(decode(editable.tokenizer, prompt.ids))
    size = 0
    for longer in range(1, len(new) + 1):
        text = decode(editable.tokenizer, [*prompt.ids, *new[:longer]])[before:]
        if text.endswith(UNFINISHED):
            continue
        if size and (len(text.split()) > 1 or (text.strip() and not text.strip()[-1].isalnum())):
            break
        size = longer
    ids = (*prompt.ids, *new[:size])
    text = decode(editable.tokenizer, ids)
    return replace(prompt, text=text, ids=ids) if text[before:].strip() else None


@torch.no_grad()
def _likeliest_word(editable: Editable, prompt: Encoded) -> Encoded:
    """Return `prompt` with the word whose first token is the likeliest of those that are neither special nor blank."""
    logits = replay.forward(editable, pad([prompt.ids]), torch.tensor([(0, len(prompt.ids) - 1)]))[0]
    for token in logits.argsort(descending=True).tolist():
        if _text(editable, [token]) and decode(editable.tokenizer, [token]).strip():
            rest = continuations(editable, [(*prompt.ids, token)], ANSWER_TOKENS - 1)[0]
            if (answer := _first_word(editable, prompt, [token, *rest])) is not None:
                return answer
    raise ModelError(
        f"{editable.name} generates no word after {prompt.text[-60:]!r}; name the old object of this fact (previous)"
    )


def _text(editable: Editable, ids: Sequence[int]) -> list[int]:
    """Return `ids` up to the first that stands for no text: an end, or another special token."""
    silent = editable.ends | editable.special
    return list(takewhile(lambda token: token not in silent, ids))


# Chooses the next token of each row, [n, 1] on the CPU, from logits [n, vocabulary] and the step, counted from 0.
Chooser: TypeAlias = Callable[[Tensor, int], Tensor]
# Makes a context manager for a pass over whole prompts, from their token ids, which are right-padded in it.
Intervention: TypeAlias = "Callable[[Sequence[Sequence[int]]], AbstractContextManager[object]]"


def greedy(logits: Tensor, step: int) -> Tensor:
    """Choose the likeliest token, [n, 1]."""
    return logits.argmax(-1, keepdim=True).cpu()


def drawn(numbers: Tensor, top: int | None = None) -> Chooser:
    """Return a chooser that draws by each row's `numbers` [n, steps], uniform in 0 to 1, from all or `top` tokens."""

    def choose(logits: Tensor, step: int) -> Tensor:
        if top is not None:
            best, ids = double(logits).topk(min(top, logits.shape[-1]), -1)
            below = best.softmax(-1).cumsum(-1).cpu() <= numbers[:, step, None]
            return ids.cpu().gather(-1, below.sum(-1, keepdim=True).clamp(max=ids.shape[-1] - 1))
        chosen = []
        # Row by row, which takes less memory; on the CPU, where a sum has the same bits each time.
        for row, number in zip(logits, numbers[:, step], strict=True):
            cumulative = double(row.float().softmax(-1).cpu()).cumsum(-1)
            chosen.append(torch.searchsorted(cumulative, number * cumulative[-1:], right=True))
        return torch.stack(chosen)

    return choose


@torch.no_grad()
def continuations(
    editable: Editable,
    prompts: Sequence[Sequence[int]],
    count: int,
    numbers: Tensor | None = None,
    top: int | None = None,
    intervene: Intervention = nullcontext,
    progress: Progress = silent,
) -> list[list[int]]:
    """Return the next `count` token ids of each prompt.

    They are greedy, up to and including the token that ends the text or turn; or drawn by `numbers` [prompts, count],
    float64, uniform in 0 to 1, on the CPU, from the `top` likeliest tokens or from all, without a stop at an end.

    Prompts of different lengths share a batch where the model allows it (`Editable.ragged`), padded on the left and
    masked; where not, only those of one length do. There are fewer tokens where the model's context ends. Where
    memory fails, batches are smaller, with the same result.

    `intervene` acts on the passes over the prompts themselves. Its changes reach the continuation by the keys and
    values that these passes leave; in a model without these, each step is such a pass. `progress` counts steps.
    """

    def continued(rows: Sequence[int], advance: Progress) -> list[list[int]]:
        choose = greedy if numbers is None else drawn(numbers[list(rows)], top)
        ends: Collection[int] = editable.ends if choose is greedy else ()
        batch_prompts = [prompts[i] for i in rows]
        return until(_continue(editable, batch_prompts, count, choose, ends, intervene, advance).tolist(), ends)

    lengths = [len(ids) for ids in prompts]
    groups: dict[int, list[int]] = defaultdict(list)
    for i, length in enumerate(lengths):
        groups[0 if editable.ragged and length + count <= editable.max_tokens else length].append(i)
    result: list[list[int]] = [[] for _ in prompts]
    planned = [
        [members[i] for i in batch]
        for members in groups.values()
        for batch in batches([lengths[i] + count for i in members], TOKENS, (1 + count) * BATCH_COST)
    ]
    for number, batch in enumerate(planned):
        work = partial(continued, advance=part(progress, number, 1, len(planned)))
        answers = chain.from_iterable(split_on_oom(work, batch, ModelError(NO_MEMORY)))
        for row, new in zip(batch, answers, strict=True):
            result[row] = new
    return result


def until(rows: Sequence[Sequence[int]], ends: Collection[int]) -> list[list[int]]:
    """Return each of `rows` up to and including its first token that is one of `ends`."""
    stops = (next((i for i, token in enumerate(row, 1) if token in ends), len(row)) for row in rows)
    return [list(row[:stop]) for row, stop in zip(rows, stops, strict=True)]


def words(editable: Editable, ids: Sequence[int]) -> str:
    """Decode `ids` up to the first special token, such as the end of the text or turn, and normalise white space.

    A last character of which bytes are missing is left out.
    """
    return " ".join(decode(editable.tokenizer, _text(editable, ids)).rstrip("\ufffd").split())


def completions(editable: Editable, prompts: Sequence[str], count: int) -> list[str]:
    """Return the greedy continuation of each of `prompts`, as text of up to `count` tokens."""
    ids = [editable.encode(prompt, max_tokens=editable.max_tokens).ids for prompt in prompts]
    return [words(editable, new) for new in continuations(editable, ids, count)]


def _continue(
    editable: Editable,
    prompts: Sequence[Sequence[int]],
    count: int,
    choose: Chooser,
    ends: Collection[int],
    intervene: Intervention,
    progress: Progress,
) -> Tensor:
    """Return the next tokens of the prompts of one batch, [prompts, tokens], as `continue_from` does."""
    lengths = torch.tensor([len(ids) for ids in prompts])
    count = min(count, editable.max_tokens + 1 - int(lengths.max()))
    ids, cache = pad(prompts), DynamicCache() if editable.resumable else None
    last = torch.stack([torch.arange(len(ids)), lengths - 1], 1)
    with intervene(prompts):
        logits = replay.logits_at(editable, ids, {"cache": cache, "use_cache": cache is not None}, last)
    new = choose(logits, 0)
    if cache is not None:
        past = Past.of(cache)
        prefixes = [Prefix(past, i, range(len(prompt))) for i, prompt in enumerate(prompts)]
        return continue_from(editable, prefixes, new, count, choose, ends, progress=progress)
    new, rows = new.repeat(1, count), torch.arange(len(ids))
    progress("generating", 1, count)
    for step in range(1, count):  # all prompts are of one length
        rows = rows[~_ended(new[rows, step - 1], ends)]
        if not len(rows):
            break
        with intervene([prompts[i] for i in rows.tolist()]):
            logits = replay.forward(editable, torch.cat([ids, new[:, :step]], 1)[rows], _last(len(rows)))
        new[rows, step:] = choose(logits, step)
        progress("generating", step + 1, count)
    progress("generating", count, count)
    return new


def continue_from(
    editable: Editable,
    prefixes: Sequence[Prefix],
    first: Tensor,
    count: int | Sequence[int],
    choose: Chooser = greedy,
    ends: Collection[int] = (),
    step_of: Callable[[Tensor], AbstractContextManager[object]] = nullcontext,
    progress: Progress = silent,
) -> Tensor:
    """Continue n rows that have been run; return their next `count` tokens, [n, count], of which the first are known.

    A row with a smaller `count` of its own repeats its last token.

    Args:
        editable: the model; one that is not `ragged` takes rows of one length only.
        prefixes: keys and values of each row's tokens.
        first: the token after these, [n, 1].
        count: number of tokens, of all rows or of each; they must fit into the model's context.
        choose: chooses each next token, of the rows that go on.
        ends: tokens that end a row, which then repeats its last token.
        step_of: makes a context manager for a step of the model, from the numbers of the rows that go on.
        progress: progress callback, which counts tokens of the row with the largest count.
    """
    lengths = torch.tensor([len(prefix) for prefix in prefixes])
    width, cache = int(lengths.max()), cache_of(prefixes)
    counts = torch.tensor(count).expand(len(lengths))
    most = int(counts.max())
    new, rows = first.repeat(1, most), torch.arange(len(lengths))
    progress("generating", 1, most)
    for step in range(1, most):
        ended = _ended(new[rows, step - 1], ends) | (counts[rows] <= step)
        if bool(ended.all()):
            break
        if bool(ended.any()):
            cache.batch_select_indices((~ended).nonzero()[:, 0])
            rows, lengths = rows[~ended], lengths[~ended]
        # The new tokens fill their columns in every row.
        inputs = {"cache": cache, "use_cache": True, **inputs_after(editable, lengths + step - 1, width + step - 1, 1)}
        with step_of(rows):
            logits = replay.logits_at(editable, new[rows, step - 1 : step], inputs, _last(len(rows)))
        new[rows, step:] = choose(logits, step)
        progress("generating", step + 1, most)
    progress("generating", most, most)
    return new


def _ended(tokens: Tensor, ends: Collection[int]) -> Tensor:
    """Return, for each of `tokens` [n], whether it is one of `ends`, [n]."""
    return torch.isin(tokens, torch.tensor(sorted(ends), dtype=tokens.dtype))


def _last(count: int) -> Tensor:
    """Return the (row, position) pairs of the last position of each of `count` rows."""
    return torch.tensor([(row, -1) for row in range(count)])

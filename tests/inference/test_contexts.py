"""However contexts share their beginnings, each is read once, with the numbers of a pass of its own, and can go on."""

from __future__ import annotations

from functools import partial
from itertools import pairwise

import pytest
import torch
import zoo

from ffedit.errors import ModelError
from ffedit.inference import contexts
from ffedit.inference.contexts import Context, passes
from ffedit.inference.generation import continuations, continue_from, until
from ffedit.inference.replay import inputs_after, logits_at
from ffedit.model.editable import Editable

NO_MEMORY = ModelError("no memory")


def some() -> set[Context]:
    """Contexts alone, prefixes of others, and many behind one sentence, with endings of several lengths."""
    draw = torch.Generator().manual_seed(2)

    def words(count: int) -> Context:
        return tuple(torch.randint(3, zoo.VOCAB, (count,), generator=draw).tolist())

    sentence, prompt = words(12), words(7)
    behind = {sentence + words(count) for count in (1, 3, 3, 5, 8)}
    return {words(4), words(19), prompt, prompt + words(1), prompt + words(2), sentence[:5], *behind}


@pytest.mark.parametrize("family", zoo.FAMILIES)
@pytest.mark.parametrize(("width", "budget"), [(1, 1), (8, 40), (24, 100), (256, 10_000)])
def test_each_context_is_read_once_with_its_own_numbers(
    family: str, width: int, budget: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(contexts, "WIDTH", width)
    monkeypatch.setattr(contexts, "TIMES", 1)
    editable, read = zoo.shared(family), {}
    for done in passes(editable, some(), budget, partial(logits_at, editable), NO_MEMORY, keep=editable.resumable):
        assert len(done.contexts) == len(done.read) == (len(done.prefixes) or len(done.contexts))
        for context, logits in zip(done.contexts, done.read, strict=True):
            assert context not in read
            read[context] = logits.log_softmax(-1)
    assert read.keys() == some()
    for context, log_probs in read.items():
        with torch.no_grad():
            alone = editable.model(input_ids=torch.tensor([context]), use_cache=False).logits[0, -1]
        torch.testing.assert_close(log_probs, alone.log_softmax(-1), rtol=1e-3, atol=1e-3)


def ran(family: str, budget: int = 10_000) -> list[tuple[int, ...]]:
    """Shapes of the token ids that run."""
    editable, shapes = zoo.shared(family), []

    def read(ids: torch.Tensor, inputs: object, at: torch.Tensor) -> None:
        shapes.append(tuple(ids.shape))

    list(passes(editable, some(), budget, read, NO_MEMORY, keep=False))
    return shapes


def test_each_token_runs_once_and_none_is_padded(monkeypatch: pytest.MonkeyPatch) -> None:
    tree = {context[:end] for context in some() for end in range(1, len(context) + 1)}
    monkeypatch.setattr(zoo.shared("llama"), "max_tokens", len(tree))
    assert ran("llama") == [(1, len(tree))]


def test_where_texts_cannot_share_a_row_only_prefixes_do() -> None:
    assert zoo.shared("bloom").packed == 0, "its positions come from its mask"
    in_order = sorted(some())
    rows = [one for one, other in pairwise([*in_order, ()]) if other[: len(one)] != one]
    assert sum(rows for rows, _ in ran("bloom")) == len(rows)


WINDOWS = {"gpt_neo": "window_size", **dict.fromkeys(("mistral", "gemma2", "gemma3"), "sliding_window")}


def windowed(family: str, size: int, monkeypatch: pytest.MonkeyPatch) -> Editable:
    """A model whose layers, or some of them, attend to the last `size` tokens."""
    config, arguments, parameters = zoo.FAMILIES[family]
    monkeypatch.setitem(zoo.FAMILIES, family, (config, {**arguments, WINDOWS[family]: size}, parameters))
    return zoo.build(family, dtype=torch.float32)


@pytest.mark.parametrize(
    ("family", "dtype"), [*((family, torch.float32) for family in WINDOWS), ("gemma2", torch.bfloat16)]
)
def test_a_window_is_measured_whatever_its_name(
    family: str, dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch
) -> None:
    editable = windowed(family, 12, monkeypatch)
    editable.model.to(dtype)
    assert [n for n in range(2, 64) if contexts.attends_to_all(editable, n)] == list(range(2, 13))
    assert editable.packed == 1, "as far as it was tried"
    assert contexts.longest_packed(editable, 8) == 8 and not editable.windowed
    assert contexts.longest_packed(editable, 9) == 8 and editable.windowed
    monkeypatch.setattr(editable, "run", lambda **_: pytest.fail("tried again"))
    assert contexts.longest_packed(editable, 50) == 8


def test_a_part_of_the_positions_is_tried_only_when_contexts_are_as_long(monkeypatch: pytest.MonkeyPatch) -> None:
    editable = zoo.build("llama")
    tried, attends = list[int](), contexts.attends_to_all
    monkeypatch.setattr(contexts, "attends_to_all", lambda e, length: tried.append(length) or attends(e, length))
    assert [contexts.longest_packed(editable, n) for n in (5, 9, 16, 20, 3, 200)] == [8, 16, 16, 32, 32, 64]
    assert tried == [8, 16, 32, 64] and editable.max_tokens == 64


def test_rows_do_not_depend_on_what_was_tried_before() -> None:
    first, then = zoo.build("llama"), zoo.build("llama")
    contexts.longest_packed(then, 64)
    shapes: list[list[tuple[int, ...]]] = []
    for editable in (first, then):
        shapes.append([])
        list(passes(editable, some(), 10_000, lambda ids, *_: shapes[-1].append(tuple(ids.shape)), NO_MEMORY, False))
    assert shapes[0] == shapes[1]


@pytest.mark.parametrize(("family", "size"), [("gpt_neo", 3), ("gemma2", 4), ("gemma3", 4)])
def test_a_window_whose_loss_is_within_what_loading_allows_is_found(family: str, size: int) -> None:
    """In float64, as in 16 bits, loading compares logits to a few hundredths: a window may change them less."""
    editable = zoo.trained(family, True, torch.float64)
    assert editable.packed == 0, "windows that are shorter than what is tried at first"
    assert contexts.longest_packed(editable, 50) <= size
    assert contexts.attends_to_all(editable, size) and not contexts.attends_to_all(editable, size + 1)


@pytest.mark.parametrize("family", ["gpt2", "llama", "bloom", "gemma3", "qwen3_next"])
@pytest.mark.parametrize("width", [8, 256])
def test_what_goes_on_from_a_pass_is_what_the_context_says(
    family: str, width: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(contexts, "WIDTH", width)
    editable = zoo.shared(family)
    # A mistake in how rows are aligned is seen when a model is loaded, which is then not ragged.
    assert editable.ragged == (family != "qwen3_next")
    went_on = 0
    for done in passes(editable, some(), 10_000, partial(logits_at, editable), NO_MEMORY, keep=editable.ragged):
        if done.prefixes:
            first = done.read.argmax(-1, keepdim=True)
            whole = continue_from(editable, done.prefixes, first, 5, ends=editable.ends).tolist()
            said = until(whole, editable.ends)
            assert said == [continuations(editable, [context], 5)[0] for context in done.contexts]
            counts = [1 + (i + went_on) % 5 for i in range(len(said))]
            own = continue_from(editable, done.prefixes, first, counts, ends=editable.ends).tolist()
            for count, ids, expected in zip(counts, own, whole, strict=True):
                assert ids[:count] == expected[:count] and set(ids[count:]) <= {ids[count - 1]}
            went_on += len(said)
    assert went_on == (len(some()) if editable.ragged else 0)


def test_batches_keep_to_their_budget() -> None:
    draw = torch.Generator().manual_seed(4)
    lengths = torch.randint(1, 60, (200,), generator=draw).tolist()
    many = {tuple(torch.randint(3, zoo.VOCAB, (length,), generator=draw).tolist()) for length in lengths}
    shapes: list[tuple[int, int]] = []

    def read(ids: torch.Tensor, inputs: object, at: torch.Tensor) -> None:
        shapes.append((len(ids), ids.shape[1]))

    list(passes(zoo.shared("llama"), many, 300, read, NO_MEMORY, keep=False))
    assert all(rows * columns <= 300 for rows, columns in shapes) and max(rows for rows, _ in shapes) > 1


def test_padding_asks_for_no_position_that_the_model_lacks() -> None:
    editable = zoo.shared("gpt2")
    inputs = inputs_after(editable, torch.tensor([editable.max_tokens - 4, 10]), editable.max_tokens - 4, 20)
    assert int(inputs["position_ids"].max()) == editable.max_tokens - 1


def test_attention_without_such_a_mask_is_not_tried(monkeypatch: pytest.MonkeyPatch) -> None:
    editable = zoo.shared("llama")
    assert contexts.check(editable, editable.probe_ids()) < 1e-3
    monkeypatch.setattr(editable.model.config, "_attn_implementation", "flash_attention_2")
    monkeypatch.setattr(editable, "run", lambda **_: pytest.fail("a pass was tried"))
    assert contexts.check(editable, editable.probe_ids()) == float("inf")


@pytest.mark.parametrize("budget", [60, 10_000])
@pytest.mark.parametrize("size", [12, 16])
def test_a_window_holds_for_a_long_context_beside_short_ones(
    budget: int, size: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    editable = windowed("mistral", size, monkeypatch)
    beside = {(5, 6, 7, word) for word in range(8, 14)} | {(9, 9, word) for word in range(20, 26)}
    every = some() | beside
    read = {}
    for done in passes(editable, every, budget, partial(logits_at, editable), NO_MEMORY, keep=False):
        read |= dict(zip(done.contexts, done.read, strict=True))
    assert editable.packed == {12: 8, 16: 16}[size] and editable.windowed
    assert read.keys() == every and max(map(len, every)) > size
    for context, logits in read.items():
        with torch.no_grad():
            alone = editable.model(input_ids=torch.tensor([context]), use_cache=False).logits[0, -1]
        torch.testing.assert_close(logits, alone, rtol=1e-3, atol=1e-3)

"""Statistics of several layers: one pass, no further than needed, resumed, refused elsewhere."""

from __future__ import annotations

import os
import signal
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import torch
import zoo
from collecting import alike, text
from writing import FACT, collect_moments, quick, write_facts

import ffedit
from ffedit import Corpus, EditError
from ffedit.algebra.key_moments import LONGEST
from ffedit.editor import statistics
from ffedit.editor.statistics import collect
from ffedit.files import cache
from ffedit.inference.corpus import tokens_for
from ffedit.loading.verify import find_and_verify
from ffedit.model import storage
from ffedit.model.editable import Editable
from ffedit.model.memory import Address

__all__ = ["text"]


@contextmanager
def runs(editable: Editable) -> Iterator[list[int]]:
    """Which layers run, one entry for each time."""
    seen: list[int] = []

    def watched(number: int, original: Callable[..., Any]) -> Callable[..., Any]:
        def forward(*args: Any, **kwargs: Any) -> Any:
            seen.append(number)
            return original(*args, **kwargs)

        return forward

    for number, layer in enumerate(editable.layers):
        layer.forward = watched(number, layer.forward)
    try:
        yield seen
    finally:
        for layer in editable.layers:
            del layer.forward


def of(editable: Editable, *layers: int) -> list[ffedit.KeyValueMemory]:
    return [editable.memories[layer] for layer in layers]


# One pass -----------------------------------------------------------------------------------------


@pytest.mark.parametrize("family", sorted(zoo.FAMILIES))
def test_one_pass_gives_each_layer_what_a_whole_pass_does(family: str, text: Path) -> None:
    editable = zoo.shared(family)
    found = collect(editable, of(editable, 1, 0), Corpus(text, 300))
    ids = editable.tokenizer(text.read_text())["input_ids"][:300]
    assert list(found) == [Address(1), Address(0)]
    for memory in of(editable, 0, 1):
        keys: list[torch.Tensor] = []
        hook = memory.module.register_forward_pre_hook(lambda _, args, keys=keys: keys.append(args[0].double()))
        with torch.no_grad():
            for first in range(0, 300, 64):
                editable.model(input_ids=torch.tensor([ids[first : first + 64]]), use_cache=False)
        hook.remove()
        every = torch.cat([some.reshape(-1, memory.d_ff)[1:] for some in keys])  # the first of a row is a sink
        lengths = every.norm(dim=1, keepdim=True)
        every = every * (LONGEST * lengths.median() / lengths).clamp(max=1) * (300 / len(every)) ** 0.5
        torch.testing.assert_close(found[memory.address].sum, every.T @ every, rtol=1e-4, atol=1e-3)
        assert (found[memory.address].count, found[memory.address].keys) == (300, 295)


@pytest.mark.parametrize(("start", "ids"), [("", []), ("<s>", [0]), ("<s> </s>", [0, 1])])
def test_each_row_begins_as_the_model_s_texts_do(
    start: str, ids: list[int], text: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """And what it begins with, as the first token of any row, is no key of C."""
    editable, ran = find_and_verify(zoo.model("gpt2"), zoo.begun(start), "gpt2"), list[torch.Tensor]()
    run_to = statistics.replay.run_to
    monkeypatch.setattr(statistics.replay, "run_to", lambda e, ids, layer: ran.append(ids) or run_to(e, ids, layer))
    memory = editable.memories[0]
    moments = collect(editable, [memory], Corpus(text, 4 * 64))[Address(0)]
    rows = torch.cat(ran)
    words = editable.tokenizer(text.read_text(), add_special_tokens=False)["input_ids"]
    assert rows[:, : len(ids)].tolist() == [ids] * 4
    assert rows[:, len(ids) :].flatten().tolist() == words[: 4 * (64 - len(ids))], "no word is lost"
    first = max(1, len(ids))
    assert (moments.count, moments.keys, moments.left_out) == (256, 256 - 4 * first, 4 * first)
    with torch.no_grad(), editable.feed_forward[0].keys() as seen:
        editable.forward(rows)
        keys = seen().reshape(4, 64, -1)[:, first:].flatten(0, 1).double()
    mean = keys.T @ keys / len(keys)
    torch.testing.assert_close(moments.sum / moments.count, mean, rtol=1e-4, atol=1e-5)
    assert moments.sinks == 0


def test_layers_above_the_deepest_do_not_run_and_those_below_run_once(text: Path) -> None:
    editable = zoo.build("llama")
    with runs(editable) as seen:
        collect(editable, of(editable, 1, 0), Corpus(text, 600))
    batches = len(seen) // 2
    assert seen == [0, 1] * batches and batches == 2
    kept = collect_moments(editable, editable.memories[2], Corpus(text, 600))
    with runs(editable) as seen:
        found = collect(editable, of(editable, 0, 2, 1), Corpus(text, 600))
    assert seen == [] and list(found) == [Address(0), Address(2), Address(1)]
    assert torch.equal(found[Address(2)].sum, kept.sum), "what is there is not collected again"


@pytest.mark.parametrize("tokens", [2, 64, 65])
def test_exactly_so_many_tokens_count(text: Path, tokens: int) -> None:
    editable = zoo.shared("gpt2")
    moments = collect_moments(editable, editable.memories[0], Corpus(text, tokens))
    assert moments.count == tokens and moments.left_out == -(-tokens // 64), "the first of each row, of one token, too"
    assert collect_moments(editable, editable.memories[0], Corpus(None, tokens)).count == tokens


# Interrupted --------------------------------------------------------------------------------------


class Halt:
    """Interrupts the so-many-th report."""

    def __init__(self, after: int) -> None:
        self.left, self.seen = after, []

    def __call__(self, stage: str, done: int, total: int) -> None:
        if stage == "collecting key statistics":
            self.seen.append(done)
            self.left -= 1
            if not self.left:
                raise KeyboardInterrupt


@pytest.fixture
def small_batches(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(statistics, "ROWS_PER_BATCH", 3)


@pytest.mark.usefixtures("small_batches")
@pytest.mark.parametrize("given", [True, False])
def test_a_pass_goes_on_where_it_was_interrupted(text: Path, given: bool) -> None:
    editable = zoo.shared("gpt2")
    corpus = Corpus(text if given else None, 1111)
    whole = collect(editable, of(editable, 0, 1), corpus)
    cache.clear()
    for after, expected in ((1, [192]), (3, [384, 576, 768])):
        halt = Halt(after)
        with pytest.raises(KeyboardInterrupt):
            collect(editable, of(editable, 0, 1), corpus, halt)
        assert halt.seen == expected
        assert [path.parent.name for path in cache.entries()] == ["passes"] + ["texts"] * (not given)
    halt = Halt(0)
    assert alike(collect(editable, of(editable, 0, 1), corpus, halt), whole) and halt.seen == [960, 1111]
    assert not any(path.parent.name == "passes" for path in cache.entries())


@pytest.mark.usefixtures("small_batches")
def test_a_pass_is_kept_now_and_then(text: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(statistics, "SAVED_EVERY", 2)
    editable, corpus = zoo.shared("gpt2"), Corpus(text, 1111)

    def fail(stage: str, done: int, total: int) -> None:
        if done == 960:
            raise MemoryError  # a process that dies leaves no more than this

    with pytest.raises(MemoryError):
        collect(editable, of(editable, 0), corpus, fail)
    halt = Halt(0)
    found = collect(editable, of(editable, 0), corpus, halt)
    assert halt.seen == [960, 1111], "four of six batches were kept"
    cache.clear()
    assert alike(found, collect(editable, of(editable, 0), corpus))


@pytest.mark.usefixtures("small_batches")
def test_an_interrupt_waits_for_the_end_of_a_batch(text: Path) -> None:
    editable, corpus = zoo.build("gpt2"), Corpus(text, 1111)
    whole = collect(editable, of(editable, 0, 1), corpus)
    cache.clear()
    handler = signal.getsignal(signal.SIGINT)
    # Between the keys of layer 0 and those of layer 1: one of them has the batch, the other does not.
    hook = editable.layers[1].register_forward_pre_hook(lambda *_: os.kill(os.getpid(), signal.SIGINT))
    with pytest.raises(KeyboardInterrupt):
        collect(editable, of(editable, 0, 1), corpus)
    hook.remove()
    halt = Halt(0)
    assert alike(collect(editable, of(editable, 0, 1), corpus, halt), whole) and halt.seen[0] == 384
    assert signal.getsignal(signal.SIGINT) is handler


@pytest.mark.usefixtures("small_batches")
def test_a_pass_that_was_begun_for_fewer_layers_starts_over(text: Path) -> None:
    editable, corpus = zoo.shared("gpt2"), Corpus(text, 1111)
    whole = collect(editable, of(editable, 0, 1), corpus)
    next(path for path in cache.entries() if path.parent.name == "moments").unlink()
    with pytest.raises(KeyboardInterrupt):
        collect(editable, of(editable, 0, 1), corpus, Halt(2))
    for path in cache.entries():
        if path.parent.name == "moments":
            path.unlink()
    halt = Halt(0)
    assert alike(collect(editable, of(editable, 0, 1), corpus, halt), whole) and halt.seen[0] == 192


def test_a_damaged_pass_is_named(text: Path) -> None:
    editable, corpus = zoo.shared("gpt2"), Corpus(text, 1000)
    with pytest.raises(KeyboardInterrupt):
        collect(editable, of(editable, 0), corpus, Halt(1))
    (entry,) = cache.entries()
    entry.write_bytes(entry.read_bytes()[:50])
    with pytest.raises(EditError, match=f"{entry.name}.*delete it"):
        collect(editable, of(editable, 0), corpus)


# Refusals -----------------------------------------------------------------------------------------


def test_one_token_and_keys_that_overflow_are_refused(text: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    editable = zoo.build("gpt2")
    for corpus in (Corpus(text, 1), Corpus(tokens=1)):
        with pytest.raises(EditError, match="a single token was found"):
            collect(editable, of(editable, 0), corpus)
    monkeypatch.setattr(statistics, "neutral", lambda _: torch.zeros(200, dtype=torch.long))
    with pytest.raises(EditError, match=r"^the neutral text that ships with ffedit: a single token was found"):
        collect(editable, of(editable, 0), Corpus(tokens=1))
    with torch.no_grad():
        editable.memories[0].value.mul_(float("inf"))
    for corpus, name in (
        (Corpus(text, 200), "text.txt"),
        (Corpus(tokens=200), "the neutral text that ships with ffedit"),
    ):
        with pytest.raises(EditError, match=rf"layer 1 over {name} are not finite \(tokens 0 to") as caught:
            collect(editable, of(editable, 0, 1), corpus)
        assert "\n" not in str(caught.value) and cache.entries() == []


@pytest.mark.usefixtures("small_batches")
@pytest.mark.parametrize("entry", [1, 2])
def test_a_pass_that_was_killed_between_its_entries_goes_on_and_leaves_nothing(
    entry: int, text: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(statistics, "SAVED_EVERY", 1)
    editable, corpus, write = zoo.shared("gpt2"), Corpus(text, 1111), cache.write
    whole = collect(editable, of(editable, 0, 1), corpus)
    cache.clear()
    written: list[Path] = []

    def killed(target: Path, save: Any) -> None:
        write(target, save)
        written.extend([target] if target.parent.name == "moments" else [])
        if len(written) == entry:
            raise MemoryError

    with monkeypatch.context() as patch, pytest.raises(MemoryError):
        patch.setattr(cache, "write", killed)
        collect(editable, of(editable, 0, 1), corpus)
    halt = Halt(0)
    assert alike(collect(editable, of(editable, 0, 1), corpus, halt), whole)
    assert halt.seen == [] and {path.parent.name for path in cache.entries()} == {"moments"}


@pytest.mark.parametrize(
    ("subjects", "d_ff", "names", "tokens"),
    [
        *[(1, 128, True, 4096), (1, 8960, True, 4480), (1, 28672, True, 14336), (1, 80000, True, 32768)],
        *[(1, 128, False, 32768), (2, 128, True, 32768), (50, 128, True, 131072)],
    ],
)
def test_the_text_is_as_long_as_the_subjects_and_the_keys_need(
    subjects: int, d_ff: int, names: bool, tokens: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("ffedit.inference.corpus.FEWEST", 2**15)  # see `little_text`
    assert tokens_for(subjects, d_ff, names) == tokens


def test_sums_that_memory_has_no_room_for_are_refused_before_the_text_is_read(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    editable, d_ff = zoo.trained("gpt2", True), 128
    needed = 16 * 2 * d_ff**2 + 8 * d_ff**2
    monkeypatch.setattr(statistics, "host_memory", lambda: needed - 1)
    monkeypatch.setattr(statistics, "_pass", lambda *_: pytest.fail("the pass began"))
    with pytest.raises(EditError, match=r"statistics of 2 layers.*collect fewer.*needed beside the model: 0\.00066 GB"):
        collect(editable, of(editable, 0, 1), Corpus(tokens=600))
    monkeypatch.undo()
    monkeypatch.setattr(statistics, "host_memory", lambda: needed)
    assert len(collect(editable, of(editable, 0, 1), Corpus(tokens=600))) == 2


def test_the_memory_of_a_container_is_its_limit(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    free, files = storage.host_memory(), [tmp_path / "none", tmp_path / "max", tmp_path / "limit"]
    files[1].write_text("max\n")
    files[2].write_text(f"{10**9 * 1000}\n")
    monkeypatch.setattr(storage, "CONTAINER_LIMITS", files)
    assert 0.5 * free < storage.host_memory() < 2 * free
    files[2].write_text("4096\n")
    assert storage.host_memory() == 0, "less than the process has taken"


def test_one_subject_has_less_text_only_where_names_count(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("ffedit.editor.statistics.tokens_for", lambda subjects, d_ff, names: 600 if names else 900)
    editable = zoo.trained("gpt2", True)

    def tokens(method: str, names_weight: float) -> int:
        edit = write_facts(editable, [FACT], method, [1], quick(names_weight=names_weight))
        counted: int = edit.provenance["statistics"]["1"]["tokens"]
        return counted

    assert tokens("memit", 1.0) < tokens("memit", 0.0) == tokens("alphaedit", 1.0)

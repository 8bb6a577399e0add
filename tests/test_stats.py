"""Statistics of several layers: one pass, no further than needed, resumed, stopped when sure, refused elsewhere."""

from __future__ import annotations

import json
import os
import signal
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import torch
import zoo
from making import on_disk, verified_here
from shell import TEXT, Ran, shell
from writing import SECOND, quick, write

import ffedit
from ffedit import Corpus, EditError, cache
from ffedit.anatomy import Editable
from ffedit.editor import collect, collect_moments, statistics
from ffedit.editor.statistics import check_stats
from ffedit.memory import Address
from ffedit.moments import KeyMoments, MomentsFitter

__all__ = ["verified_here"]
Stats = dict[Address, KeyMoments]


@pytest.fixture
def text(tmp_path: Path) -> Path:
    """A text of about 1,500 tokens, no row of it like another."""
    generator = torch.Generator().manual_seed(0)
    words = [zoo.WORDS[3 + int(i)] for i in torch.randint(len(zoo.WORDS) - 3, (1500,), generator=generator)]
    (path := tmp_path / "text.txt").write_text(" ".join(words))
    return path


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


def alike(one: Stats, other: Stats) -> bool:
    """Whether both are the same, to the last bit."""
    return one.keys() == other.keys() and all(
        torch.equal(one[a].sum, other[a].sum)
        and (one[a].count, one[a].convergence) == (other[a].count, other[a].convergence)
        for a in one
    )


# One pass -----------------------------------------------------------------------------------------


@pytest.mark.parametrize("family", sorted(zoo.FAMILIES))
def test_one_pass_gives_each_layer_what_a_whole_pass_does(family: str, text: Path) -> None:
    editable = zoo.shared(family)
    found = collect(editable, of(editable, 1, 0), Corpus(text, 300, weighting="tokens"))
    ids = editable.tokenizer(text.read_text())["input_ids"][:300]
    assert list(found) == [Address(1), Address(0)]
    for memory in of(editable, 0, 1):
        keys: list[torch.Tensor] = []
        hook = memory.module.register_forward_pre_hook(lambda _, args, keys=keys: keys.append(args[0].double()))
        with torch.no_grad():
            for first in range(0, 300, 64):
                editable.model(input_ids=torch.tensor([ids[first : first + 64]]), use_cache=False)
        hook.remove()
        every = torch.cat([some.reshape(-1, memory.d_ff) for some in keys])
        torch.testing.assert_close(found[memory.address].sum, every.T @ every, rtol=1e-4, atol=1e-3)
        assert found[memory.address].count == len(every) == 300


def test_layers_above_the_deepest_do_not_run_and_those_below_run_once(text: Path) -> None:
    editable = zoo.build("llama")
    with runs(editable) as seen:
        collect(editable, of(editable, 1, 0), Corpus(text, 600))
    batches = len(seen) // 2
    assert seen == [0, 1] * batches and batches == 2
    with runs(editable) as seen:
        assert list(collect(editable, of(editable, 0, 1), Corpus(text, 600))) == [Address(0), Address(1)]
    assert seen == []


def test_layers_that_are_there_are_not_collected_again(text: Path) -> None:
    editable, corpus = zoo.build("llama"), Corpus(text, 600)
    kept = collect_moments(editable, editable.memories[2], corpus)
    with runs(editable) as seen:
        found = collect(editable, of(editable, 0, 2), corpus)
    assert set(seen) == {0} and torch.equal(found[Address(2)].sum, kept.sum)


@pytest.mark.parametrize("tokens", [2, 63, 64, 65, 1000])
@pytest.mark.parametrize("weighting", ["types", "tokens"])
def test_exactly_so_many_tokens_count(text: Path, tokens: int, weighting: Any) -> None:
    editable = zoo.shared("gpt2")
    assert collect_moments(editable, editable.memories[0], Corpus(text, tokens, 0, weighting)).count == tokens
    assert collect_moments(editable, editable.memories[0], Corpus(None, tokens, 0, weighting)).count == tokens


def test_a_text_shorter_than_asked_is_used_as_it_is(text: Path) -> None:
    editable = zoo.shared("gpt2")
    assert collect_moments(editable, editable.memories[0], Corpus(text, 10**6)).count == 1500


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


@pytest.mark.parametrize("weighting", ["types", "tokens"])
@pytest.mark.parametrize("given", [True, False])
def test_a_pass_goes_on_where_it_was_interrupted(
    text: Path, given: bool, weighting: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(statistics, "ROWS_PER_BATCH", 3)
    editable = zoo.shared("gpt2")
    corpus = Corpus(text if given else None, 1111, 0, weighting)
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


def test_a_pass_is_kept_now_and_then(text: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(statistics, "ROWS_PER_BATCH", 3)
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


def test_an_interrupt_waits_for_the_end_of_a_batch(text: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(statistics, "ROWS_PER_BATCH", 3)
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


def test_a_damaged_pass_is_named(text: Path) -> None:
    editable, corpus = zoo.shared("gpt2"), Corpus(text, 1000)
    with pytest.raises(KeyboardInterrupt):
        collect(editable, of(editable, 0), corpus, Halt(1))
    (entry,) = cache.entries()
    entry.write_bytes(entry.read_bytes()[:50])
    with pytest.raises(EditError, match=f"{entry.name}.*delete it"):
        collect(editable, of(editable, 0), corpus)


# Stopping early -----------------------------------------------------------------------------------


def test_it_stops_when_every_layer_is_sure(text: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(statistics, "ROWS_PER_BATCH", 2)
    editable, corpus = zoo.shared("gpt2"), Corpus(text, 1500)
    seen: list[int] = []
    collect(editable, of(editable, 0, 1), corpus, lambda stage, done, total: seen.append(done), 100.0)
    assert seen[-1] == 256, "halves of 128 keys, as many as d_ff, and not before"
    early = collect(editable, of(editable, 0, 1), corpus, tolerance=100.0)
    assert {moments.count for moments in early.values()} == {256}
    asked: list[int] = []
    measured = MomentsFitter.convergence
    monkeypatch.setattr(MomentsFitter, "convergence", lambda self: asked.append(self.batches) or measured(self))
    never = collect(editable, of(editable, 0, 1), corpus, tolerance=1e-9)
    assert sorted(set(asked)) == [1, 2, 4, 8, 12], "each time when the text has doubled, and at its end"
    assert {moments.count for moments in never.values()} == {1500}
    with runs(editable) as ran:
        again = collect(editable, of(editable, 0, 1), corpus, tolerance=100.0)
        assert alike(again, never) and alike(collect(editable, of(editable, 0, 1), corpus), never)
    assert not ran, "a text that was read to its end serves both"


# Refusals -----------------------------------------------------------------------------------------


def test_one_token_and_keys_that_overflow_are_refused(text: Path) -> None:
    editable = zoo.build("gpt2")
    for corpus in (Corpus(text, 1), Corpus(tokens=1)):
        with pytest.raises(EditError, match="one token is no text"):
            collect(editable, of(editable, 0), corpus)
    with torch.no_grad():
        editable.memories[0].value.mul_(float("inf"))
    with pytest.raises(EditError, match=r"layer 1 over text.txt are not finite \(tokens 0 to") as caught:
        collect(editable, of(editable, 0, 1), Corpus(text, 200))
    assert "\n" not in str(caught.value) and cache.entries() == []


def test_a_layer_that_never_responds_is_refused(text: Path) -> None:
    editable = zoo.build("gpt2")
    with torch.no_grad():
        for name, parameter in editable.model.named_parameters():
            if "h.1.mlp.c_fc" in name:
                parameter.zero_()
    with pytest.raises(EditError, match=r"layer 1 .* all zero"):
        collect(editable, of(editable, 1), Corpus(text, 200))


# Folders ------------------------------------------------------------------------------------------


def test_a_folder_is_what_was_collected(text: Path, tmp_path: Path) -> None:
    editable = zoo.shared("llama")
    found = ffedit.stats(editable, [0, 2], Corpus(text, 400))
    ffedit.save_stats(found, tmp_path / "stats")
    again = ffedit.load_stats(tmp_path / "stats", zoo.build("llama"))
    assert alike(found, again) and list(again) == [Address(0), Address(2)]
    with pytest.raises(EditError, match="exists already"):
        ffedit.save_stats(found, tmp_path / "stats")
    with pytest.raises(EditError, match=r"layers \[3\] were asked for, but llama has layers 0 to 2"):
        ffedit.stats(editable, [3])


def test_statistics_of_anything_else_are_refused_by_name(text: Path, tmp_path: Path) -> None:
    folder = ffedit.save_stats(ffedit.stats(zoo.shared("llama"), [1], Corpus(text, 200)), tmp_path / "stats")

    def refused(editable: Editable, message: str) -> None:
        with pytest.raises(EditError, match=message) as caught:
            ffedit.load_stats(folder, editable)
        assert "\n" not in str(caught.value) and "layer 1 of llama (float32, d_ff 48)" in str(caught.value)

    refused(zoo.shared("gpt2"), "but layer 1 of gpt2 has float32, d_ff 128")
    refused(zoo.build("llama", dtype=torch.bfloat16), "but layer 1 of llama has bfloat16, d_ff 48")
    refused(zoo.build("llama", seed=1), "edited since")
    edited = zoo.build("llama")
    with torch.no_grad():
        edited.memories[0].value[3, 5] += 1.0
    refused(edited, "weights below that layer")
    (folder / "layer-1.safetensors").rename(folder / "layer-0.safetensors")
    assert list(ffedit.load_stats(folder, zoo.build("llama"))) == [Address(1)], "what it is of stands in the file"
    for path, message in ((tmp_path / "none", "no such folder"), (tmp_path, "holds no key statistics")):
        with pytest.raises(EditError, match=message):
            ffedit.load_stats(path, edited)


def test_on_an_edited_model_those_of_it_and_of_the_unedited_one_serve_and_no_others(text: Path) -> None:
    editable, strange = zoo.build("gpt2", bos=True), zoo.build("gpt2", bos=True)
    with torch.no_grad():
        strange.model.get_parameter("transformer.h.0.mlp.c_fc.weight").mul_(-1.3)
    unedited, other = (ffedit.stats(one, [1], Corpus(text, 200)) for one in (editable, strange))
    write(editable, layer=0).apply_(editable)
    edited, before = ffedit.stats(editable, [1], Corpus(text, 200)), zoo.snapshot(editable)
    for found in (unedited, edited):
        check_stats(editable, of(editable, 1), found)
    with pytest.raises(EditError, match="weights below that layer"):
        check_stats(editable, of(editable, 1), other)
    assert zoo.unchanged(editable, before)


@pytest.mark.usefixtures("verified_here")
@pytest.mark.parametrize("kept", [True, False], ids=["with originals", "without"])
def test_those_of_the_base_serve_a_checkpoint_that_keeps_what_its_edits_changed(
    kept: bool, text: Path, tmp_path: Path
) -> None:
    """In the layers above the edit, too, whose keys are no longer the base's."""
    editable = ffedit.load(on_disk("gpt2", tmp_path / "base"))
    of_base = ffedit.stats(editable, [0, 1, 2], Corpus(text, 200))
    folder = ffedit.save_stats(of_base, tmp_path / "stats")
    first = write(editable, layer=0)
    again = ffedit.load(ffedit.export(editable, first, tmp_path / "once", originals=kept, verify="tensors"))
    before = zoo.snapshot(again)
    assert list(ffedit.load_stats(folder, again)) == [Address(layer) for layer in range(3 if kept else 1)]
    assert zoo.unchanged(again, before)
    (folder / "layer-0.safetensors").unlink()
    if not kept:
        with pytest.raises(EditError, match=r"weights below that layer.*edited since"):
            ffedit.load_stats(folder, again)
        return
    stats = ffedit.load_stats(folder, again)
    assert alike(stats, {at: of_base[at] for at in stats})
    later = ffedit.edit(again, [SECOND], "emmet", layers=[1], stats=stats, config=quick())
    assert later.provenance["statistics"]["1"]["fingerprint"] == of_base[Address(1)].fingerprint
    with torch.no_grad():
        again.model.get_parameter("transformer.h.0.mlp.c_fc.weight").mul_(-1.3)
    with pytest.raises(EditError, match="weights below that layer"):
        ffedit.load_stats(folder, again)


def test_folders_of_different_texts_add_up(text: Path, tmp_path: Path) -> None:
    editable = zoo.shared("gpt2")
    (other := tmp_path / "other.txt").write_text(TEXT * 40)
    first, second = (ffedit.stats(editable, [0, 1], Corpus(path, 500)) for path in (text, other))
    folders = [ffedit.save_stats(found, tmp_path / name) for name, found in (("a", first), ("b", second))]
    both = ffedit.merge_stats(folders)
    for address, moments in both.items():
        assert moments.count == 1000 and torch.equal(moments.sum, first[address].sum + second[address].sum)
    longer = ffedit.stats(editable, [0], Corpus(text, 600))
    folders.append(ffedit.save_stats(longer, tmp_path / "c"))
    with pytest.raises(EditError, match=r"same text.*count twice"):
        ffedit.merge_stats(folders)


# The command --------------------------------------------------------------------------------------


@pytest.fixture
def run(capsys: pytest.CaptureFixture[str], empty: Path) -> Callable[..., Ran]:
    return lambda *words: shell(capsys, "stats", *words)


def test_the_command_collects_writes_and_merges(run: Callable[..., Ran], model: Path, text: Path) -> None:
    done = run(
        "-m", model, "--corpus", text, "--layers", "0-1", "--tokens", "2000", "--out", "one", "--json", "one.json"
    )
    assert done.code == 0 and "! text.txt holds 1,501 tokens only; 2,000 were asked for" in done.out
    layers = json.loads(Path("one.json").read_text())["layers"]
    assert [row["address"] for row in layers] == ["0", "1"] and layers[0]["condition"] > 1
    assert layers[0]["count"] == 1501 and layers[0]["convergence"] > 0 and layers[0]["weighting"] == "types"
    done = run("-m", model, "--tokens", "300", "--out", "two")
    assert done.code == 0 and "none is remembered" in done.out and "–" in done.out, "too short to tell"
    assert sorted(path.name for path in Path("two").iterdir()) == [f"layer-{n}.safetensors" for n in range(3)]
    done = run("--merge", "one", "two", "--out", "both")
    assert done.code == 0 and "1,801" in done.out
    assert {m.count for m in ffedit.load_stats("both", ffedit.load(model)).values()} == {1801, 300}


@pytest.mark.parametrize(
    ("words", "code", "message"),
    [
        (["--merge", "a", "b"], 2, "--merge, the FOLDERs to add up and --out belong together"),
        (["a"], 2, "--merge, the FOLDERs"),
        (["--merge", "a", "--out", "b"], 1, "a: no such folder"),
        (["--corpus", "none.txt"], 1, "none.txt: no such file"),
        (["--tokens", "1"], 2, "--tokens"),
        (["--out", "."], 1, "exists already"),
    ],
)
def test_mistakes_are_told_before_any_work(run: Callable[..., Ran], words: list[str], code: int, message: str) -> None:
    Path("something").write_text("")
    done = run(*words)
    assert done.code == code and message in done.err and "Traceback" not in done.err

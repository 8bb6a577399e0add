"""The cache: where it is told to be, never half written, never the wrong entry, never a reason to fail."""

from __future__ import annotations

import multiprocessing
import os
import resource
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import torch
import zoo
from platformdirs import user_cache_path
from safetensors.torch import load
from shell import shell
from tokenizers import normalizers
from writing import collect_moments

from ffedit import EditError
from ffedit.files import cache
from ffedit.files.placing import claimed
from ffedit.inference.corpus import Corpus
from ffedit.loading.verify import find_and_verify
from ffedit.model.editable import Editable
from ffedit.model.fingerprint import fingerprint

SAMPLED = Corpus(tokens=150)


@contextmanager
def passes(editable: Editable) -> Iterator[list[int]]:
    """Tokens of every forward pass inside the block."""
    seen: list[int] = []
    handle = editable.embedding.register_forward_hook(lambda _, __, output: seen.append(output.shape[1]))
    try:
        yield seen
    finally:
        handle.remove()


@contextmanager
def small_disk(size: int) -> Iterator[None]:
    """No file can grow beyond `size` bytes, as on a full disk."""
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (size, hard))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))


def collects(editable: Editable, corpus: Corpus = SAMPLED, layer: int = 1) -> bool:
    """Whether statistics are collected anew: whether the model runs."""
    with passes(editable) as seen:
        collect_moments(editable, editable.memories[layer], corpus)
    return bool(seen)


# The folder ---------------------------------------------------------------------------------------


def test_the_variable_names_the_folder(cache_folder: Path) -> None:
    assert cache.folder() == cache_folder
    collect_moments(zoo.shared("gpt2"), zoo.shared("gpt2").memories[1], SAMPLED)
    entries = cache.entries()
    assert [entry.parent for entry in entries] == [cache_folder / "moments", cache_folder / "texts"]
    size = sum(entry.stat().st_size for entry in entries)
    assert all(entry.stat().st_size for entry in entries) and cache.clear() == size and cache.entries() == []


def test_without_the_variable_the_platforms_folder_is_taken(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.delenv("FFEDIT_CACHE")
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    assert cache.folder() == user_cache_path("ffedit", appauthor=False)
    assert sys.platform != "linux" or cache.folder() == tmp_path / "ffedit"


def test_a_user_without_a_home_is_told_where_to_name_a_cache(monkeypatch: pytest.MonkeyPatch) -> None:
    def nowhere(*_: Any, **__: Any) -> Path:
        raise RuntimeError("could not determine the home directory")

    monkeypatch.delenv("FFEDIT_CACHE")
    monkeypatch.setattr(cache, "user_cache_path", nowhere)
    with pytest.raises(EditError, match=r"home directory.*FFEDIT_CACHE"):
        cache.folder()


# Writing ------------------------------------------------------------------------------------------


def test_an_entry_appears_whole_or_not_at_all(cache_folder: Path) -> None:
    target = cache.path("kind", "key", ".bin")
    cache.write(target, lambda path: path.write_bytes(b"old") and None)

    def half(error: BaseException) -> Callable[[Path], None]:
        def save(path: Path) -> None:
            path.write_bytes(b"ha")
            assert target.read_bytes() == b"old" and cache.entries() == [target]
            raise error

        return save

    cache.write(target, half(OSError(28, "No space left on device")))
    with pytest.raises(KeyboardInterrupt):
        cache.write(target, half(KeyboardInterrupt()))
    assert [p.name for p in target.parent.iterdir()] == ["key.bin"] and target.read_bytes() == b"old"


def _write_often(target: Path, letter: bytes) -> None:
    for _ in range(100):
        cache.write(target, lambda path: path.write_bytes(letter * 50_000) and None)


def test_two_processes_may_write_one_entry() -> None:
    target = cache.path("kind", "key", ".bin")
    context = multiprocessing.get_context("fork")
    writers = [context.Process(target=_write_often, args=(target, letter)) for letter in (b"a", b"b")]
    for writer in writers:
        writer.start()
    seen = set()
    while any(writer.is_alive() for writer in writers):
        if target.exists():
            seen.add(target.read_bytes())
    assert [writer.exitcode for writer in writers] == [0, 0]
    assert seen <= {b"a" * 50_000, b"b" * 50_000} and [p.name for p in target.parent.iterdir()] == ["key.bin"]


@pytest.mark.parametrize("step", ["entries", "sizes"])
def test_what_another_process_deletes_meanwhile_is_no_error(
    step: str, cache_folder: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def fill() -> None:
        for i, key in enumerate("abc"):
            (path := cache.path("kind", key, ".bin")).parent.mkdir(parents=True, exist_ok=True)
            path.write_bytes(b"x" * 10**i)

    look = getattr(cache, step)

    def meanwhile() -> Any:
        found = look()
        next(iter(found)).unlink()
        return found

    fill()
    monkeypatch.setattr(cache, step, meanwhile)
    assert cache.clear() == 10 + 100 and look() == type(look())()
    fill()
    ran = shell(capsys, "cache", "clear")
    assert (ran.code, ran.err) == (0, "") and "0 bytes freed" in ran.out
    fill()
    ran = shell(capsys, "cache", "list")
    assert (ran.code, ran.err) == (0, "") and ("2 files" if step == "entries" else "3 files") in ran.out


@pytest.mark.parametrize("trouble", ["not a folder", "full"])
def test_a_cache_that_cannot_be_written_costs_nothing_but_time(
    trouble: str, cache_folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    editable = zoo.build("gpt2")
    if trouble == "full":
        with small_disk(500):
            moments = collect_moments(editable, editable.memories[1], SAMPLED)
        assert cache.entries() == [] and list(cache_folder.rglob(".*")) == []
    else:
        (tmp_path / "file").write_text("")
        monkeypatch.setenv("FFEDIT_CACHE", str(tmp_path / "file"))
        moments = collect_moments(editable, editable.memories[1], SAMPLED)
    assert moments.count == SAMPLED.tokens


def test_a_damaged_entry_is_collected_anew() -> None:
    editable = zoo.shared("gpt2")
    assert collects(editable)
    entry = next(entry for entry in cache.entries() if entry.parent.name == "moments")
    whole = entry.read_bytes()
    entry.write_bytes(whole[:100])
    assert collects(editable) and not collects(editable)
    # Tensors, not bytes: the header tells how many seconds the pass took.
    torch.testing.assert_close(load(entry.read_bytes()), load(whole), rtol=0, atol=0)


def test_what_killed_processes_left_goes_when_the_cache_is_used(cache_folder: Path) -> None:
    (left := cache_folder / "kind" / ".key.bin.abcdefgh.unfinished").mkdir(parents=True)
    (lock := cache_folder / "kind" / ".lock").touch()
    cache.path("kind", "key", ".bin")
    assert not left.exists() and not lock.exists(), "no later write of this entry would clear it"
    for clear in (cache.clear, lambda: cache.prune(time.time())):
        left.mkdir()
        lock.touch()
        assert not clear() and not left.exists() and not lock.exists()
    with claimed(lock.parent):
        assert cache.clear() == 0 and lock.exists(), "of a process that lives"


# Limits -------------------------------------------------------------------------------------------


def entry(key: str, size: int, days: float, kind: str = "kind") -> Path:
    """An entry of so many bytes that was last used so many days ago; of the kind gguf, a folder."""
    path = cache.path(kind, key, "")
    (path if kind == "gguf" else path.parent).mkdir(parents=True)
    (path / "model" if kind == "gguf" else path).write_bytes(b"x" * size)
    os.utime(path, (0, time.time() - days * cache.DAY))
    return path


def test_the_least_recently_used_entries_go_first_and_one_in_use_never(monkeypatch: pytest.MonkeyPatch) -> None:
    sizes = {"a": (100, 9), "b": (500, 8), "c": (100, 7), "d": (400, 0.5), "e": (400, 200)}
    paths = {key: entry(key, *about, kind="gguf" if key == "b" else key) for key, about in sizes.items()}
    assert list(cache.sizes()) == [paths[key] for key in "eabcd"]
    for most, left in (("2e-6", "abcd"), ("5e-7", "cd"), ("0", "d")):  # e is too old, however much room there is
        monkeypatch.setenv("FFEDIT_CACHE_MAX_GB", most)
        cache.prune(time.time())
        assert list(cache.sizes()) == [paths[key] for key in left]


def test_a_clock_that_is_years_ahead_deletes_no_entry_that_was_just_used(monkeypatch: pytest.MonkeyPatch) -> None:
    used = cache.path("texts", "used", ".txt")
    cache.write(used, lambda made: made.write_text("a"))
    real = time.time
    monkeypatch.setattr(time, "time", lambda: real() + 3 * 365 * cache.DAY)
    cache.write(cache.path("texts", "other", ".txt"), lambda made: made.write_text("b"))
    assert used.exists()


def test_an_entry_that_another_process_deletes_meanwhile_makes_room(monkeypatch: pytest.MonkeyPatch) -> None:
    gone, stays = entry("gone", 600, 9), entry("stays", 600, 8, "other")
    listed = cache.sizes()
    gone.unlink()
    monkeypatch.setattr(cache, "sizes", lambda: listed)
    monkeypatch.setenv("FFEDIT_CACHE_MAX_GB", "1e-6")
    cache.prune(time.time())
    assert stays.exists()


def test_what_is_looked_up_counts_as_used_and_every_write_keeps_the_limit(monkeypatch: pytest.MonkeyPatch) -> None:
    old, asked = entry("old", 900, 8, "old"), entry("asked", 900, 9, "gguf")
    monkeypatch.setenv("FFEDIT_CACHE_MAX_GB", "1e-6")
    assert cache.path("gguf", "asked", "") == asked
    cache.write(cache.path("kind", "new", ".bin"), lambda path: path.write_bytes(b"x" * 50))
    assert not old.exists() and {path.name for path in cache.entries()} == {"asked", "new.bin"}


@pytest.mark.parametrize("value", ["much", "-1", "nan", "20GB"])
def test_a_limit_that_is_none_is_one_line(
    value: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("FFEDIT_CACHE_MAX_GB", value)
    ran = shell(capsys, "cache")
    assert ran.code == 1 and repr(value) in ran.err and ran.err.count("\n") == 1
    with pytest.raises(EditError, match="FFEDIT_CACHE_MAX_GB is"):
        cache.entry("moments", "whatever is looked up")


# Statistics ---------------------------------------------------------------------------------------


def test_statistics_are_collected_once() -> None:
    editable = zoo.build("gpt2")
    first = collect_moments(editable, editable.memories[1], SAMPLED)
    assert not collects(editable) and not collects(zoo.build("gpt2")), "the same weights, loaded again"
    again = collect_moments(editable, editable.memories[1], SAMPLED)
    assert torch.equal(first.sum, again.sum) and first.count == again.count
    assert first.count == SAMPLED.tokens and SAMPLED.path is None and "sampled" in first.source


def test_statistics_of_other_weights_layers_and_counts_are_not_taken() -> None:
    assert collects(zoo.build("llama"))
    assert collects(zoo.build("llama", seed=1))
    assert collects(zoo.build("llama", dtype=torch.bfloat16))
    assert collects(zoo.build("llama"), layer=2)
    assert collects(zoo.build("llama"), Corpus(tokens=100))
    assert collects(zoo.build("llama"), Corpus(tokens=150, seed=1))
    editable = zoo.build("llama")
    with torch.no_grad():
        editable.model.get_parameter("model.layers.0.mlp.up_proj.weight")[3, 5] += 0.5
    assert collects(editable)
    assert not collects(zoo.build("llama"))


def test_statistics_of_sampled_text_belong_to_the_whole_model_that_sampled_it(tmp_path: Path) -> None:
    def above() -> Editable:
        editable = zoo.build("llama")
        with torch.no_grad():
            editable.memories[2].value.mul_(3.0)
        return editable

    assert collects(zoo.build("llama")) and collects(above())
    (tmp_path / "text.txt").write_text("the old tower stands in Rome " * 20)
    corpus = Corpus(tmp_path / "text.txt", tokens=60)
    assert collects(zoo.build("llama"), corpus)
    assert not collects(above(), corpus), "keys over given text depend on nothing above them"


def test_statistics_of_another_text_are_not_taken(tmp_path: Path) -> None:
    editable, path = zoo.build("llama"), tmp_path / "text.txt"
    path.write_text("the old tower stands in Rome " * 20)
    assert collects(editable, Corpus(path, tokens=60)) and not collects(editable, Corpus(path, tokens=60))
    assert collects(editable, Corpus(path, tokens=50))
    path.write_text("the new tower stands in Rome " * 20)
    assert collects(editable, Corpus(path, tokens=60))
    assert "text.txt" in collect_moments(editable, editable.memories[1], Corpus(path, tokens=60)).source


def test_statistics_of_another_tokenizer_are_not_taken(tmp_path: Path) -> None:
    path = tmp_path / "text.txt"
    path.write_text("the old tower stands in Rome " * 20)
    tokenizers = [zoo.words(), zoo.words(bos=True), zoo.words(extra=("Vienna",))]
    tokenizers[0].backend_tokenizer.normalizer = normalizers.Lowercase()  # the same words, used differently
    tokenizers.append(zoo.words())
    model = zoo.model("llama")
    for tokenizer in tokenizers:
        assert collects(find_and_verify(model, tokenizer, "m"), Corpus(path, tokens=60))
    assert not collects(find_and_verify(model, zoo.words(), "m"), Corpus(path, tokens=60))


@pytest.mark.parametrize("content", [None, b"", b"\xff\xfe\x00\xd8"])
def test_a_corpus_that_is_no_text_is_refused(content: bytes | None, tmp_path: Path) -> None:
    path = tmp_path / "text.txt"
    if content is not None:
        path.write_bytes(content)
    with pytest.raises(EditError, match=r"text\.txt") as caught:
        collects(zoo.shared("gpt2"), Corpus(path))
    assert "\n" not in str(caught.value) and cache.entries() == []


def test_the_fingerprint_does_not_depend_on_threads() -> None:
    editable, found = zoo.build("gpt2"), set()
    with torch.no_grad():  # large enough for threads to share the sum
        editable.model.get_input_embeddings().weight = torch.nn.Parameter(torch.randn(50_000, 32))
    for threads in (1, 2, 4):
        torch.set_num_threads(threads)
        found.add(fingerprint(editable))
    torch.set_num_threads(1)
    assert len(found) == 1

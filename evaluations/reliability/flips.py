"""Files are damaged: a bit is flipped, or the end is cut off, in every kind of file that ffedit reads.

**The promise.** A damaged file is refused with one line, or made anew where it is the cache's, or the damage changes no
part of what is read. Where a file is text that a person wrote (facts, recipes), a changed letter is read as it stands
there, and shown. Nothing else is read from it in silence.

What cannot be kept: files of others have no checksum. A flipped weight of a checkpoint, or of a GGUF file, is another
weight; the count says how many such flips the model's fingerprint tells, which refuses the model's edits and statistics
then, and how many go unseen.

**How.** Each case flips one bit at a random position of a file, or cuts the file at a random length, and reads it in a
forked child by the function that the commands read it with.

    python evaluations/reliability/flips.py                  # 1,000 flips and 100 lengths of each kind: half an hour
    python evaluations/reliability/flips.py --cases 20 --cuts 5 --kinds "edit: tensors,statistics"
"""

from __future__ import annotations

import hashlib
import json
import os
import random
import shutil
import tempfile
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, fields, is_dataclass
from pathlib import Path
from typing import Any
from unittest.mock import patch

import click
import pandas
import torch
from courses import APPLY, COURSES, begin, imported, must, prepare
from tally import REPORTS, Tally

import ffedit
from ffedit.algebra.key_moments import KeyMoments
from ffedit.benchmark import folder as results
from ffedit.cli.run import read_recipe
from ffedit.errors import FFEditError
from ffedit.exporter import embedded_edits
from ffedit.facts.reading import read_facts
from ffedit.files.resuming import Journal, load_state, save_state
from ffedit.inference.own_text import own_text
from ffedit.inference.text import kept_ids
from ffedit.loading import gguf
from ffedit.model.fingerprint import fingerprint

PROMISE = (
    "If a bit of a file is flipped or its end is cut off, the file is refused with one line or made anew, or the data "
    "read from it are the same to the bit. Only text that a person wrote is read as it is."
)
ASKED = "the Eiffel tower is located in Rome . Zürich, 東京 !"


class Damaged(Exception):
    """A file of the cache that is made anew."""


@dataclass(frozen=True)
class Kind:
    """A kind of file, and what is read from it; `read` is called in a child, with the folder that the file is in."""

    name: str
    folder: Path
    file: str
    read: Callable[[Path], Any]
    written: bool = False  # by a person, or without a checksum: it may say something else


@dataclass
class Model:
    """What a model is, for its fingerprint, and does."""

    mark: str
    does: str


def plain(value: Any) -> Any:
    """Return a value as plain data, with tensors as hashes."""
    if isinstance(value, torch.Tensor):
        data = value.detach().cpu().contiguous().reshape(-1).view(torch.uint8).numpy().tobytes()
        return [str(value.dtype), list(value.shape), hashlib.sha256(data).hexdigest()]
    if is_dataclass(value) and not isinstance(value, type):
        return {f.name: plain(getattr(value, f.name)) for f in fields(value) if f.init}
    if isinstance(value, dict):
        return {str(name): plain(inner) for name, inner in value.items()}
    if isinstance(value, list | tuple):
        return [plain(inner) for inner in value]
    return value if isinstance(value, int | float | bool | None) else str(value)


def cached(value: Any) -> Any:
    """Return what was read from the cache; Damaged for nothing."""
    if value is None or value == []:
        raise Damaged
    return value


def traced(lines: list[Any]) -> list[Any]:
    """Return the lines of a journal of two traces; Damaged where one is left out, and made anew."""
    if len(lines) < 2:
        raise Damaged
    return lines


@torch.no_grad()
def model_in(folder: Path) -> Model:
    """Load a model; say what its fingerprint is, and what it tokenises and predicts."""
    editable = ffedit.load(folder)
    ids = torch.arange(12)[None] % 90
    spoken = editable.tokenizer(ASKED)["input_ids"], editable.tokenizer.decode(range(40))
    logits = editable.model(input_ids=ids, use_cache=False).logits
    return Model(fingerprint(editable), json.dumps(plain([spoken, logits])))


def edit_in(folder: Path) -> Any:
    """Load an edit."""
    edit = ffedit.Edit.load(folder)
    return [edit.facts, edit.provenance, dict(edit.updates), dict(edit.keys), dict(edit.values)]


def converted(folder: Path) -> Any:
    """Return all of a converted model, found in the cache by the GGUF file beside it."""
    os.environ["FFEDIT_CACHE"] = str(folder)
    with patch.object(gguf, "_convert", _damaged):
        made = gguf.converted("tiny", folder / "tiny.gguf")
    files = [path for path in sorted(made.iterdir()) if path.name != gguf.CHECKSUMS]
    return {path.name: hashlib.sha256(path.read_bytes()).hexdigest() for path in files}


def _damaged(*_: Any) -> None:
    raise Damaged


def from_gguf(folder: Path) -> Model:
    """Load a GGUF file, which is converted."""
    os.environ["FFEDIT_CACHE"] = str(folder / "cache")
    return model_in(folder / "tiny.gguf")


def benchmark(folder: Path) -> Any:
    """Read the journal of a benchmark; a last line without its end is measured again."""
    lines = results.Journal(folder, writes=False).lines
    whole = json.loads((folder / "count.json").read_text())
    if len(lines) < whole:
        raise Damaged
    return list(lines.values())


def kinds(inputs: Path, work: Path) -> Iterator[Kind]:
    """Make one file of each kind, in a folder of its own."""
    base, checkpoint = inputs / "model", inputs / "exported"
    for name, path in (("facts.json", inputs / "facts.json"), ("facts.jsonl", None), ("facts.parquet", None)):
        (work / "facts").mkdir(exist_ok=True)
        records = json.loads((inputs / "facts.json").read_text())
        if path is not None:
            shutil.copy(path, work / "facts" / name)
        elif name.endswith("l"):
            (work / "facts" / name).write_text("\n".join(map(json.dumps, records)))
        else:
            pandas.DataFrame(records).to_parquet(work / "facts" / name)
        yield Kind(f"facts: {name}", work / "facts", name, lambda folder, name=name: read_facts(folder / name), True)
    must(inputs, [*APPLY, "--out=again", "--save-recipe=recipe.yaml"])
    yield Kind("recipe", inputs, "recipe.yaml", lambda folder: read_recipe(folder / "recipe.yaml"), True)
    yield Kind("edit: manifest", inputs / "edit", "manifest.json", edit_in)
    yield Kind("edit: tensors", inputs / "edit", "edit.safetensors", edit_in)
    must(begin(inputs, work / "stats", COURSES["stats"]), COURSES["stats"].words)
    (statistics, *_) = sorted((work / "stats" / "result").iterdir())
    yield Kind(
        "statistics", statistics.parent, statistics.name, lambda folder: KeyMoments.load(folder / statistics.name)
    )
    for part in ("originals.safetensors", "000/manifest.json", "000/edit.safetensors"):
        yield Kind(f"undo: {part}", checkpoint, f"ffedit_edits/{part}", undoing)
    yield from _bench_kinds(inputs, work)
    (work / "state").mkdir()
    save_state(work / "state" / "s.safetensors", {"sum": torch.randn(40, 40)}, {"seconds": 1.5, "batches": 3})
    yield Kind(
        "unfinished work", work / "state", "s.safetensors", lambda folder: load_state(folder / "s.safetensors", "bad")
    )
    yield from _cache_kinds(inputs, work)
    for name in ("model.safetensors", "config.json", "tokenizer.json", "tokenizer_config.json"):
        yield Kind(f"model: {name}", base, name, model_in, True)
    (work / "gguf").mkdir()
    shutil.copy(inputs / "tiny.gguf", work / "gguf")
    yield Kind("model: GGUF", work / "gguf", "tiny.gguf", from_gguf, True)


def undoing(folder: Path) -> Any:
    """Read all that undoing needs, and plan it."""
    plan = embedded_edits.plan_undo(folder)
    return [list(change.blocks()) for change in plan.plan.values()] + [edit_in(folder / "ffedit_edits" / "000")]


def _bench_kinds(inputs: Path, work: Path) -> Iterator[Kind]:
    must(begin(inputs, work / "bench", COURSES["bench"]), COURSES["bench"].words)
    out = work / "bench" / "result"
    run = json.loads((out / "manifest.json").read_text())["run"]
    (work / "results").mkdir()
    shutil.copy(out / "results.jsonl", work / "results")
    (work / "results" / "count.json").write_text(str(len((out / "results.jsonl").read_text().splitlines())))
    yield Kind("benchmark: results.jsonl", work / "results", "results.jsonl", benchmark)
    (work / "manifest").mkdir()
    shutil.copy(out / "manifest.json", work / "manifest")
    yield Kind("benchmark: manifest", work / "manifest", "manifest.json", lambda at: results.earlier(at, run, False)[0])


def _cache_kinds(inputs: Path, work: Path) -> Iterator[Kind]:
    cache = work / "cache"
    os.environ["FFEDIT_CACHE"] = str(cache)
    editable = ffedit.load(inputs / "model")
    fact, corpus = json.loads((inputs / "fact.json").read_text()), ffedit.Corpus(str(inputs / "corpus.txt"))
    ffedit.collect_stats(editable, [1], corpus=corpus)
    own_text(editable, 2, 8, 0)
    trace = ffedit.locate(editable, ffedit.Fact(fact["subject"], fact["prompt"], fact["target"]))
    Journal(cache / "traces" / "t.jsonl", {"run": 0}).add({"fact": "a", "trace": trace.to_dict()}, {"fact": "b"})
    for kind, read in (
        ("moments", lambda path: KeyMoments.load(path)),
        ("texts", lambda path: cached(list(kept_ids(path)))),
        ("traces", lambda path: traced(Journal(path, {"run": 0}).lines)),
    ):
        path = sorted((cache / kind).iterdir())[-1]
        yield Kind(f"cache: {kind}", cache / kind, path.name, lambda f, read=read, name=path.name: read(f / name))
    (work / "converted").mkdir()
    shutil.copy(inputs / "tiny.gguf", work / "converted")
    os.environ["FFEDIT_CACHE"] = str(work / "converted")
    made = gguf.converted("tiny", work / "converted" / "tiny.gguf")
    for name in ("model.safetensors", "config.json", "tokenizer.json", gguf.CHECKSUMS):
        file = str((made / name).relative_to(work / "converted"))
        yield Kind(f"cache: converted {name}", work / "converted", file, converted)


# A case -------------------------------------------------------------------------------------------


def damaged(content: bytes, cut: bool, draw: random.Random) -> tuple[bytes, dict[str, int]]:
    """Return a file's content with one bit flipped, or cut off; and where."""
    at = draw.randrange(len(content))
    if cut:
        return content[:at], {"length": at}
    bit = draw.randrange(8)
    return content[:at] + bytes([content[at] ^ 1 << bit]) + content[at + 1 :], {"byte": at, "bit": bit}


def end(kind: Kind, expected: Any) -> str:
    """Read a file; return how it ended, in a word or, where it should not have, in a sentence."""
    try:
        value = kind.read(kind.folder)
    except Damaged:
        return "made anew"
    except FFEditError as error:
        lines = str(error).strip().splitlines()
        return "refused" if len(lines) == 1 else f"refused in {len(lines)} lines: {lines[:2]}"
    except BaseException as error:
        return f"{type(error).__name__}: {error!s:.300}"
    if isinstance(value, Model):
        if value == expected:
            return "the same"
        return "told by the fingerprint" if value.mark != expected.mark else "unseen: the model does something else"
    if plain(value) == expected:
        return "the same"
    return "read as it stands" if kind.written else f"read in silence: {plain(value)!s:.200}"


def read_each(kind: Kind, contents: Sequence[bytes], expected: Any) -> list[str]:
    """Read a file with each of `contents` in a forked child; a child that dies ends the list with how it did."""
    path = kind.folder / kind.file
    about, before = path.stat(), set(kind.folder.rglob("*"))
    reading, writing = os.pipe()
    pid = os.fork()
    if not pid:
        try:
            silent = os.open(os.devnull, os.O_WRONLY)
            os.dup2(silent, 1)
            os.dup2(silent, 2)
            for content in contents:
                path.write_bytes(content)
                os.utime(path, ns=(about.st_atime_ns, about.st_mtime_ns))
                os.write(writing, json.dumps(end(kind, expected)).encode() + b"\n")
                for new in sorted(set(kind.folder.rglob("*")) - before, reverse=True):
                    shutil.rmtree(new) if new.is_dir() else new.unlink()
        finally:
            os._exit(0)
    os.close(writing)
    with os.fdopen(reading, "rb") as pipe:
        said = [json.loads(line) for line in pipe]
    status = os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])
    return said if len(said) == len(contents) else [*said, f"the process ended with {status}"]


GOOD = ("the same", "refused", "made anew", "read as it stands", "told by the fingerprint")


@click.command()
@click.option("--cases", type=int, default=1000, show_default=True, help="Flips of each kind of file.")
@click.option("--cuts", type=int, default=100, show_default=True, help="Lengths of each kind of file.")
@click.option("--seed", type=int, default=0, show_default=True)
@click.option("--kinds", "names", help="Only these, with commas.")
@click.option("--out", type=click.Path(path_type=Path), help=f"The report, such as {REPORTS.name}/flips.json.")
def main(cases: int, cuts: int, seed: int, names: str | None, out: Path | None) -> None:
    """Damage files and read them, and count what is noticed."""
    tally, ends = Tally(PROMISE), dict[str, Counter[str]]()
    with tempfile.TemporaryDirectory() as folder:
        imported()
        inputs, work = prepare(Path(folder)), Path(folder) / "work"
        work.mkdir()
        for kind in kinds(inputs, work):
            if names is not None and kind.name not in names.split(","):
                continue
            ends[kind.name] = run(kind, tally, cases, cuts, seed)
            print(kind.name, dict(ends[kind.name]), flush=True)
    own = {name: dict(sorted(ended.items())) for name, ended in ends.items()}
    tally.finish(out, seed=seed, ends=own)


def run(kind: Kind, tally: Tally, cases: int, cuts: int, seed: int) -> Counter[str]:
    """Damage one kind of file, many times; count how reading ended."""
    path, draw, ended = kind.folder / kind.file, random.Random(f"{seed} {kind.name}"), Counter[str]()
    whole = path.read_bytes()
    expected = kind.read(kind.folder)
    expected = expected if isinstance(expected, Model) else plain(expected)
    drawn = [(number >= cases, *damaged(whole, number >= cases, draw)) for number in range(cases + cuts)]
    while drawn:
        some = drawn[:50]
        ends = read_each(kind, [content for _, content, _ in some], expected)
        for (cut, _, where), said in zip(some, ends, strict=False):
            # What only its owner could tell is a kind of its own, and no failure.
            own = said.startswith("unseen") and kind.name.startswith("model: ")
            ended[said if said in GOOD or own else "FAILED"] += 1
            tally.count(f"{kind.name} ({'cut' if cut else 'flipped'})", where, None if said in GOOD or own else said)
        drawn = drawn[len(ends) :]
    path.write_bytes(whole)
    return ended


if __name__ == "__main__":
    main()

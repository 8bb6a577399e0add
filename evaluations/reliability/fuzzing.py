"""Valid files of every kind that ffedit reads, ways to spoil them, and the readers that refuse them in one line.

A case is a kind, a number that picks a variant of its files, and a list of damages. Damages know the structure: a value
of a JSON, YAML or safetensors header is replaced, removed, renamed, nested or repeated (types, huge numbers, NaN,
depth, control characters, paths that leave their folder), an integer of a GGUF file is overwritten; and every file is
flipped, cut, grown or replaced as bytes. Edits are signed anew after every second damage, so that what hashes protect
is read as well. A case is plain JSON, and the same case spoils the same bytes.
"""

from __future__ import annotations

import copy
import csv
import hashlib
import io
import json
import os
import tempfile
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, redirect_stderr, redirect_stdout
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any, TypeAlias
from unittest.mock import patch

import gguf
import hypothesis.strategies as st
import numpy as np
import torch
import yaml
from rich.console import Console
from safetensors.torch import save

from ffedit.algebra.key_moments import KeyMoments
from ffedit.algebra.low_rank import LowRank
from ffedit.benchmark import folder as results
from ffedit.benchmark.report import report
from ffedit.benchmark.tables import markdown
from ffedit.cli import COMMANDS, cli, invoke
from ffedit.cli.run import defaults, read_recipe
from ffedit.display.terminal.show import edit_json, edit_view
from ffedit.editor.edit import Edit
from ffedit.editor.edit_files import checksum
from ffedit.editor.provenance import versions
from ffedit.editor.recipe import recipe_of, to_yaml
from ffedit.editor.statistics_files import read_folder
from ffedit.errors import FFEditError, ModelError
from ffedit.exporter.checkpoint import export_plan
from ffedit.exporter.gguf import edits_in
from ffedit.exporter.model_card import adapter_card, model_card, origin_of
from ffedit.facts.fact import Fact
from ffedit.facts.reading import sift_facts
from ffedit.files.atomic import finite
from ffedit.files.tensor_ranges import FLOATS, contents
from ffedit.loading.gguf_reader import checked, open_gguf
from ffedit.model.memory import Address

HERE = Path(__file__).parents[2]
Files: TypeAlias = dict[str, bytes]
Damage: TypeAlias = tuple[int, int, int]  # which way, where, and with what
Case: TypeAlias = "tuple[str, int, Sequence[Damage]]"

# Stand in JSON for text that no value gives; the text itself takes the mark's place.
RAW = ["1e999", "-1e999", "NaN", "Infinity", "1" * 5000, "[" * 100_000, '{"a":' * 50_000, "tru", "{}{}", "// no", "'a'"]
MARK = "raw text "
TEXTS = [
    *("", " ", "\0", "a\0b", "\n", "a\nb", "\r\x0b\x0c", "\x1b[31mred\x1b[0m", "\x1b]8;;http://x\x07link", "\u202egnp"),
    *("\ud800", "\U0010ffff", "\ufeff", "e\u0301" * 40, "{}", "{} {}", "{0}", "%s", "Eiffel Tower", "Rome"),
    *("../../outside", "/etc/passwd", "~root", "C:\\x", "x" * 10_000, "🗼" * 500, "-1", "1e999", "null", "<script>"),
    *("[bold]", "`", "|", "$(id)", "2001-99-99", "0.0", "1.2.3", "٣", "1_0", "F64", "I8", "float64", "__class__"),
    *(f"{MARK}{number} " for number in range(len(RAW))),
]
NUMBERS: list[Any] = [
    *(0, -1, 1, 2, 3, 7, 255, 2**31, 2**32, 2**53 + 1, 2**63, 2**64 - 1, -(2**63), 10**30, 10**400),
    *(0.5, -0.0, 1e308, 1e-308, float("nan"), float("inf"), float("-inf")),
]
SHAPES: list[Any] = [
    *(
        None,
        True,
        False,
        [],
        {},
        [[]],
        [None],
        {"": None},
        {"a": {"b": {}}},
        [0, 0],
        [2**40, 2**40],
        [-1, 4],
        [[1], [2]],
    ),
    *(["a", "b"], [1.5, 2.5], {"str": None}, {"str": ["a"]}, {"str": {}}, [{"prompt": None}], list(range(3000))),
]
NASTY: list[Any] = [*TEXTS, *NUMBERS, *SHAPES]
INTEGERS = [0, 1, 2, 7, 255, 2**16, 2**31 - 1, 2**31, 2**32 - 1, 2**40, 2**62, 2**63, 2**64 - 1]


@dataclass(frozen=True)
class Kind:
    """A kind of file: its valid variants by file name, its readers, and the commands that read it."""

    make: Callable[[], Sequence[Files]]
    read: Callable[[Path], object]
    commands: tuple[tuple[str, ...], ...] = ()  # {} is the folder


# Damages ------------------------------------------------------------------------------------------


def damaged(files: Files, damages: Sequence[Damage]) -> Files:
    """Return a copy of `files` with all damages done to it, one after the other."""
    files = dict(files)
    for way, where, what in damages:
        name = sorted(files)[where % len(files)]
        spoil = WAYS[way % len(WAYS)]
        files[name] = spoil(name, files[name], where // len(files), what)
    return files


def of_structure(name: str, content: bytes, where: int, what: int) -> bytes:
    """Change one value of a file's JSON, YAML or header; bytes where it has none (left)."""
    suffix = Path(name).suffix
    try:
        if suffix == ".gguf":
            return integer(name, content, where, what)
        if suffix == ".safetensors":
            length = int.from_bytes(content[:8], "little")
            header = _dump(changed(json.loads(content[8 : 8 + length]), where, what))
            return len(header).to_bytes(8, "little") + header + content[8 + length :]
        if suffix in (".yaml", ".yml"):
            return _raw(yaml.safe_dump(changed(yaml.safe_load(content), where, what), allow_unicode=True))
        if suffix == ".jsonl":
            lines = changed([json.loads(line) for line in content.splitlines()], where, what)
            return b"".join(_dump(line) + b"\n" for line in lines) if isinstance(lines, list) else _dump(lines)
        return _dump(changed(json.loads(content), where, what))
    except (ValueError, RecursionError, yaml.YAMLError):  # spoiled before
        return flipped(name, content, where, what)


def changed(tree: Any, where: int, what: int) -> Any:
    """Return a tree of JSON values with one of them changed; a text that holds JSON itself is changed inside."""
    root = [copy.deepcopy(tree)]
    nodes = list(_nodes(root))
    parent, key = nodes[where % len(nodes)]
    value, nasty, how = parent[key], NASTY[what % len(NASTY)], what // len(NASTY) % 8
    if isinstance(value, str) and value.startswith("{") and how != 7:
        try:
            parent[key] = json.dumps(changed(json.loads(value), where // len(nodes), what))
            return root[0]
        except ValueError:
            pass
    if how == 0 and len(nodes) > 1 and parent is not root:
        del parent[key]
    elif how == 1 and isinstance(value, dict):
        value[str(nasty)[:100]] = copy.deepcopy(NASTY[where % len(NASTY)])
    elif how == 2 and isinstance(value, list):
        value.extend(copy.deepcopy(value) or [nasty])
    elif how == 3:
        parent[key] = [value]
    elif how == 4:
        other, name = nodes[what % len(nodes)]
        parent[key] = copy.deepcopy(other[name])
    elif how == 5 and isinstance(parent, dict):
        parent[str(nasty)[:100]] = parent.pop(key)
    else:
        parent[key] = copy.deepcopy(nasty)
    return root[0]


def _nodes(parent: Any) -> Iterator[tuple[Any, Any]]:
    """Yield every value below a list or an object, as its parent and its key."""
    for key in list(parent) if isinstance(parent, dict) else range(len(parent)):
        yield parent, key
        if isinstance(parent[key], dict | list):
            yield from _nodes(parent[key])


def _dump(value: Any) -> bytes:
    return _raw(json.dumps(value, ensure_ascii=False))


def _raw(text: str) -> bytes:
    """Encode text; the marks, with the quotation marks around them, become the text that they stand for."""
    for number, raw in enumerate(RAW):
        mark = f"{MARK}{number} "
        for quoted in (f'"{mark}"', f"'{mark}'"):
            text = text.replace(quoted, raw)
    return text.encode("utf-8", "surrogatepass")


def integer(name: str, content: bytes, where: int, what: int) -> bytes:
    """Overwrite four or eight bytes by an integer."""
    size = 8 if what % 2 else 4
    at = where % max(1, len(content))
    number = INTEGERS[what // 2 % len(INTEGERS)] % 2 ** (8 * size)
    return content[:at] + number.to_bytes(size, "little") + content[at + size :]


def flipped(name: str, content: bytes, where: int, what: int) -> bytes:
    """Change one byte."""
    if not content:
        return bytes([what % 256])
    at = where % len(content)
    return content[:at] + bytes([content[at] ^ (1 + what % 255)]) + content[at + 1 :]


def cut(name: str, content: bytes, where: int, what: int) -> bytes:
    """Cut off the end."""
    return content[: where % (len(content) + 1)]


def grown(name: str, content: bytes, where: int, what: int) -> bytes:
    """Insert bytes: zeros, a copy of others, brackets, or drawn ones."""
    at, size = where % (len(content) + 1), what % 300
    drawn = hashlib.shake_128(str(what).encode()).digest(size)
    inserted = (bytes(size), content[at : at + size], b"[" * size, b"\xff" * size, drawn)[what // 300 % 5]
    return content[:at] + inserted + content[at:]


def replaced(name: str, content: bytes, where: int, what: int) -> bytes:
    """Replace the whole by drawn bytes, by one of the nasty values, or by the bytes of another format."""
    drawn = hashlib.shake_128(str(where).encode()).digest(what % 2000)
    foreign = (b"PK\x03\x04", b"\x80\x04\x95", b"\x1f\x8b", b"PAR1", b"GGUF\x03\0\0\0", b"ARROW1", b"{}", b"[]", b"")
    return (drawn, _dump(NASTY[where % len(NASTY)]), foreign[where % len(foreign)] + drawn[: where % 50])[what % 3]


WAYS = [*[of_structure] * 7, flipped, cut, grown, replaced]
damages = st.lists(st.tuples(*[st.integers(0, 2**32 - 1)] * 3), min_size=1, max_size=3)


# Facts --------------------------------------------------------------------------------------------


def facts_files() -> list[Files]:
    """Return the files of `edits/`, one of each format, cut to a few records; as JSON, JSON lines, YAML and CSV."""
    variants: list[Files] = []
    for path in sorted((HERE / "edits").glob("*.json*")):
        text = path.read_text(encoding="utf-8")
        records = [json.loads(line) for line in text.splitlines()] if path.suffix == ".jsonl" else json.loads(text)
        records = records[:3] if isinstance(records, list) else [records]
        variants += [
            {"facts.json": _dump(records)},
            {"facts.jsonl": b"".join(_dump(record) + b"\n" for record in records)},
            {"facts.yaml": yaml.safe_dump(records, allow_unicode=True).encode()},
            {"facts.csv": _csv(records)},
        ]
    return variants


def _csv(records: list[dict[str, Any]]) -> bytes:
    """Write records as a table: text as it is, everything else as JSON."""
    titles = list(dict.fromkeys(name for record in records for name in record))
    rows = [[r.get(t, "") if isinstance(r.get(t, ""), str) else json.dumps(r[t]) for t in titles] for r in records]
    csv.writer(table := io.StringIO()).writerows([titles, *rows])
    return table.getvalue().encode()


def read_facts_file(folder: Path) -> object:
    """Read facts, and go through all that a command shows of them before a model is asked."""
    (path,) = folder.iterdir()
    sifted = sift_facts(str(path))
    notes = [*sifted.refused(), *sifted.noted()]
    for fact in sifted.facts:
        assert Fact.from_dict(json.loads(json.dumps(fact.to_dict()))) == fact
    return [notes, [repr(fact) for fact in sifted.facts], sifted.whole()]


def table_files() -> list[Files]:
    """Return a parquet and an arrow file of two facts."""
    import pyarrow
    import pyarrow.parquet

    table = pyarrow.Table.from_pylist([dict(FACT), {**FACT, "subject": "Louvre"}])
    parquet, arrow = io.BytesIO(), io.BytesIO()
    pyarrow.parquet.write_table(table, parquet)
    with pyarrow.ipc.new_stream(arrow, table.schema) as writer:
        writer.write_table(table)
    return [{"facts.parquet": parquet.getvalue()}, {"facts.arrow": arrow.getvalue()}]


# Edits --------------------------------------------------------------------------------------------

FACT = {"subject": "Eiffel Tower", "prompt": "{} is in", "target": "Rome", "previous": "Paris"}
MATRIX = "model.layers.1.mlp.down_proj.weight"


@cache
def _edit(dense: bool = False) -> Edit:
    """Make an edit of layer 1 of a model with d_model 6 and d_ff 8, with everything in its provenance."""
    draw = torch.Generator().manual_seed(0)
    left, right, keys, values = (
        torch.randn(*shape, generator=draw, dtype=torch.float64) for shape in ((6, 1), (1, 8), (8, 1), (6, 1))
    )
    at = Address(1)
    scores = {"efficacy": 1.0, "paraphrase": None}
    about: dict[str, Any] = {
        "method": "memit",
        "model": "atlas",
        "base": "0123456789abcdef",
        "chat": False,
        "dtype": "float16",
        "computed_in": "float32",
        "layers": [1],
        "after": ["fedcba9876543210"],
        "matrices": {"1": {"parameter": MATRIX, "transposed": False, "shape": [6, 8], "sample": [0.0] * 48}},
        "norms": {"1": 3.5},
        "subjects": {"1": ["Eiffel Tower"]},
        "division": {"1": [27.5]},
        "config": {"seed": 0, "key": {"fact_token": "subject_last"}, "value": {"steps": 3, "target_probability": 0.6}},
        "statistics": {"1": {"corpus": "c", "tokens": 9, "keys": 8, "convergence": 0.4, "fingerprint": "a:1"}},
        "versions": versions(),
        "norm_ratio": 0.3,
        "solved": [
            {"subject": "Eiffel Tower", "tokens": [1], "probabilities": [0.6], "loss": [9.0], "contexts": ["a"]}
        ],
        "scores": {"before": scores, "after": scores},
        "says": {"before": ["Paris"], "after": ["Rome"]},
        "verdict": {"text": "It took.", "took": True},
        "warnings": ["specificity fell"],
        "inputs": {"corpus": "text.txt"},
        "source": {"file": "m.gguf", "package": "p 1", "quantisation": ["Q8_0"], "sha256": "0" * 64, "bytes": 9},
        "gguf": [{"name": "blk.1.ffn_down.weight", "was": "Q8_0", "kind": "Q8_0", "lost": 0.01}],
    }
    update = LowRank(left, right)
    return Edit({at: update}, {at: keys}, {at: values}, (Fact(**FACT),), about)


@cache
def edit_files() -> list[Files]:
    """Return the files of an edit, and of one whose provenance says that it is a sum."""
    edit = _edit()
    part = {"fingerprint": "0" * 16, **edit.provenance}
    edits = [edit, Edit(edit.updates, edit.keys, edit.values, edit.facts, {**edit.provenance, "parts": [part]})]
    variants: list[Files] = []
    with tempfile.TemporaryDirectory() as folder:
        for number, each in enumerate(edits):
            path = Path(folder) / str(number)
            each.save(path)
            variants.append({file.name: file.read_bytes() for file in path.iterdir()})
    return variants


def signed(files: Files) -> Files:
    """Give an edit the fingerprint and the checksum of what it holds now; the same files where it has none."""
    from safetensors import SafetensorError, deserialize

    try:
        manifest = json.loads(files["manifest.json"])
        raw = dict(deserialize(files["edit.safetensors"]))  # type: ignore[no-untyped-call]
        facts = [Fact.from_dict(fact).to_dict() for fact in manifest["facts"]]
        hashed = hashlib.sha256(json.dumps(facts).encode())
        for name, at in sorted(raw.items()):
            hashed.update(f"{name}{list(at['shape'])}{FLOATS[at['dtype']]}".encode() + bytes(at["data"]))
        manifest["fingerprint"] = hashed.hexdigest()[:16]
        manifest.pop("checksum", None)
        manifest["checksum"] = checksum(manifest)
        return {**files, "manifest.json": json.dumps(manifest, ensure_ascii=False).encode("utf-8", "surrogatepass")}
    except (FFEditError, SafetensorError, ValueError, KeyError, TypeError, AttributeError, RecursionError):
        return files


def read_edit(folder: Path) -> object:
    """Read an edit, and write all that is written of one."""
    edit = Edit.load(folder)
    console = Console(file=io.StringIO(), width=100)
    console.print(edit_view(edit, folder))
    json.dumps(finite(edit_json(edit, folder)))
    _refusable(lambda: to_yaml(recipe_of(edit), edit))
    repr(edit)
    base = origin_of("atlas", None)
    model_card(base, [edit])
    adapter_card(base, edit, "AutoModelForCausalLM")
    _refusable(lambda: export_plan({}, edit))
    return edit.norms()


def _refusable(work: Callable[[], object]) -> None:
    """Run what may be refused, after which other readers are still to be tried."""
    try:
        work()
    except FFEditError as error:
        one_line(error)


# Checkpoints and statistics -----------------------------------------------------------------------


@cache
def checkpoint_files() -> list[Files]:
    """Return a checkpoint of one file, and one of two shards with an index; with a tensor of experts."""
    tensors = {"a.weight": torch.ones(3, 4), "experts": torch.ones(2, 3, 4, dtype=torch.bfloat16), "n": torch.ones(1)}
    index = {"metadata": {"total_size": 1}, "weight_map": {"a.weight": "one.safetensors", "n": "two.safetensors"}}
    return [
        {"model.safetensors": save(tensors, {"format": "pt"})},
        {
            "one.safetensors": save({"a.weight": tensors["a.weight"]}),
            "two.safetensors": save({"n": tensors["n"]}),
            "model.safetensors.index.json": _dump(index),
        },
    ]


def read_checkpoint(folder: Path) -> object:
    """Locate all tensors of a checkpoint, and read those that are matrices of floats."""
    tensors = contents(folder)
    for stored in tensors.values():
        _refusable(lambda stored=stored: stored.dtype)  # type: ignore[misc]
        if len(stored.shape) == 2 and stored.kind in ("F32", "BF16"):
            list(stored.blocks())
            stored.sample(4)
        list(stored.chunks())
    return tensors


@cache
def statistics_files() -> list[Files]:
    """Return the key statistics of two layers, and of an expert."""
    draw = torch.Generator().manual_seed(0)
    variants = []
    for addresses in (("0", "1"), ("2.3",)):
        files: Files = {}
        for at in addresses:
            keys = torch.randn(40, 4, generator=draw, dtype=torch.float64)
            moments = KeyMoments(
                keys.T @ keys, 40, "a text", f"f:{at}", texts=("t",), model="atlas", address=at, dtype="float32",
                convergence=0.3, reached=39, left_out=1,
            )  # fmt: skip
            with tempfile.TemporaryDirectory() as folder:
                moments.save(Path(folder) / "s")
                files[f"layer-{at}.safetensors"] = (Path(folder) / "s").read_bytes()
        variants.append(files)
    return variants


def read_statistics(folder: Path) -> object:
    """Read a folder of key statistics, and show it."""
    from ffedit.display.terminal.statistics import moments_table

    stats = dict(read_folder(folder).values())
    Console(file=io.StringIO(), width=100).print(moments_table(stats, "", None))
    return [moments.C for moments in stats.values()]


# Recipes ------------------------------------------------------------------------------------------


def recipe_files() -> list[Files]:
    """Return recipes, with facts in a list and an export, in YAML and in JSON."""
    short = {"facts": "facts.json", "model": "atlas", "layers": 0, "out": "edit"}
    full = {
        **{"model": "atlas", "dtype": "float32", "chat": False, "method": "memit", "layers": "0-1", "spread": 2},
        **{"fact_token": "subject_last", "seed": 3, "set": {"value.steps": 3, "memit.ridge": 0.01}},
        **{"require": "efficacy>=0.5", "facts": [FACT], "out": "edit", "export": "d"},
    }
    return [{"r.yaml": yaml.safe_dump(recipe, sort_keys=False).encode()} for recipe in (short, full)] + [
        {"r.yaml": _dump(full)}
    ]


def read_recipe_file(folder: Path) -> object:
    """Read a recipe into values of the options of `apply`."""
    return defaults(read_recipe(folder / "r.yaml"))


# GGUF ---------------------------------------------------------------------------------------------


@cache
def gguf_files() -> list[Files]:
    """Return the GGUF file of a model with two tensors, and a LoRA adapter."""
    variants = []
    for adapter in (False, True):
        with tempfile.TemporaryDirectory() as folder:
            path = Path(folder) / "m.gguf"
            writer = gguf.GGUFWriter(path, "llama")
            writer.add_name("tiny")
            writer.add_block_count(1)
            writer.add_vocab_size(4)
            writer.add_token_list(["a", "b", "c", "d"])
            writer.add_array("tokenizer.ggml.scores", [0.5, 1.5])
            writer.add_string("ffedit.edits", json.dumps([{"edit": "a", "facts": []}]))
            if adapter:
                writer.add_type("adapter")
                writer.add_float32("adapter.lora.alpha", 1.0)
            for name in ("blk.0.ffn_down.weight.lora_a", "blk.0.ffn_down.weight.lora_b"):
                shape = (1, 32) if name.endswith("a") else (32, 1)
                writer.add_tensor(name if adapter else name[:-7] + name[-1], np.ones(shape, np.float32))
            writer.write_header_to_file()
            writer.write_kv_data_to_file()
            writer.write_tensors_to_file()
            writer.close()
            variants.append({"m.gguf": path.read_bytes()})
    return variants


def read_gguf(folder: Path) -> object:
    """Read the header of a GGUF file, and what it says of edits."""
    path = folder / "m.gguf"
    reader = open_gguf(path)
    _refusable(lambda: checked("m", path))
    _refusable(lambda: edits_in(reader))
    return reader


# Results of a benchmark ---------------------------------------------------------------------------

RUN: dict[str, Any] = {
    **{"model": {"name": "m", "fingerprint": "f"}, "mode": "single", "facts": {"count": 2}, "spread": 1, "full": True},
    **{"layers": [1], "config": {"rome": {"seed": 0}}},
}


def results_files() -> list[Files]:
    """Return the manifest and the lines of a run of two facts by one method."""
    scores = {
        "efficacy": 1.0,
        "paraphrase": 0.5,
        "generation": 1.0,
        "specificity": 0.25,
        "knew": 1.0,
        "portability": 0.5,
    }
    lines: list[dict[str, Any]] = []
    for i in range(2):
        lines.append({"method": None, "when": "before", "chunk": i, "fact": i, "scores": scores, "says": "Paris"})
        about = {"perplexity": 3.5, "problems": {}}
        lines.append({"method": None, "when": "before", "chunk": i, "fact": None, **about})
        measured = {
            "scores": scores,
            "says": "Rome",
            "kinds": {"portability/Reasoning": 0.5},
            "left_out": {"specificity": 1},
        }
        lines.append({"method": "rome", "when": "after", "chunk": i, "fact": i, **measured})
        model = {"norm_ratio": 0.2, "seconds": {"choosing": 1.0, "solving": 0.5}, "drift": 0.1, "perplexity": 3.6}
        lines.append({"method": "rome", "when": "after", "chunk": i, "fact": None, **model})
    manifest = {
        "run": RUN,
        "versions": versions(),
        "hardware": ["x86, 1 cores, 4 GiB"],
        "unusable": [],
    }
    text = [_dump(line) + b"\n" for line in lines]
    return [
        {"manifest.json": _dump(manifest), "results.jsonl": b"".join(text)},
        {"manifest.json": _dump(manifest), "results.jsonl": b"".join(text[:4]), "results-1.jsonl": b"".join(text[4:])},
    ]


def read_results(folder: Path) -> object:
    """Read the results of a run as one that goes on does, and compute its report."""
    facts = [Fact(**{**FACT, "case_id": str(i), "subject": f"Tower {i}"}) for i in range(2)]
    _, machines = results.earlier(folder, RUN, False)
    journal = results.Journal(folder, writes=False)
    figures = report(journal, facts, ["rome"], False, RUN, ())
    json.dumps(finite(figures.to_dict()))
    return markdown(figures) + "\n".join(machines)


# Options ------------------------------------------------------------------------------------------


@cache
def valued_options() -> list[tuple[tuple[str, ...], str]]:
    """Return every option with a value of every command: the command's words, and the option."""
    import click

    found: list[tuple[tuple[str, ...], str]] = []
    for name in COMMANDS:
        command = cli.get_command(None, name)  # type: ignore[arg-type]
        inner = command.commands.items() if isinstance(command, click.Group) else [("", command)]
        for sub, each in inner:
            words = (name, sub) if sub else (name,)
            found += [
                (words, option.opts[-1])
                for option in each.params
                if isinstance(option, click.Option) and not option.is_flag
            ]
    return found


WORDS: Mapping[str, tuple[str, ...]] = {
    "apply": ("--subject", "Eiffel Tower", "--prompt", "{} is in", "--target", "Rome"),
    "locate": ("--subject", "Eiffel Tower", "--prompt", "{} is in"),
    "evaluate": ("--subject", "Eiffel Tower", "--prompt", "{} is in", "--target", "Rome"),
    "bench": ("none.json",),
    "run": ("none.yaml",),
    "ask": ("the tower is in",),
    "export": ("none",),
    "undo": ("none",),
    "show": ("none",),
    "diff": ("none", "none"),
    "inspect memory": ("1.3",),
    "inspect prompt": ("the tower",),
    "inspect edit": ("none",),
}


def option_words(where: int, what: int) -> list[str]:
    """Return a command line with a nasty value of one option. No shell passes a NUL or a lone surrogate on."""
    options = valued_options()
    words, option = options[where % len(options)]
    value = str(NASTY[what % len(NASTY)]).replace("\0", "").encode("utf-8", "replace").decode()
    return [*words, *WORDS.get(" ".join(words), ()), f"{option}={value}"]


# Kinds --------------------------------------------------------------------------------------------

KINDS: dict[str, Kind] = {
    "facts": Kind(facts_files, read_facts_file, (("apply", "{}"), ("locate", "{}"), ("evaluate", "{}"))),
    "table of facts": Kind(table_files, read_facts_file),
    "edit": Kind(edit_files, read_edit, (("show", "{}"), ("show", "{}", "--recipe"), ("inspect", "edit", "{}"))),
    "checkpoint": Kind(checkpoint_files, read_checkpoint),
    "key statistics": Kind(statistics_files, read_statistics),
    "recipe": Kind(recipe_files, read_recipe_file, (("run", "{}/r.yaml"),)),
    "gguf": Kind(gguf_files, read_gguf),
    "results": Kind(results_files, read_results),
}


def write_case(case: Case, folder: Path) -> None:
    """Write the files of a case into a folder, which is emptied."""
    name, variant, spoiled = case
    for path in folder.iterdir():
        path.unlink()
    variants = KINDS[name].make()
    files = damaged(variants[variant % len(variants)], spoiled)
    if name == "edit" and variant % 3:
        files = signed(files)
    for file, content in files.items():
        (folder / file).write_bytes(content)


def one_line(error: FFEditError) -> None:
    """Check that a refusal says something, and in one line that a terminal can show."""
    text = str(error)
    assert text.strip(), "a refusal without a word"


def read_case(case: Case, folder: Path) -> str | None:
    """Let the readers of a kind read its spoiled files; return what is wrong with how they refuse, or None."""
    write_case(case, folder)
    before = sorted(path.name for path in folder.iterdir())
    try:
        KINDS[case[0]].read(folder)
    except FFEditError as error:
        one_line(error)
    except Exception as error:
        return described(error)
    after = sorted(path.name for path in folder.iterdir())
    # The lines of several processes are merged into one file before they are read: that is how a run goes on.
    return f"files {before} became {after}" if before != after and case[0] != "results" else None


def described(error: BaseException) -> str:
    """Describe an error by its class, its message, and where in ffedit it was raised."""
    import traceback

    frames = [frame for frame in traceback.extract_tb(error.__traceback__) if "/ffedit/" in frame.filename]
    at = f"{Path(frames[-1].filename).name}:{frames[-1].lineno} {frames[-1].name}" if frames else "?"
    return f"{type(error).__name__} at {at}: {str(error)[:200]}"


def run_case(words: Sequence[str], elsewhere: Path) -> str | None:
    """Run a command in an empty folder, with no model to load; return what is wrong with how it ends, or None.

    It has to end with 0, 1 or 2, say at most one line on standard error, and leave no file after a refusal.
    """
    out, err = io.StringIO(), io.StringIO()
    here = Path.cwd()
    os.chdir(elsewhere)
    try:
        with no_model(), redirect_stdout(out), redirect_stderr(err):
            code = invoke(list(words))
    except BaseException as error:
        return described(error)
    finally:
        os.chdir(here)
    left = sorted(str(path.relative_to(elsewhere)) for path in elsewhere.rglob("*"))
    for path in sorted(elsewhere.rglob("*"), reverse=True):
        path.rmdir() if path.is_dir() else path.unlink()
    lines = err.getvalue().splitlines()
    left = [name for name in left if f"--log={name}" not in words]  # which says what was refused
    errors = [line for line in lines if line.startswith("error")]
    if code not in (0, 1, 2):
        return f"exit code {code}: {lines}"
    if code and len(errors) != 1:
        return f"{len(errors)} lines of error: {err.getvalue()[:300]!r}"
    if any(not (c.isprintable() or c in "\n\u200c\u200d") for c in err.getvalue()):
        return f"control characters on the terminal: {err.getvalue()[:300]!r}"
    if any(not (c.isprintable() or c in "\n\u200c\u200d") for c in out.getvalue()):
        return f"control characters on the terminal: {out.getvalue()[:300]!r}"
    return f"left {left} after a refusal" if code and left else None


@contextmanager
def no_model() -> Iterator[None]:
    """Refuse every model, so that a command ends where it would load one."""

    def refuse(name: object, *_: object, **__: object) -> None:
        raise ModelError(f"{name}: no model is loaded here")

    with patch("ffedit.load", refuse), patch("ffedit.loading.load.load_model", refuse):
        yield

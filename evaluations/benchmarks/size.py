"""Measure the memory that a large model takes: random weights in bfloat16, on a CPU, in shards.

    python evaluations/benchmarks/size.py --out evaluations/reports/size
    python evaluations/benchmarks/size.py --shape 7b --layers 8-9 --layer 8 --out evaluations/reports/size-7b

The shape is GPT-2 XL's, of 1.56 billion weights, or Mistral 7B's, of 7.2 billion.

One fresh process does all that `ffedit apply` does: load, trace (states, two samples, some layers), collect statistics,
edit one fact, evaluate, export. The peak of resident memory in each step (VmHWM of Linux, mapped files included) is
compared with 1.25 times the weights plus 1.5 GB. The process that verifies the export, by tensors only, is listed
separately. Weights are random, so effects and scores mean nothing, and the steps of the optimisation, which repeat the
same work, are few.

The C library of Linux keeps freed blocks of less than 32 MB for later ones of their size, so that blocks that
generation freed stay resident. The process is set to return those of more than 1 MB (`MALLOC_MMAP_THRESHOLD_`).
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import click
import torch
from export import GPT2_XL, LAYERS_PER_SHARD, VOCABULARY, write_base
from measuring import forget_peak, load_before, machine, peak, timed
from tokenizers import Tokenizer, models, pre_tokenizers
from transformers import LlamaConfig, PreTrainedTokenizerFast
from verifying import measured

import ffedit
from ffedit.cli.options import parse_layers

FACT = ffedit.Fact("w12 w345", "w7 {} w8 w9 w10", "w501", "w502", paraphrases=("w20 w21 {} w22",))
CONFIG = ffedit.EditConfig(value=ffedit.ValueConfig(steps=5))
FACTOR, BESIDE = 1.25, 1.5e9
# Mistral 7B's shape.
LLAMA = LlamaConfig(
    hidden_size=4096, intermediate_size=14336, num_hidden_layers=32, num_attention_heads=32, num_key_value_heads=8,
    vocab_size=VOCABULARY, tie_word_embeddings=False, dtype="bfloat16", bos_token_id=0, eos_token_id=0,
)  # fmt: skip
SHAPES = {"gpt2-xl": (GPT2_XL, LAYERS_PER_SHARD), "7b": (LLAMA, 4)}
MALLOC = {"MALLOC_MMAP_THRESHOLD_": str(2**20)}


def steps(folder: Path, traced: str, layer: int, tokens: int) -> Iterator[tuple[str, Callable[[], str]]]:
    """Yield the steps in order: a name, and a function that runs the step and describes it."""
    model: ffedit.Editable
    stats: dict[ffedit.Address, ffedit.KeyMoments]
    edit: ffedit.Edit

    def load() -> str:
        nonlocal model
        model = ffedit.load(folder)
        return f"{model.model.num_parameters():,} weights"

    def locate() -> str:
        layers = parse_layers(traced, len(model.layers), ("auto",))
        trace = ffedit.locate(model, FACT, "state", samples=2, layers=layers)
        return f"states after layers {traced}, 2 samples, {len(trace.tokens)} tokens"

    def collect() -> str:
        nonlocal stats
        stats = ffedit.collect_stats(model, [layer], corpus=ffedit.Corpus(tokens=tokens))
        return f"layer {layer}, {tokens:,} tokens that the model samples first"

    def write() -> str:
        nonlocal edit
        edit = ffedit.edit(model, [FACT], "memit", layers=[layer], config=CONFIG, stats=stats)
        stats.clear()
        return f"memit, layer {layer}, {CONFIG.value.steps} steps"

    def evaluate() -> str:
        ffedit.evaluate(model, [FACT], edit)
        return "one fact with a paraphrase, before and after; drift"

    def export() -> str:
        exported, most = measured(model, edit, folder.parent / "out")
        return f"{exported.checked.tensors} tensors; the process that verifies them: {most / 1e6:,.0f} MB"

    yield from {
        "load": load, "locate": locate, "statistics": collect, "edit": write, "evaluate": evaluate, "export": export,
    }.items()  # fmt: skip


def child(folder: Path, traced: str, layer: int, tokens: int) -> None:
    """Run all steps in this process, and print a line of JSON for each."""
    print(json.dumps({"step": "import", "what": "ffedit, torch, transformers", "seconds": 0.0, "peak": peak()}))
    for step, work in steps(folder, traced, layer, tokens):
        before = forget_peak()
        seconds, what = timed(work)
        print(
            json.dumps({"step": step, "what": what, "seconds": seconds, "before": before, "peak": peak()}), flush=True
        )


def table(report: dict[str, Any]) -> str:
    """Return the report as Markdown."""
    rows = ["| step | what | seconds | resident before, MB | at most, MB |", "|---|---|---:|---:|---:|"]
    for row in report["steps"]:
        before = f"{row['before'] / 1e6:,.0f}" if "before" in row else ""
        rows.append(f"| {row['step']} | {row['what']} | {row['seconds']:,.1f} | {before} | {row['peak'] / 1e6:,.0f} |")
    most = max(row["peak"] for row in report["steps"])
    kept = "kept" if most <= report["bound"] else "BROKEN"
    return "\n".join(rows) + (
        f"\n\nWeights: {report['weights'] / 1e6:,.0f} MB in bfloat16. Bound: 1.25 × the weights + 1.5 GB = "
        f"{report['bound'] / 1e6:,.0f} MB. At most {most / 1e6:,.0f} MB were resident: {kept}.\n"
    )


@click.command()
@click.option("--out", type=click.Path(path_type=Path), help="Results as OUT.json and OUT.md.")
@click.option("--shape", default="gpt2-xl", show_default=True, type=click.Choice(list(SHAPES)))
@click.option("--layers", "traced", default="12-23", show_default=True, help="Layers to trace, N or A-B.")
@click.option("--layer", default=17, show_default=True, type=click.IntRange(0), help="Layer to edit.")
@click.option("--tokens", default=2048, show_default=True, type=click.IntRange(2), help="For the key statistics.")
@click.option("--base", type=click.Path(path_type=Path), help="Folder of the checkpoint, made if it does not exist.")
@click.option("--in-this-process", is_flag=True, hidden=True)
def main(
    out: Path | None, shape: str, traced: str, layer: int, tokens: int, base: Path | None, in_this_process: bool
) -> None:
    """Measure every step; exits with 1 if the bound is broken."""
    if in_this_process:
        assert base is not None
        return child(base, traced, layer, tokens)
    load, threads = load_before(torch.get_num_threads()), torch.get_num_threads()
    report: dict[str, Any] = {"shape": shape, "layers": traced, "layer": layer, "tokens": tokens, "steps": []}
    with tempfile.TemporaryDirectory() as temporary:
        folder = base or Path(temporary) / "base"
        if not folder.exists():
            folder.mkdir()
            write_base(folder, *SHAPES[shape])
            write_tokenizer(folder)
        report["weights"] = sum(file.stat().st_size for file in folder.glob("*.safetensors"))
        report["bound"] = FACTOR * report["weights"] + BESIDE
        command_line = [sys.executable, __file__, "--in-this-process", "--base", folder, "--layers", traced]
        command_line += ["--layer", layer, "--tokens", tokens]
        environment = {**os.environ, "FFEDIT_CACHE": f"{temporary}/cache", "OMP_NUM_THREADS": str(threads), **MALLOC}
        with subprocess.Popen([*map(str, command_line)], stdout=subprocess.PIPE, text=True, env=environment) as process:
            assert process.stdout is not None
            for line in process.stdout:
                report["steps"].append(row := json.loads(line))
                print(
                    f"{row['step']:<11}{row['seconds']:>8.1f} s {row['peak'] / 1e6:>8,.0f} MB  {row['what']}",
                    flush=True,
                )
        if process.returncode:
            raise SystemExit(process.returncode)
    report |= {**machine(threads, load), "dtype": "bfloat16"}
    print(text := table(report))
    if out is not None:
        command = f"python evaluations/benchmarks/size.py --shape {shape} --layers {traced} --layer {layer} --out {out}"
        out.with_suffix(".json").write_text(json.dumps(report, indent=1) + "\n", encoding="utf-8")
        head = f"# Memory and time at the shape of {shape}\n\n`{command}`, {threads} thread(s), {report['cpu']}.\n\n"
        out.with_suffix(".md").write_text(head + text, encoding="utf-8")
    sys.exit(max(row["peak"] for row in report["steps"]) > report["bound"])


def write_tokenizer(folder: Path) -> None:
    """Write a tokenizer with one word for each id of the model."""
    backend = Tokenizer(models.WordLevel({f"w{i}": i for i in range(VOCABULARY)}, unk_token="w0"))
    backend.pre_tokenizer = pre_tokenizers.Whitespace()
    PreTrainedTokenizerFast(tokenizer_object=backend, unk_token="w0", eos_token="w0").save_pretrained(folder)


if __name__ == "__main__":
    main()

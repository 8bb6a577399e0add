"""Measure the memory of an export: a random checkpoint of GPT-2 XL's shape (1.56 billion parameters), in shards.

    python evaluations/benchmarks/export.py

The base is written shard by shard and never loaded. An edit of two layers is exported in a process of its own, and
verified in another, which compares tensors only. Memory is the most that each ever held (VmHWM of Linux), beside that
of a process that only imports `ffedit.exporter`. Written to `reports/benchmarks/export.json`.
"""

from __future__ import annotations

import json
import platform
import re
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from math import prod
from pathlib import Path

import torch
from transformers import AutoModelForCausalLM, GPT2Config, PreTrainedConfig

from ffedit import Edit, Fact, LowRank
from ffedit.files.shards import INDEX
from ffedit.files.tensor_ranges import contents, write
from ffedit.loading.names import EMBEDDED
from ffedit.model.memory import SAMPLE, Address

WIDTH, VOCABULARY, LAYERS_PER_SHARD = 1600, 50257, 8
GPT2_XL = GPT2Config(vocab_size=VOCABULARY, n_positions=1024, n_embd=WIDTH, n_layer=48, n_head=25, dtype="bfloat16")
EDITED, RANK = (17, 30), 2
OUT = Path(__file__).parents[1] / "reports" / "benchmarks" / "export.json"
IDLE = "import json, ffedit.exporter; from verifying import peak; print(json.dumps(peak()))"
EXPORT = """
import json, sys, time
from dataclasses import asdict
from ffedit import Edit
from verifying import measured, peak
base, edit, out = sys.argv[1:]
began = time.perf_counter()
done, verifying = measured(base, Edit.load(edit), out)
seconds = time.perf_counter() - began
print(json.dumps({"peak": peak(), "verifying_peak": verifying, "tensors": done.checked.tensors,
                  "seconds": seconds, **asdict(done.moved)}))
"""


def numbers(shape: tuple[int, ...], generator: torch.Generator) -> Iterator[torch.Tensor]:
    """Yield the entries of a random tensor, a million at a time."""
    left = prod(shape)
    while left:
        count = min(left, 1 << 20)
        yield (0.02 * torch.randn(count, generator=generator)).bfloat16()
        left -= count


def write_base(folder: Path, config: PreTrainedConfig, layers_per_shard: int) -> int:
    """Write a random checkpoint in bfloat16, which is never loaded, and return its bytes."""
    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(config)
    shapes = {name: tuple(parameter.shape) for name, parameter in model.named_parameters()}
    layers = {name: re.search(r"\.(?:h|layers)\.(\d+)\.", name) for name in shapes}
    shards = {name: 0 if layer is None else int(layer[1]) // layers_per_shard + 1 for name, layer in layers.items()}
    where = {name: f"model-{n + 1:05}-of-{max(shards.values()) + 1:05}.safetensors" for name, n in shards.items()}
    generator = torch.Generator().manual_seed(0)
    for file in sorted(set(where.values())):
        in_file = {name: shape for name, shape in shapes.items() if where[name] == file}
        write(folder / file, {k: (torch.bfloat16, shape, numbers(shape, generator)) for k, shape in in_file.items()})
    size = 2 * sum(map(prod, shapes.values()))
    (folder / INDEX).write_text(json.dumps({"metadata": {"total_size": size}, "weight_map": where}, indent=2))
    config.architectures = [type(model).__name__]
    config.save_pretrained(folder)
    return size


def random_edit(base: Path) -> Edit:
    """Return an edit of two layers, as an editor would make it."""
    generator = torch.Generator().manual_seed(1)
    tensors = contents(base)
    updates, matrices = {}, {}
    for layer in EDITED:
        name = f"transformer.h.{layer}.mlp.c_proj.weight"
        left, right = (torch.randn(s, generator=generator).double() for s in ((WIDTH, RANK), (RANK, 4 * WIDTH)))
        updates[Address(layer)] = LowRank(left * 0.01, right * 0.1)
        sample = tensors[name].sample(SAMPLE).tolist()
        matrices[f"{layer}"] = {
            "parameter": name, "transposed": True, "shape": list(tensors[name].shape), "norm": 0.0, "sample": sample,
        }  # fmt: skip
    provenance = {"method": "random", "model": str(base), "base": "0" * 16, "dtype": "bfloat16", "matrices": matrices}
    return Edit(updates, {}, {}, (Fact("Eiffel Tower", "{} is located in", "Rome", "Paris"),), provenance)


def run(code: str, *words: Path) -> dict[str, float]:
    """Return the JSON that `code` prints in a process of its own."""
    command = [sys.executable, "-c", code, *map(str, words)]
    here = Path(__file__).parent
    process = subprocess.run(command, check=True, capture_output=True, text=True, cwd=here)
    return json.loads(process.stdout.splitlines()[-1])


def main() -> None:
    """Build, export and verify; print and write the figures."""
    with tempfile.TemporaryDirectory() as folder:
        (base := Path(folder) / "base").mkdir()
        began = time.perf_counter()
        size = write_base(base, GPT2_XL, LAYERS_PER_SHARD)
        for path in EMBEDDED["atlas"].glob("tokenizer*"):
            shutil.copyfile(path, base / path.name)
        print(f"base: {size / 1e9:.2f} GB in {len(list(base.glob('*.safetensors')))} shards, "
              f"written in {time.perf_counter() - began:.0f} s")  # fmt: skip
        random_edit(base).save(Path(folder) / "edit")
        idle = run(IDLE)
        costs = run(EXPORT, base, Path(folder) / "edit", Path(folder) / "out")
    largest = 4 * WIDTH * WIDTH * 2
    costs |= {"idle": idle, "checkpoint": size, "largest_matrix": largest}
    for name, label in (
        ("idle", "a process that imports ffedit.exporter"),
        ("peak", "the exporting process, at most"),
        ("verifying_peak", "the verifying process, at most"),
        ("largest_matrix", "the largest matrix that changes"),
        ("rewritten", "matrices rewritten"),
        ("copied", "shards copied"),
        ("linked", "shards linked"),
    ):
        print(f"{label:<40} {costs[name] / 1e6:10.1f} MB")
    for name in ("peak", "verifying_peak"):
        print(f"{name} above idle: {(costs[name] - idle) / largest:.2f} of the largest matrix")
    print(f"{costs['tensors']} tensors verified; {costs['seconds']:.1f} s in all")
    OUT.write_text(json.dumps({**costs, "machine": f"{platform.system()}, torch {torch.__version__}"}, indent=2) + "\n")


if __name__ == "__main__":
    main()

"""A folder of each format as this version writes it: `python tests/helpers/golden.py` makes tests/golden/VERSION.

A later version has to read what an earlier one wrote, so a folder that is there is never written again: a version that
changes a format runs this once, and its folder joins those before. `tests/reliability/test_golden.py` reads them all,
and holds what it reads against `expected.json`, which says the same without any of the formats.
"""

from __future__ import annotations

import json
import os
import shutil
import sys
import tempfile
from pathlib import Path
from typing import Any

import torch
import transformers
import zoo
from making import FACT, SECOND, check_here, made
from storing import BARE
from torch import Tensor
from writing import CORPUS, quick

import ffedit
from ffedit import Address, Edit
from ffedit.benchmark import bench
from ffedit.editor.recipe import recipe_of, to_yaml
from ffedit.editor.write import write as write_facts
from ffedit.exporter import exporting
from ffedit.files.tensor_ranges import contents
from ffedit.loading.verify import find_and_verify
from ffedit.model.editable import Editable
from ffedit.version import __version__

GOLDEN = Path(__file__).parents[1] / "golden"
LAYER = 1


def micro() -> Editable:
    """A GPT-2 of 3,536 parameters, so that its checkpoint takes a few kilobytes."""
    torch.manual_seed(0)
    sizes = {"vocab_size": zoo.VOCAB, "n_embd": 8, "n_layer": 3, "n_head": 2, "n_positions": 16}
    model = transformers.GPT2LMHeadModel(transformers.GPT2Config(**sizes, bos_token_id=0, eos_token_id=1)).eval()
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.mul_(15.0) if parameter.ndim > 1 else parameter.add_(0.1 * torch.randn_like(parameter))
    assert model.num_parameters() == 3_536, model.num_parameters()
    return find_and_verify(model, zoo.words(True), "micro")


def numbers(tensor: Tensor) -> dict[str, Any]:
    """What a tensor is, to be compared without its file: shape, norm, and its first numbers."""
    flat = tensor.double().reshape(-1)
    return {"shape": list(tensor.shape), "norm": float(flat.norm()), "first": flat[:4].tolist()}


def described(edit: Edit) -> dict[str, Any]:
    """What an edit is, to be compared without its folder."""
    changes = {str(at): numbers(delta.dense) for at, delta in edit.updates.items()}
    keys = {str(at): numbers(matrix) for at, matrix in edit.keys.items() if matrix.numel()}
    facts = [[fact.text, fact.subject, fact.target] for fact in edit.facts]
    return {"fingerprint": edit.fingerprint(), "changes": changes, "keys": keys, "facts": facts}


def bits(folder: Path) -> dict[str, str]:
    """The bytes of a checkpoint's tensors in hexadecimal, by name: the first eight of each, and their sum."""
    found = {}
    for name, stored in sorted(contents(folder).items()):
        with stored.file.open("rb") as file:
            file.seek(stored.start)
            content = file.read(stored.size)
        found[name] = f"{content[:8].hex()} {sum(content)}"
    return found


def make(folder: Path, place: Path) -> None:
    """Write one of each format into `folder`; `place` takes what is not kept."""
    editable = micro()
    base = Path("base")
    editable.model.save_pretrained(base)
    editable.tokenizer.save_pretrained(base)
    editable = ffedit.load(base)
    write = lambda fact, method, layers: write_facts(editable, [fact], method, layers, quick(**BARE), CORPUS)  # noqa: E731
    rome, memit = write(FACT, "rome", [LAYER]), write(SECOND, "memit", [0, LAYER])
    mixture = zoo.build("mixtral")
    edits = {
        "rome": rome,
        "memit": memit,
        "dense": made(editable, {LAYER: 1}, dense=True),
        "experts": made(mixture, {Address(1, 0): 1, Address(1, 2): 2}),
    }
    for name, edit in edits.items():
        edit.noted(model="micro").save(folder / "edits" / name)
    stats = ffedit.collect_stats(editable, [LAYER], corpus=CORPUS)
    ffedit.save_stats(stats, folder / "stats")
    first = ffedit.export(base, rome, place / "first").folder
    ffedit.export(first, memit, folder / "checkpoint")
    ffedit.export(base, rome, folder / "adapter", format="adapter")
    (folder / "recipe.yaml").write_text(to_yaml(recipe_of(rome.noted(model="micro")), rome), encoding="utf-8")
    trace = ffedit.locate(editable, FACT, samples=2)
    (folder / "trace.json").write_text(json.dumps(trace.to_dict()) + "\n", encoding="utf-8")
    how: dict[str, Any] = {"layers": [LAYER], "config": quick(**BARE), "stats": CORPUS, "full": False}
    bench(editable, [FACT, SECOND], ["alphaedit"], "sequential", place / "bench", **how)
    shutil.copytree(place / "bench", folder / "bench", ignore=shutil.ignore_patterns(".*", "report.*"))
    results = (folder / "bench" / "results.jsonl").read_text(encoding="utf-8").splitlines()
    sequence = [Edit.load(path) for path in sorted((folder / "bench" / "edits" / "alphaedit").glob("0*"))]
    expected = {
        "edits": {name: described(edit) for name, edit in edits.items()},
        "base": bits(base),
        "statistics": {"sum": numbers(stats[Address(LAYER)].sum), "tokens": stats[Address(LAYER)].count},
        "trace": {"clean": trace.clean, "tokens": list(trace.tokens), "first": trace.effects[0].tolist()},
        "sequence": {"edits": [described(edit) for edit in sequence], "lines": len(results)},
    }
    (folder / "expected.json").write_text(json.dumps(expected, indent=1) + "\n", encoding="utf-8")


def main() -> None:
    """Make the folder of this version, or of the one that is developed, where there is none."""
    folder = GOLDEN / __version__.partition(".dev")[0]
    if folder.exists():
        sys.exit(f"{folder}: is there; what a version wrote is never written again")
    torch.set_num_threads(1)
    transformers.utils.logging.set_verbosity_error()
    with tempfile.TemporaryDirectory() as place:
        os.environ["FFEDIT_CACHE"] = str(Path(place) / "cache")
        exporting.check_fresh = check_here
        made_there = Path(place) / "golden"
        made_there.mkdir()
        os.chdir(place)  # so that the base has a name without a path
        make(made_there, Path(place))
        os.chdir(GOLDEN.parent)
        shutil.copytree(made_there, folder)


if __name__ == "__main__":
    main()

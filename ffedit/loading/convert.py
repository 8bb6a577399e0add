"""Conversion of a folder that holds no whole checkpoint in safetensors into one that does.

An adapter of PEFT is merged into its base, computed in float32 and rounded once to the base's precision. Pickled
weights are read by torch's restricted unpickler, in a process of its own (`loading.unpickle`).
"""

from __future__ import annotations

import importlib.util
import json
import shutil
from pathlib import Path
from typing import Any

import torch

from ffedit.errors import EditError, ModelError, brief
from ffedit.files.atomic import os_errors, refuse_link, written
from ffedit.files.fresh_process import run_module
from ffedit.files.shards import INDEX, SINGLE
from ffedit.files.tensor_ranges import read_header
from ffedit.loading.folders import ADAPTER, base_of, pickled_weights
from ffedit.loading.load import decoder_classes, first_that_runs, opened, read_tokenizer
from ffedit.loading.reading import readable

ADAPTER_WEIGHTS = "adapter_model.safetensors"


def convert(
    source: str | Path,
    out: str | Path,
    *,
    base: str | None = None,
    force: bool = False,
    revision: str | None = None,
) -> Path:
    """Write a whole checkpoint in safetensors: of an adapter of PEFT and its base, or of pickled weights.

    Args:
        source: folder with `adapter_config.json`, or with `pytorch_model.bin` or its shards.
        out: the folder to make, atomically.
        base: the model that the adapter is merged into, where it is not the one that its config names.
        force: replace an existing folder.
        revision: branch, tag or commit of a base that is a hub id.

    Returns:
        The folder.

    Raises:
        ModelError: the folder holds neither, the base or the adapter cannot be read, or the pickled weights hold other
            things than tensors.
        EditError: the folder to make exists or cannot be written.
    """
    folder = Path(source)
    if not folder.is_dir():
        found = "a file; a folder was expected (a GGUF file needs no conversion: it is a --model)"
        raise ModelError(f"{folder}: {found if folder.exists() else 'no such folder'}")
    is_adapter = (folder / ADAPTER).is_file()
    files = [] if is_adapter else pickled_weights(folder)
    if not is_adapter and not files:
        raise ModelError(f"{folder}: holds neither {ADAPTER} nor pickled weights; a folder with one was expected")
    with written(Path(out), force) as made:
        if is_adapter:
            _merge(folder, base or base_of(folder), revision, made)
        else:
            _unpickle(folder, files, made)
    return Path(out)


def _merge(folder: Path, base: str, revision: str | None, made: Path) -> None:
    """Write the base of an adapter with the adapter added to its weights, and the tokenizer of either."""
    if importlib.util.find_spec("peft") is None:
        raise ModelError(f"{folder}: an adapter is merged by PEFT, which is not installed; pip install 'ffedit[peft]'")
    if not (folder / ADAPTER_WEIGHTS).is_file():
        raise ModelError(f"{folder}: no {ADAPTER_WEIGHTS} in it; an adapter in safetensors was expected")
    import peft

    checkpoint = opened(base, revision)
    own = checkpoint._replace(name=str(folder), path=str(folder), common={"local_files_only": True})
    tokenizer = read_tokenizer(own if (folder / "tokenizer_config.json").is_file() else checkpoint)
    with readable(f"{base}: the base of the adapter in {folder} cannot be read"):
        classes = decoder_classes(checkpoint.config)
        model: Any = first_that_runs(classes, checkpoint.path, dtype="auto", use_safetensors=True, **checkpoint.common)
    saved: torch.dtype = model.dtype
    with readable(f"{folder}: PEFT cannot merge this adapter into {base}"):
        adapted = peft.PeftModel.from_pretrained(model.float(), str(folder))
        merged = adapted.merge_and_unload(safe_merge=True).to(saved)
    with os_errors():
        merged.save_pretrained(made)
        tokenizer.save_pretrained(made)


def _unpickle(folder: Path, files: list[Path], made: Path) -> None:
    """Write pickled weights as safetensors under their own names, and what else the folder holds."""
    count = len(files)
    targets = [made / (SINGLE if count == 1 else f"model-{i + 1:05}-of-{count:05}.safetensors") for i in range(count)]
    question = json.dumps([[str(a.absolute()), str(b.absolute())] for a, b in zip(files, targets, strict=True)])
    try:
        process = run_module("ffedit.loading.unpickle", question, {})
    except OSError as error:
        raise EditError(f"the process that reads {folder} could not be started ({brief(error)})") from error
    if process.returncode:
        why = (process.stderr.strip().splitlines() or [f"exit code {process.returncode}"])[-1]
        raise ModelError(f"{folder}: its weights cannot be converted ({why}); nothing was written")
    if count > 1:
        held = {target: read_header(target) for target in targets}
        total = sum(stored.size for tensors in held.values() for stored in tensors.values())
        shards = {name.partition("[")[0]: target.name for target, tensors in held.items() for name in tensors}
        index = {"metadata": {"total_size": total}, "weight_map": dict(sorted(shards.items()))}
        (made / INDEX).write_text(json.dumps(index, indent=2) + "\n", encoding="utf-8")
    for path in sorted(folder.iterdir()):
        is_weight = path.suffix in (".bin", ".pt", ".pth", ".pkl", ".safetensors") or path.name.endswith(".index.json")
        if path.is_file() and not is_weight and not path.name.startswith("."):
            refuse_link(path, folder)
            shutil.copyfile(path, made / path.name)

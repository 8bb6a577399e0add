"""Refuse folders that hold no loadable checkpoint, before torch is imported.

After fine-tuning or a download, a folder does not always hold a whole model: it may be an adapter, pickled weights,
pointers of Git LFS, or some of the shards. The error for each says what to do next.
"""

from __future__ import annotations

import shlex
from pathlib import Path

from ffedit.errors import ModelError
from ffedit.files.shards import INDEX, SINGLE, is_pointer, read_index, refuse_pickled

ADAPTER = "adapter_config.json"
# Files that may be pointers of Git LFS: weights, tokenizers, and their descriptions.
LARGE = ("*.safetensors", "*.gguf", "*.bin", "*.json", "*.model", "*.jinja")
# Weights of other frameworks, and original weights of Llama and Mistral.
OTHERS = ("*.h5", "*.msgpack", "*.pth", "*.pt", "*.ckpt", "*.onnx", "*.npz")


def check_folder(folder: Path, name: str) -> None:
    """Refuse a folder that holds no whole checkpoint in safetensors; `name` is the model's name in messages.

    Raises ModelError for an adapter, alone or beside a model, pickled weights or none, a Git LFS pointer, and an index
    whose shards are not all there.
    """
    files = sorted(path for pattern in LARGE for path in folder.glob(pattern) if path.is_file())
    if pointers := [path.name for path in files if is_pointer(path)]:
        raise ModelError(
            f"{name}: {pointers[0]} is a Git LFS pointer, not the file itself; fetch the files: "
            f"git -C {shlex.quote(str(folder))} lfs pull"
        )
    is_model = (folder / "config.json").is_file()
    if (folder / ADAPTER).is_file():
        merge = (
            "merge it into its base, and save the tokenizer beside it: "
            f"AutoPeftModelForCausalLM.from_pretrained({str(folder)!r}).merge_and_unload().save_pretrained(DIR)"
        )
        if is_model:
            raise ModelError(
                f"{name}: holds a model and a PEFT adapter, which transformers would load, too; to edit the model "
                f"alone, move {ADAPTER} elsewhere; to edit it with the adapter, {merge}"
            )
        raise ModelError(f"{name}: is a PEFT adapter, not a model; {merge}")
    if not is_model:
        raise ModelError(f"{name}: no config.json in it; {_elsewhere(folder)}")
    if (folder / INDEX).is_file():
        read_index(folder / INDEX)
        return
    if not (folder / SINGLE).is_file():
        refuse_pickled(folder, name)
    if not any(path.suffix == ".safetensors" for path in files):
        others = [path.name for pattern in OTHERS for path in sorted(folder.glob(pattern))]
        advice = f"; {others[0]} is not read: take the model's safetensors files, or its GGUF file" if others else ""
        if files_of_gguf := [path for path in files if path.suffix == ".gguf"]:
            advice = f"; give its GGUF file: {files_of_gguf[0]}"
        raise ModelError(f"{name}: no weights in it ({SINGLE}, or {INDEX} with its shards, was expected){advice}")


def _elsewhere(folder: Path) -> str:
    """Say what to give instead of a path that is no model folder: a folder inside it, or the folder of the file."""
    if folder.is_file():
        return f"give the folder that holds it: {folder.parent}"
    names = [f"{inside}/{name}" for inside in ("*", "snapshots/*") for name in ("config.json", ADAPTER)]
    if inner := [path.parent for name in names for path in folder.glob(name)]:
        last = max(inner, key=lambda path: (len(path.name), path.name))  # checkpoint-1000 follows checkpoint-500
        return f"give the folder that has it: {last}"
    return "a model folder, a GGUF file or a hub id was expected"

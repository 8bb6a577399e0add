"""Refusal of folders that hold no checkpoint that can be loaded, before torch is imported.

What people have after fine-tuning or a download is not always a whole model: an adapter for one, pickled weights, the
pointers of Git LFS, some of the shards. Each of these has a next step, which its line says.
"""

from __future__ import annotations

import shlex
from pathlib import Path

from ffedit.errors import ModelError
from ffedit.files.shards import INDEX, SINGLE, is_pointer, read_index, refuse_pickled

ADAPTER = "adapter_config.json"
# Files in whose place a pointer may stand: the weights, the tokenizer, what describes them.
LARGE = ("*.safetensors", "*.gguf", "*.bin", "*.json", "*.model", "*.jinja")
# Weights of other frameworks, and the original ones of Llama and Mistral.
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
        found = f"; {others[0]} is not read: take the model's safetensors files, or its GGUF file" if others else ""
        if files_of_gguf := [path for path in files if path.suffix == ".gguf"]:
            found = f"; give its GGUF file: {files_of_gguf[0]}"
        raise ModelError(f"{name}: no weights in it ({SINGLE}, or {INDEX} with its shards, was expected){found}")


def _elsewhere(folder: Path) -> str:
    """Say what to give in place of what is no model folder: a folder in it, or the one that it lies in."""
    if folder.is_file():
        return f"give the folder that holds it: {folder.parent}"
    names = [f"{inside}/{name}" for inside in ("*", "snapshots/*") for name in ("config.json", ADAPTER)]
    if found := [path.parent for name in names for path in folder.glob(name)]:
        last = max(found, key=lambda path: (len(path.name), path.name))  # checkpoint-1000 is behind checkpoint-500
        return f"give the folder that has it: {last}"
    return "a model folder, a GGUF file or a hub id was expected"

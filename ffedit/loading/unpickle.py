"""`python -m ffedit.loading.unpickle < PATHS`: write files of pickled weights as safetensors, in this process.

torch's restricted unpickler reads them (`weights_only`): tensors and plain containers, no code. All the same it runs in
a process of its own, which does nothing else. Stdin is a JSON list of pairs: a file, and the file to write.
"""

from __future__ import annotations

import json
import pickle
import sys
from typing import Any

import torch
from safetensors.torch import save_file


def main() -> str | None:
    """Convert the files; return what is wrong with one, which Python writes to stderr, or None."""
    for source, target in json.load(sys.stdin):
        try:
            tensors = read(source)
        except (pickle.UnpicklingError, EOFError):  # torch's message tells how to run what the file holds
            tensors = None
        if not (isinstance(tensors, dict) and all(isinstance(tensor, torch.Tensor) for tensor in tensors.values())):
            return f"{source}: it holds more than named tensors, or is damaged"
        plain = {name: tensor.clone().contiguous() for name, tensor in tensors.items()}
        save_file(plain, target, metadata={"format": "pt"})
    return None


def read(source: str) -> Any:
    """Read a file of tensors, mapped into memory unless torch before 1.6 wrote it."""
    options: dict[str, Any] = {"map_location": "cpu", "weights_only": True}
    try:
        return torch.load(source, mmap=True, **options)
    except RuntimeError:
        return torch.load(source, **options)


if __name__ == "__main__":
    sys.exit(main())

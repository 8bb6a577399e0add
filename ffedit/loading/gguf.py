"""Read GGUF files as ordinary checkpoints, with a cache.

transformers takes a while to read config and tokenizer, so they are kept in the cache, in a folder that the rest of
ffedit treats as a checkpoint. The weights stay in the file and are unpacked each time a model is loaded, so that they
are on disk once. Operations that need the weights as files (an export, a model that is spread over devices) convert
them to float32 in the same folder. The folder is named by the file's path, size and times: when one of these changes,
the file is read again.
"""

from __future__ import annotations

import hashlib
import importlib.metadata
import importlib.util
import json
import logging
import shutil
from functools import lru_cache
from pathlib import Path
from typing import Any

import torch
import transformers

from ffedit.errors import ModelError
from ffedit.files import cache
from ffedit.files.atomic import os_errors
from ffedit.files.placing import claimed, named_errors, placed
from ffedit.files.seal import file_checksum, sealed, unsealed
from ffedit.files.shards import gguf_parts
from ffedit.inference.precision import FASTER, bfloat16_speed
from ffedit.loading.gguf_reader import (
    UNPACKING,
    checked,
    config_and_tokenizer,
    entry,
    kinds,
    unpacked_model,
    weight_count,
)
from ffedit.loading.names import PACKAGES, gguf_file
from ffedit.loading.reading import check_memory, quiet
from ffedit.progress import Progress, silent

logger = logging.getLogger(__name__)

SOURCE = "ffedit_source.json"  # in a checkpoint's folder: the file that it was converted from
CHECKSUMS = ".checksums.json"  # of all other files in the folder; it stays in the cache
BLOCK = 1 << 24
LARGE = 10**9  # weights of a model that takes too much memory in float32


def converted(name: str, file: Path, progress: Progress = silent, weights: bool = True) -> Path:
    """Return the folder of a GGUF file's config and tokenizer; make it if it is not in the cache.

    If `weights`, it holds the weights, too, as float32; else `read_weights` reads them. `name` is the model's name in
    messages, and `file` the first of several parts. Raises ModelError if the file cannot be read or holds no decoder
    that transformers can read, or `gguf` is not installed, and EditError if the cache cannot be written.
    """
    folder = _folder(file)
    if not _is_whole(folder, weights):
        with claimed(folder.parent, wait=True):
            if not _is_whole(folder, weights):  # another process may have made it meanwhile
                _convert(name, file, folder, weights, progress)
    return folder


def read_weights(
    name: str, file: Path, folder: Path, config: Any, dtype: torch.dtype | None, progress: Progress = silent
) -> Any:
    """Return the model of a GGUF file whose `config` and tokenizer are in `folder`, its weights unpacked into memory.

    Its precision is `dtype`, or `default_dtype`. If the weights cannot be read, `folder` is removed from the cache,
    unless it holds converted weights. Errors are those of `converted`.
    """
    try:
        reader = checked(name, file)
        progress(UNPACKING, 0, 1)
        dtype = dtype or default_dtype(reader)
        check_memory(name, weight_count(reader), dtype)
        model = unpacked_model(name, file, reader, folder, config, dtype, progress)
        _check_unchanged(name, file, folder)
    except ModelError:
        with claimed(folder.parent, wait=True):
            if not has_weights(folder):  # another process may have converted them
                shutil.rmtree(folder, ignore_errors=True)
        raise
    model.name_or_path = model.config.name_or_path = str(folder)
    return model


def default_dtype(reader: Any) -> torch.dtype:
    """Return the precision of a GGUF file's model on a CPU, where none was asked for: float32 or bfloat16.

    bfloat16 is for a file of at least `LARGE` weights, most of them in 16 bits or fewer, on a processor that multiplies
    bfloat16 faster.
    """
    size = weight_count(reader)
    if size < LARGE or kinds(reader)[0].name == "F32":
        return torch.float32
    speedup = bfloat16_speed(torch.device("cpu"))
    dtype = torch.bfloat16 if speedup >= FASTER else torch.float32
    logger.info("%.2g billion weights in %s: bfloat16 is %.2g times as fast as float32", size / 1e9, dtype, speedup)
    return dtype


def _folder(file: Path) -> Path:
    """Return the folder of a file's content, whether it exists or not."""
    try:
        identity = f"{file.absolute()} {_mark(file)}"
    except OSError as error:
        raise ModelError(f"{file}: cannot be read ({error.strerror or error})") from error
    return cache.path("gguf", hashlib.sha256(identity.encode()).hexdigest()[:24], "")


def _check_unchanged(name: str, file: Path, folder: Path) -> None:
    """Refuse a file that changed since its content's folder was named."""
    if _folder(file) != folder:
        raise ModelError(f"{name}: {file} changed while it was read; try again")


def source_of(name: str, folder: Path) -> dict[str, Any] | None:
    """Return the source of a checkpoint that was converted from a GGUF file, as plain JSON; None for any other.

    Its entries are `file` and `package` (distribution and version), `sha256` and `bytes` of the file, `quantisation`
    (GGML types, the type of most weights first), `license`, and `converted`, the versions of what read the file.
    """
    source = _content(folder / SOURCE)
    if source and (file := gguf_file(name)) is not None:
        source |= _origin(name, file)
    return source or None


def _origin(name: str, file: Path) -> dict[str, Any]:
    """Return the name of a file, and the package that contains it."""
    package = None
    if name in PACKAGES:
        distribution = PACKAGES[name].distribution
        try:
            package = f"{distribution} {importlib.metadata.version(distribution)}"
        except importlib.metadata.PackageNotFoundError:  # copied here, not installed
            package = distribution
    return {"file": file.name, "package": package}


def has_weights(folder: Path) -> bool:
    """Return True if the folder of a GGUF file also holds its converted weights."""
    return any(folder.glob("*.safetensors"))


def _is_whole(folder: Path, weights: bool) -> bool:
    """Return True if a file's config and tokenizer, and its weights if `weights`, are in the cache and undamaged."""
    if not (folder / CHECKSUMS).is_file() or (weights and not has_weights(folder)):
        return False
    files = {folder / name: checksum for name, checksum in _content(folder / CHECKSUMS).items()}
    try:
        return bool(files) and all(_checksum(file, *_mark(file)) == checksum for file, checksum in files.items())
    except OSError:
        return False


@lru_cache(64)
def _checksum(file: Path, *mark: int) -> str:
    """Return a file's checksum; `mark` is its `_mark`, so that an unchanged file is read once in a process."""
    return file_checksum(file)


def _mark(file: Path) -> list[int]:
    """Return sizes and times of a file, or of its parts, which change when its content does; it is not read."""
    stats = [part.stat() for part in gguf_parts(file)]
    return [number for stat in stats for number in (stat.st_size, stat.st_mtime_ns, stat.st_ctime_ns)]


def _content(path: Path) -> dict[str, Any]:
    """Read a JSON object; an empty one where there is none."""
    try:
        return unsealed(json.loads(path.read_text(encoding="utf-8")))
    except (OSError, ValueError, RecursionError):
        return {}


def _write(path: Path, content: dict[str, Any]) -> None:
    path.write_text(json.dumps(sealed(content), indent=1, ensure_ascii=False) + "\n", encoding="utf-8")


def _write_added_tokens(path: Path, tokenizer: Any) -> None:
    """Write a tokenizer's added tokens into its settings; else transformers parses all tokens in Python for them."""
    names = ("content", "lstrip", "normalized", "rstrip", "single_word", "special")
    added = {
        str(i): {name: getattr(token, name) for name in names} for i, token in tokenizer.added_tokens_decoder.items()
    }
    settings = json.loads(path.read_text(encoding="utf-8")) | {"added_tokens_decoder": added}
    path.write_text(json.dumps(settings, indent=1, ensure_ascii=False) + "\n", encoding="utf-8")


def _hash(file: Path) -> str:
    """Return the SHA-256 of a file with all its parts; ModelError if it cannot be read."""
    digest = hashlib.sha256()
    try:
        for part in gguf_parts(file):
            with part.open("rb") as stream:
                while block := stream.read(BLOCK):
                    digest.update(block)
    except OSError as error:
        raise ModelError(f"{file}: cannot be read ({error.strerror or error})") from error
    return digest.hexdigest()


def _check_disk(name: str, folder: Path, needed: int) -> None:
    """Refuse a conversion that the cache has no room for, before it starts."""
    with os_errors():
        folder.mkdir(parents=True, exist_ok=True)
        free = shutil.disk_usage(folder).free
    if free < needed:
        raise ModelError(
            f"{name}: its weights take {needed / 1e9:.2g} GB in the cache as a checkpoint, and {free / 1e9:.2g} GB are "
            f"free in {folder}; free some, or set FFEDIT_CACHE to a folder on another disk"
        )


def _convert(name: str, file: Path, folder: Path, weights: bool, progress: Progress) -> None:
    """Write the content of a GGUF file as a checkpoint in `folder`, whole or not at all; with its weights if asked."""
    if importlib.util.find_spec("gguf") is None:
        raise ModelError(
            f"{name}: GGUF files are read with the package gguf; pip install 'ffedit[gguf]', or gguf alone"
        )
    sha256 = _hash(file)  # first, because it reports a file that cannot be read
    reader = checked(name, file)
    if weights:
        check_memory(name, weight_count(reader), torch.float32, choosable=False)
        _check_disk(name, folder.parent, 4 * weight_count(reader))
    progress("converting", 0, 1)
    config, tokenizer = config_and_tokenizer(name, file, reader, folder)
    model = unpacked_model(name, file, reader, folder, config, torch.float32, progress) if weights else None
    source = {
        **_origin(name, file),
        "sha256": sha256,
        "bytes": sum(part.stat().st_size for part in gguf_parts(file)),
        "quantisation": [kind.name for kind in kinds(reader)],
        "license": entry(reader, "general.license"),
        "converted": f"transformers {transformers.__version__}, gguf {importlib.metadata.version('gguf')}",
    }
    # An incomplete folder is replaced, whatever it holds.
    with placed(folder, force=True) as new, named_errors(folder), quiet():
        new.mkdir()
        with os_errors():
            (config if model is None else model).save_pretrained(new)
            tokenizer.save_pretrained(new)
            _write_added_tokens(new / "tokenizer_config.json", tokenizer)
        _write(new / SOURCE, source)
        _write(new / CHECKSUMS, {path.name: file_checksum(path) for path in sorted(new.iterdir())})
        _check_unchanged(name, file, folder)

"""Models come in by name.

Loading takes a hub id, a folder or a ready pair, reads safetensors only, and runs no remote code unless asked. A
checkpoint that was edited brings its edits along. (How models go out is in `shipping`.)
"""

from __future__ import annotations

import ssl
import urllib.error
import urllib.request
from http.client import HTTPException
from pathlib import Path
from textwrap import shorten
from typing import Any, TypeAlias

import huggingface_hub
import torch
from transformers import AutoConfig, AutoModelForCausalLM, AutoTokenizer, PreTrainedModel, PreTrainedTokenizerBase

from ffedit.anatomy import Editable, dissect
from ffedit.errors import FFEditError, ModelError

Source: TypeAlias = "str | Path | tuple[PreTrainedModel, PreTrainedTokenizerBase]"
ATLAS = Path(__file__).parent / "atlas" / "model"
# What a repository may hold besides the weights that are read.
OTHER_WEIGHTS = ("*.bin", "*.h5", "*.msgpack", "*.onnx", "*.onnx_data", "*.gguf", "original/*", "onnx/*")
DTYPES = {"float32": torch.float32, "float16": torch.float16, "bfloat16": torch.bfloat16}


def load(
    name_or_path: Source = "atlas",
    device: str = "auto",
    dtype: str = "auto",
    revision: str | None = None,
    trust_remote_code: bool = False,
    value_matrix: str | None = None,
) -> Editable:
    """A model, ready to be located, edited and measured.

    Args:
        name_or_path: "atlas" (the embedded model), a hub id, a folder, or a pair (model, tokenizer).
        device: "auto" spreads the model over the accelerators there are (accelerate), else any torch device.
        dtype: "auto" is the checkpoint's own, computed in float32 where that is float16 on a CPU; or float32, float16,
            bfloat16.
        revision: of a hub id.
        trust_remote_code: run code that comes with the checkpoint.
        value_matrix: path of the value matrix inside a layer, where it is not recognised.

    Raises:
        ModelError: it cannot be found, read or recognised; one line says why.
    """
    if isinstance(name_or_path, tuple):
        model, tokenizer = name_or_path
        model.eval()
        return dissect(model, tokenizer, model.config._name_or_path or type(model).__name__, value_matrix)
    name = str(name_or_path)
    path = str(ATLAS) if name == "atlas" else name
    if dtype != "auto" and dtype not in DTYPES:
        raise ModelError(f"dtype {dtype!r} is not known; give auto, {', '.join(DTYPES)}")
    common = {"revision": revision, "trust_remote_code": trust_remote_code, "local_files_only": _is_local(path, name)}
    part = "config.json"
    try:
        config = AutoConfig.from_pretrained(path, **common)
        if config.is_encoder_decoder:
            raise ModelError(f"{name}: {config.model_type} is an encoder with a decoder; a causal decoder is needed")
        if quantised := getattr(config, "quantization_config", None):
            how = quantised.get("quant_method", "unknown") if isinstance(quantised, dict) else quantised.quant_method
            raise ModelError(f"{name}: quantised ({how}); edit the model in 16 or 32 bits and quantise the result")
        part = "the tokenizer"
        tokenizer = AutoTokenizer.from_pretrained(path, **common)
        if set(tokenizer.get_vocab()) <= set(tokenizer.all_special_tokens):
            raise ModelError(f"{name}: no tokenizer in it (tokenizer.json was expected)")
        part = "the model"
        loaded: Any = AutoModelForCausalLM.from_pretrained(
            path,
            dtype=DTYPES.get(dtype, "auto"),
            device_map=_device_map(device),
            use_safetensors=True,
            output_loading_info=True,
            ignore_mismatched_sizes=True,
            **common,
        )
    except FFEditError:
        raise
    except Exception as error:  # a broken checkpoint may fail anywhere in transformers, with any error
        raise ModelError(f"{name}: {part} cannot be read: {_brief(error)}") from error
    model, found = loaded
    for key, given, wanted in found["mismatched_keys"]:
        raise ModelError(f"{name}: {key} is {list(given)} in the checkpoint, {list(wanted)} was expected")
    for key in sorted(found["missing_keys"]):
        raise ModelError(f"{name}: {key} is missing from the checkpoint; a causal language model was expected")
    model.eval().requires_grad_(False)
    saved = model.dtype
    if saved == torch.float16 and model.device.type == "cpu":
        model.float()
    editable = dissect(model, tokenizer, name, value_matrix, saved)
    if folder := cached_folder(editable):
        from ffedit.shipping.record import remember  # which stands on this module

        remember(editable, folder)
    return editable


def local_folder(name_or_path: str | Path, revision: str | None = None) -> Path:
    """The folder of a checkpoint, of which nothing is loaded; a hub id is fetched first where it is not in the cache.

    Raises:
        ModelError: it cannot be found or fetched.
    """
    name = str(name_or_path)
    path = str(ATLAS) if name == "atlas" else name
    here = _is_local(path, name)
    if Path(path).exists():
        return Path(path)
    try:
        return Path(
            huggingface_hub.snapshot_download(
                path, revision=revision, local_files_only=here, ignore_patterns=list(OTHER_WEIGHTS)
            )
        )
    except Exception as error:  # the network may fail in any way
        raise ModelError(f"{name}: cannot be fetched: {_brief(error)}") from error


def cached_folder(editable: Editable) -> Path | None:
    """The folder that a model and its tokenizer were loaded from; None where they came from elsewhere or two places."""
    source = str(editable.model.name_or_path)
    if not source or source != str(editable.tokenizer.name_or_path):
        return None
    if (Path(source) / "config.json").is_file():
        return Path(source)
    commit = getattr(editable.model.config, "_commit_hash", None)
    try:
        found = huggingface_hub.try_to_load_from_cache(source, "config.json", revision=commit)
    except ValueError:  # no hub id is written like this
        return None
    return Path(found).parent if isinstance(found, str) else None


def _is_local(path: str, name: str) -> bool:
    """Whether everything must be on this machine: a folder, or a hub id when there is no network.

    Raises:
        ModelError: it is not here, and the hub cannot be asked; or no hub id is written like this.
    """
    if Path(path).exists():
        if not (Path(path) / "config.json").is_file():
            raise ModelError(f"{name}: no config.json in it; a model folder or a hub id was expected")
        return True
    try:
        known = huggingface_hub.try_to_load_from_cache(path, "config.json")
    except ValueError as error:
        raise ModelError(f"{name}: no such folder; a model folder or a hub id was expected") from error
    if not huggingface_hub.is_offline_mode() and _answers(huggingface_hub.constants.ENDPOINT):
        return False
    if not isinstance(known, str):
        raise ModelError(
            f"{name}: no such folder, and as a hub id it is not in the cache and {huggingface_hub.constants.ENDPOINT} "
            "cannot be reached; --model atlas needs no network"
        )
    return True


def _answers(url: str) -> bool:
    """Whether a server can be reached; asked once, where transformers would try for a minute."""
    try:
        urllib.request.urlopen(urllib.request.Request(url, method="HEAD"), timeout=5).close()
    except urllib.error.HTTPError:
        return True
    except urllib.error.URLError as error:
        return isinstance(error.reason, ssl.SSLError)  # it is there; transformers has certificates of its own
    except (OSError, ValueError, HTTPException):
        return False
    return True


def _device_map(device: str) -> str | None:
    """What accelerate is asked for: everything it finds, one device, or nothing where there is only a CPU."""
    if device == "auto":
        return "auto" if torch.accelerator.is_available() else None
    try:
        torch.device(device)
    except RuntimeError as error:
        raise ModelError(f"device {device!r} is not known; give auto, cpu, or one that torch knows") from error
    return None if device == "cpu" else device


def _brief(error: BaseException) -> str:
    """What an error says, on one line that can be read."""
    return shorten(str(error), 200, placeholder=" …") or type(error).__name__

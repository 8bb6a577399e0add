"""Models come in by name.

Loading takes a hub id, a folder or a ready pair, reads safetensors only, and runs no remote code unless asked. A
checkpoint that was edited brings its edits along. (How models go out is in `shipping`.)
"""

from __future__ import annotations

import ssl
import urllib.error
import urllib.request
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from http.client import HTTPException
from pathlib import Path
from textwrap import shorten
from typing import Any, NamedTuple, TypeAlias

import huggingface_hub
import torch
from accelerate.utils import convert_file_size_to_int
from transformers import AutoConfig, AutoModelForCausalLM, AutoTokenizer, PreTrainedModel, PreTrainedTokenizerBase

from ffedit.anatomy import Editable, dissect
from ffedit.chat import turn
from ffedit.errors import FFEditError, ModelError
from ffedit.placement import device_of
from ffedit.processes import own_device

Source: TypeAlias = "str | Path | tuple[PreTrainedModel, PreTrainedTokenizerBase]"
DeviceMap: TypeAlias = "str | Mapping[str, int | str | torch.device]"
# Models that come with ffedit, by name.
EMBEDDED = {name: Path(__file__).parent / "atlas" / "models" / name for name in ("atlas", "atlas-llama", "atlas-moe")}
# What a repository may hold besides the weights that are read.
OTHER_WEIGHTS = ("*.bin", "*.h5", "*.msgpack", "*.onnx", "*.onnx_data", "*.gguf", "original/*", "onnx/*")
DEVICE_MAPS = ("auto", "balanced", "balanced_low_0", "sequential")
QUANTISE_LATER = "; install what it was quantised with, or edit the model in 16 or 32 bits and quantise the result"
DTYPES = {"float32": torch.float32, "float16": torch.float16, "bfloat16": torch.bfloat16}


def load(
    name_or_path: Source = "atlas",
    device: str = "auto",
    dtype: str = "auto",
    revision: str | None = None,
    trust_remote_code: bool = False,
    value_matrix: str | None = None,
    device_map: DeviceMap | None = None,
    offload_folder: str | Path | None = None,
    max_memory: Mapping[int | str, int | str] | None = None,
    chat: bool = False,
) -> Editable:
    """A model, ready to be located, edited and measured.

    Args:
        name_or_path: "atlas" or another of `EMBEDDED`, a hub id, a folder, or a pair (model, tokenizer).
        device: "auto" spreads the model over the accelerators there are (accelerate), and gives each of several
            processes its own; else any torch device.
        dtype: "auto" is the checkpoint's own, computed in float32 where that is float16 on a CPU; or float32, float16,
            bfloat16.
        revision: of a hub id.
        trust_remote_code: run code that comes with the checkpoint.
        value_matrix: path of the value matrix, where it is not recognised: inside a layer (`ff.out`), or in the model,
            with {} for the layer's number (`layers.{}.ff.out`).
        device_map: instead of `device`, how a model that does not fit is spread: one of `DEVICE_MAPS`, of which "auto"
            fills accelerators, then CPU memory, then the disk; or by module, its device, "cpu" or "disk".
        offload_folder: where weights go that the checkpoint does not hold in the form in which they are computed with
            (merged experts); the others are read from the checkpoint's own files.
        max_memory: how much of each device, by number, and of "cpu" may be filled ("20GB").
        chat: ask as a user of a chat does: a prompt is the user's turn in the tokenizer's chat template, and its answer
            begins the assistant's (`ffedit.chat`).

    Raises:
        ModelError: it cannot be found, read, recognised or spread, or has no chat template; one line says why.
    """
    spread = spread_over(device, device_map, offload_folder, max_memory)
    if isinstance(name_or_path, tuple):
        model, tokenizer = name_or_path
        name = model.config._name_or_path or type(model).__name__
        return _asked(dissect(model, tokenizer, name, value_matrix), chat)
    name = str(name_or_path)
    found = opened(name, revision, trust_remote_code)
    if found.config.is_encoder_decoder:
        raise ModelError(f"{name}: {found.config.model_type} is an encoder with a decoder; a causal decoder is needed")
    model, tokenizer, saved = read(found, AutoModelForCausalLM, "causal", dtype, spread)
    editable = dissect(model, tokenizer, name, value_matrix, saved)
    if folder := cached_folder(editable):
        from ffedit.shipping.record import remember  # which stands on this module

        remember(editable, folder)
    return _asked(editable, chat)


def _asked(editable: Editable, chat: bool) -> Editable:
    """The model as it is to be asked; a tokenizer without a template is refused now."""
    editable.chat = chat
    try:
        if chat:
            turn(editable.tokenizer, "Hello")
    except ModelError as error:
        raise ModelError(f"{editable.name}: {error}") from error
    return editable


class Opened(NamedTuple):
    """A checkpoint of which only the config was read.

    Attributes:
        name: how messages call it.
        path: its folder or hub id.
        config: what kind of model it is.
        common: what transformers is to be asked for it with.
    """

    name: str
    path: str
    config: Any
    common: dict[str, Any]


def opened(name: str, revision: str | None = None, trust_remote_code: bool = False) -> Opened:
    """Find a checkpoint and read its config.

    Raises:
        ModelError: it cannot be found or read.
    """
    path = str(EMBEDDED.get(name, name))
    common = {"revision": revision, "trust_remote_code": trust_remote_code, "local_files_only": _is_local(path, name)}
    with _readable(name, "config.json"):
        return Opened(name, path, AutoConfig.from_pretrained(path, **common), common)


def read(
    opened: Opened, auto: Any, kind: str, dtype: str, spread: Mapping[str, Any]
) -> tuple[PreTrainedModel, PreTrainedTokenizerBase, torch.dtype]:
    """Read a checkpoint's tokenizer and weights.

    Args:
        opened: which.
        auto: the class of transformers that makes the model.
        kind: of language model, for messages.
        dtype: as of `load`.
        spread: as of `spread_over`.

    Returns:
        The model, in evaluation mode, its tokenizer, and the precision that it was saved in.

    Raises:
        ModelError: it cannot be read, or weights are missing.
    """
    name, path, config, common = opened
    if dtype != "auto" and dtype not in DTYPES:
        raise ModelError(f"dtype {dtype!r} is not known; give auto, {', '.join(DTYPES)}")
    with _readable(name, "the tokenizer"):
        tokenizer = AutoTokenizer.from_pretrained(path, **common)
        if set(tokenizer.get_vocab()) <= set(tokenizer.all_special_tokens):
            raise ModelError(f"{name}: no tokenizer in it (tokenizer.json was expected)")
    quantised = getattr(config, "quantization_config", None)
    part, advice = "the model", ""
    if quantised is not None:
        part, advice = f"the model, quantised ({_quantiser(quantised)}),", QUANTISE_LATER
    with _readable(name, part, advice):
        loaded: Any = auto.from_pretrained(
            path,
            dtype=DTYPES.get(dtype, "auto"),
            **spread,
            use_safetensors=True,
            output_loading_info=True,
            ignore_mismatched_sizes=True,
            **common,
        )
    model, found = loaded
    for key, given, wanted in found["mismatched_keys"]:
        raise ModelError(f"{name}: {key} is {list(given)} in the checkpoint, {list(wanted)} was expected")
    for key in sorted(found["missing_keys"]):
        raise ModelError(f"{name}: {key} is missing from the checkpoint; a {kind} language model was expected")
    model.eval().requires_grad_(False)
    saved = model.dtype
    if saved == torch.float16 and quantised is None and device_of(model).type == "cpu":
        model.float()
    return model, tokenizer, saved


def _quantiser(config: Any) -> str:
    """What a checkpoint was quantised with."""
    found = config.get("quant_method") if isinstance(config, Mapping) else getattr(config, "quant_method", None)
    return str(getattr(found, "value", found))


@contextmanager
def _readable(name: str, part: str, advice: str = "") -> Iterator[None]:
    """Say in one line that a part of a checkpoint cannot be read."""
    try:
        yield
    except FFEditError:
        raise
    except Exception as error:  # a broken checkpoint may fail anywhere in transformers, with any error
        raise ModelError(f"{name}: {part} cannot be read: {_brief(error)}{advice}") from error


def local_folder(name_or_path: str | Path, revision: str | None = None) -> Path:
    """The folder of a checkpoint, of which nothing is loaded; a hub id is fetched first where it is not in the cache.

    Raises:
        ModelError: it cannot be found or fetched.
    """
    name = str(name_or_path)
    path = str(EMBEDDED.get(name, name))
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
            f"cannot be reached; {', '.join(EMBEDDED)} need no network"
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


def spread_over(
    device: str,
    device_map: DeviceMap | None,
    offload_folder: str | Path | None,
    max_memory: Mapping[int | str, int | str] | None,
) -> dict[str, Any]:
    """What transformers is asked for: everything it finds, one device, or nothing where there is only a CPU.

    Raises:
        ModelError: a device, map, folder or size that cannot be.
    """
    if device_map is None:
        if offload_folder is not None or max_memory is not None:
            raise ModelError("a folder to offload to or a largest memory was given without a device map; give auto")
        return {"device_map": _whole(device)}
    if device != "auto":
        raise ModelError(f"device {device!r} and a device map were given; give one of them")
    if isinstance(device_map, str) and device_map not in DEVICE_MAPS:
        raise ModelError(f"device map {device_map!r} is not known; give {', '.join(DEVICE_MAPS)}")
    if offload_folder is not None and Path(offload_folder).exists() and not Path(offload_folder).is_dir():
        raise ModelError(f"{offload_folder}: is a file; a folder to offload weights to was expected")
    for size in (max_memory or {}).values():
        try:
            convert_file_size_to_int(size)
        except ValueError as error:
            raise ModelError(f"a memory of {size!r} is not known; give a number of bytes, or 20GB, 512MB") from error
    return {
        "device_map": device_map if isinstance(device_map, str) else dict(device_map),
        "offload_folder": None if offload_folder is None else str(offload_folder),
        "max_memory": None if max_memory is None else dict(max_memory),
    }


def _whole(device: str) -> str | None:
    """Where a model goes that is not offloaded."""
    own = own_device() if device == "auto" else None
    if own is not None:
        device = str(own)
    elif device == "auto":
        return "auto" if torch.accelerator.is_available() else None
    try:
        kind = torch.device(device).type
    except RuntimeError as error:
        raise ModelError(f"device {device!r} is not known; give auto, cpu, or one that torch knows") from error
    return None if kind == "cpu" else device


def _brief(error: BaseException) -> str:
    """What an error says, on one line that can be read."""
    return shorten(str(error), 200, placeholder=" …") or type(error).__name__

"""Load a model from a hub id, a folder, a GGUF file or a ready pair.

Only safetensors and GGUF are read (`loading.gguf`), and no remote code runs unless asked. A model is loaded on one
device, on all devices, or with a part of it offloaded to CPU memory or the disk (`model.storage`).
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from math import prod
from pathlib import Path
from textwrap import shorten
from types import SimpleNamespace
from typing import Any, Literal, NamedTuple, TypeAlias, get_args

import huggingface_hub
import torch
from accelerate.utils import convert_file_size_to_int
from transformers import (
    AutoConfig,
    AutoModelForCausalLM,
    AutoModelForMultimodalLM,
    AutoTokenizer,
    PreTrainedConfig,
    PreTrainedModel,
    PreTrainedTokenizerBase,
)
from transformers.models.auto.modeling_auto import (
    MODEL_FOR_CAUSAL_LM_MAPPING_NAMES,
    MODEL_FOR_MULTIMODAL_LM_MAPPING_NAMES,
)

from ffedit.errors import ModelError
from ffedit.files.shards import INDEX, SINGLE
from ffedit.files.tensor_ranges import FLOATS, Stored, contents
from ffedit.inference.distributed import own_device
from ffedit.loading.gguf import converted, has_weights, read_weights, source_of
from ffedit.loading.names import EMBEDDED, NAMED, gguf_file, is_local
from ffedit.loading.reading import check_declared, check_loaded, check_memory, readable, uncollected
from ffedit.loading.verify import find_and_verify
from ffedit.model.editable import Editable
from ffedit.model.fingerprint import fingerprint
from ffedit.model.storage import device_of
from ffedit.model.tokenization import turn
from ffedit.progress import Progress, silent

Spread: TypeAlias = Literal["auto", "balanced", "balanced_low_0", "sequential"]
DEVICE_MAPS: tuple[Spread, ...] = get_args(Spread)
DeviceMap: TypeAlias = "Spread | Mapping[str, int | str | torch.device]"
Source: TypeAlias = "str | Path | tuple[PreTrainedModel, PreTrainedTokenizerBase]"
# Files that a repository may hold besides the weights that are read.
OTHER_WEIGHTS = ("*.bin", "*.h5", "*.msgpack", "*.onnx", "*.onnx_data", "*.gguf", "original/*", "onnx/*")
QUANTISE_LATER = (
    "; with the library that quantised it, its edits are exported as an adapter; or edit the model in 16 or 32 bits "
    "and quantise the result"
)
# Every folder with a tokenizer that transformers reads has one of these.
TOKENIZERS = ("tokenizer.json", "*.model", "vocab*", "*.tiktoken", "tekken.json", "*tokenizer*.py")
Dtype: TypeAlias = Literal["auto", "float32", "float16", "bfloat16"]
DTYPES = {"float32": torch.float32, "float16": torch.float16, "bfloat16": torch.bfloat16}


def load_model(
    name_or_path: Source = "atlas",
    *,
    device: str | torch.device = "auto",
    dtype: Dtype | torch.dtype = "auto",
    revision: str | None = None,
    trust_remote_code: bool = False,
    value_matrix: str | None = None,
    device_map: DeviceMap | None = None,
    offload_folder: str | Path | None = None,
    max_memory: Mapping[int | str, int | str] | None = None,
    chat: bool = False,
    progress: Progress = silent,
) -> Editable:
    """Load a model from its files; arguments and errors are those of `ffedit.load`, which also reads its edits."""
    device, dtype_name = str(device), str(dtype).removeprefix("torch.")
    spread = spread_over(device, device_map, offload_folder, max_memory)
    if isinstance(name_or_path, str | Path):
        name = str(name_or_path)
        checkpoint = opened(name, revision, trust_remote_code, progress)
        config = checkpoint.config
        if config.is_encoder_decoder:
            raise ModelError(f"{name}: {config.model_type} is an encoder with a decoder; a causal decoder is needed")
        model, tokenizer, saved = _read(checkpoint, dtype_name, spread, progress)
        editable = find_and_verify(model, tokenizer, name, value_matrix, saved)
        editable.auto_dtype = dtype_name == "auto"
        if not any(memory.quantised for memory in editable.memories.values()):
            editable.unpacked = quantisation(config)
        if folder := cached_folder(editable):
            editable.source = source_of(name, folder)
            editable.as_read = fingerprint(editable) if gguf_file(name) is not None else ""
    else:
        pair = _ready_pair(name_or_path, device, dtype_name, revision, trust_remote_code, device_map)
        editable = find_and_verify(*pair, value_matrix)
    editable.chat = chat
    try:
        if chat:
            turn(editable.tokenizer, "Hello")
    except ModelError as error:
        raise ModelError(f"{editable.name}: {error}") from error
    return editable


def decoder_classes(config: Any) -> tuple[Any, ...]:
    """Return the transformers classes that read a decoder from its checkpoint, the preferred one first.

    The preferred class is that of the saved model, with its encoders of pictures or sound. The config of such a model
    may also be read as that of its text decoder alone (Llama 4, Qwen 3.5).
    """
    whole, text = (
        names.get(config.model_type)
        for names in (MODEL_FOR_MULTIMODAL_LM_MAPPING_NAMES, MODEL_FOR_CAUSAL_LM_MAPPING_NAMES)
    )
    if whole is None or (text is not None and whole not in (config.architectures or ())):
        return (AutoModelForCausalLM,)
    return (AutoModelForMultimodalLM,) if text in (None, whole) else (AutoModelForMultimodalLM, AutoModelForCausalLM)


def first_that_runs(classes: Sequence[Any], path: str, **options: Any) -> Any:
    """Load a model by the first of `classes` that transformers can run on text, else by the last.

    Returns what `from_pretrained` does: the model, and with `output_loading_info` its loading info. transformers 5.24
    loads Llama 4 with its vision tower, but fails in every pass of it, and runs its text decoder.
    """
    for auto in classes[:-1]:
        loaded = auto.from_pretrained(path, **options)
        model = loaded[0] if isinstance(loaded, tuple) else loaded
        try:
            with torch.no_grad():
                model(input_ids=torch.zeros(1, 1, dtype=torch.long, device=device_of(model.get_input_embeddings())))
            return loaded
        except AttributeError:
            del loaded, model  # before the next one takes memory, too
    return classes[-1].from_pretrained(path, **options)


def _ready_pair(
    source: Any, device: str, dtype: str, revision: str | None, trust_remote_code: bool, device_map: DeviceMap | None
) -> tuple[PreTrainedModel, PreTrainedTokenizerBase, str]:
    """Return a model that was loaded elsewhere, its tokenizer, and its name; refuse options of loading."""
    pair = source if isinstance(source, tuple) else (source,)
    if len(pair) != 2 or not hasattr(pair[0], "config") or not isinstance(pair[1], PreTrainedTokenizerBase):
        types = ", ".join(type(value).__name__ for value in pair)
        raise ModelError(f"found {types}; a model's name, its folder or a pair (model, tokenizer) was expected")
    options = {"device": device != "auto", "dtype": dtype != "auto", "revision": revision is not None}
    options |= {"trust_remote_code": trust_remote_code, "device_map": device_map is not None}
    if unused := [name for name, is_set in options.items() if is_set]:
        raise ModelError(f"{', '.join(unused)}: a pair (model, tokenizer) is loaded already; leave this out")
    model, tokenizer = pair
    return model, tokenizer, model.config._name_or_path or type(model).__name__


class Opened(NamedTuple):
    """Checkpoint of which only the config was read."""

    name: str  # in messages
    path: str  # folder or hub id
    config: Any
    common: dict[str, Any]  # transformers' arguments for all its parts


def opened(name: str, revision: str | None, trust_remote_code: bool, progress: Progress) -> Opened:
    """Find a checkpoint and read its config; a GGUF file's config and tokenizer are first put into a folder."""
    _check_revision(name, revision)
    path = path_of(name, progress, weights=False)
    local = path != name or is_local(path, name)  # another path is a folder of ffedit's own
    common = {"revision": revision, "trust_remote_code": trust_remote_code, "local_files_only": local}
    with readable(f"{name}: config.json cannot be read"):
        return Opened(name, path, AutoConfig.from_pretrained(path, **common), common)


def _check_revision(name: str, revision: str | None) -> None:
    """Refuse a revision of anything but a hub id."""
    if revision is not None and (name in NAMED or Path(name).exists()):
        raise ModelError(
            f"{name} is on this machine, and --revision {revision} applies only to models of the hub; leave it out"
        )


def path_of(name: str, progress: Progress = silent, weights: bool = True) -> str:
    """Return the folder that a name refers to, or that has a GGUF file's content; a hub id is returned as it is.

    Without `weights`, the folder need not have those of a GGUF file.
    """
    if name in EMBEDDED:
        return str(EMBEDDED[name])
    file = gguf_file(name)
    return name if file is None else str(converted(name, file, progress, weights))


def _read(
    opened: Opened, dtype: str, spread: Mapping[str, Any], progress: Progress
) -> tuple[PreTrainedModel, PreTrainedTokenizerBase, torch.dtype]:
    """Return a checkpoint's model, its tokenizer, and the dtype it was saved in (if quantised: computes in)."""
    name, path, config, common = opened
    classes = decoder_classes(config)
    if dtype != "auto" and dtype not in DTYPES:
        raise ModelError(f"dtype {dtype!r} is not known; give auto, {', '.join(DTYPES)}")
    tokenizer = read_tokenizer(opened)
    quantised = quantisation(config)
    what = f"{name}: the model, quantised ({quantised})," if quantised else f"{name}: the model"
    if dtype == "float16" and spread["device_map"] is None and not quantised:
        dtype = "float32"  # the dtype in which a CPU computes it, without rounding in between
    file = None if name in EMBEDDED else gguf_file(name)
    if file is not None:
        if spread["device_map"] is None:
            model = read_weights(name, file, Path(path), config, DTYPES.get(dtype), progress)
            return model.eval().requires_grad_(False), tokenizer, model.dtype
        path_of(name, progress)  # accelerate spreads a model from its files
    saved_in: torch.dtype | None = None
    standard = any((Path(path) / file).is_file() for file in (SINGLE, INDEX))  # transformers knows other file names
    if not quantised and "auto_map" not in vars(config) and standard:
        try:
            stored = contents(Path(path))
        except ModelError as error:
            raise ModelError(f"{what} cannot be read: {error}") from error
        size = sum(prod(tensor.shape) for tensor in stored.values())
        check_declared(name, classes[0], config, size, len(stored), "checkpoint")
        saved_in = _most_common(stored.values())
        computed_in = DTYPES.get(dtype) or (torch.float32 if saved_in == torch.float16 else saved_in)
        # Weights that are not converted are mapped from their files, and need not all be in memory.
        if saved_in and computed_in and computed_in.itemsize > saved_in.itemsize and spread["device_map"] is None:
            check_memory(name, size, computed_in)
    with readable(f"{what} cannot be read", QUANTISE_LATER if quantised else ""):
        loaded: Any = first_that_runs(
            classes,
            path,
            dtype=DTYPES.get(dtype, "auto"),
            **spread,
            use_safetensors=True,
            output_loading_info=True,
            ignore_mismatched_sizes=True,
            **common,
        )
    model, info = loaded
    check_loaded(name, info, "checkpoint", "a causal language model was expected")
    model.eval().requires_grad_(False)
    saved = model.dtype if quantised else saved_in or _saved_in(path, model, config)
    if model.dtype == torch.float16 and not quantised and device_of(model).type == "cpu":
        model.float()
    return model, tokenizer, saved


def written_config(folder: Path) -> Any:
    """Read a checkpoint's config without its class, which may be code in the checkpoint; ModelError if unreadable."""
    with readable(f"{folder}: config.json cannot be read"):
        content, _ = PreTrainedConfig.get_config_dict(folder)
    names = ("model_type", "architectures", "quantization_config")
    return SimpleNamespace(**{name: content.get(name) for name in names})


def quantisation(config: Any) -> str:
    """Return the method by which a checkpoint's weights are quantised, as transformers calls it; "" if it has none."""
    declared = getattr(config, "quantization_config", None)
    if declared is None:
        return ""
    method = declared.get("quant_method") if isinstance(declared, Mapping) else declared.quant_method
    return str(getattr(method, "value", method))


def _saved_in(path: str, model: PreTrainedModel, config: Any) -> torch.dtype:
    """Return the precision of most numbers in a checkpoint's files; where these cannot be read, the config's."""
    folder = folder_of(path, getattr(model.config, "_commit_hash", None))
    try:
        stored = {} if folder is None else contents(folder)
    except ModelError:  # transformers found the weights in other files
        stored = {}
    return _most_common(stored.values()) or getattr(config, "dtype", None) or model.dtype


def _most_common(tensors: Iterable[Stored]) -> torch.dtype | None:
    """Return the precision of most floating-point numbers in `tensors` of files; None if there are none."""
    counts: Counter[torch.dtype] = Counter()
    for tensor in tensors:
        if tensor.kind in FLOATS:
            counts[tensor.dtype] += prod(tensor.shape)
    return max(counts, key=counts.__getitem__, default=None)


def read_tokenizer(opened: Opened) -> PreTrainedTokenizerBase:
    """Read a checkpoint's tokenizer alone."""
    folder, absent = Path(opened.path), f"{opened.name}: no tokenizer in it (tokenizer.json was expected)"
    if folder.is_dir() and not any(any(folder.glob(pattern)) for pattern in TOKENIZERS):
        raise ModelError(absent)
    with readable(f"{opened.name}: the tokenizer cannot be read"), uncollected():
        tokenizer: PreTrainedTokenizerBase = AutoTokenizer.from_pretrained(opened.path, **opened.common)
        special = tokenizer.all_special_tokens
        if len(tokenizer) <= len(special) and set(tokenizer.get_vocab()) <= set(special):
            raise ModelError(absent)
        # Hardly any vocabulary has these: a tokenizer that lacks its unknown token fails here, and not later.
        tokenizer("☃\U0001f9ea", verbose=False)
    tokenizer.name_or_path = tokenizer.name_or_path or opened.path  # Mistral's own tokenizer does not set it
    return tokenizer


def local_folder(name_or_path: str | Path, revision: str | None = None) -> Path:
    """Return the folder of a checkpoint without loading it; download a hub id, and convert a GGUF file, if need be."""
    name = str(name_or_path)
    _check_revision(name, revision)
    path = path_of(name)
    local = is_local(path, name)
    if Path(path).exists():
        return Path(path)
    with readable(f"{name}: cannot be fetched"):
        options: dict[str, Any] = {"revision": revision, "local_files_only": local}
        return Path(str(huggingface_hub.snapshot_download(path, ignore_patterns=list(OTHER_WEIGHTS), **options)))


def cached_folder(editable: Editable) -> Path | None:
    """Return the folder that a model and its tokenizer were loaded from; None where there is none or they differ."""
    source = str(editable.model.name_or_path)
    if not source or source != str(editable.tokenizer.name_or_path):
        return None
    return folder_of(source, getattr(editable.model.config, "_commit_hash", None))


def stored_folder(editable: Editable, convert: bool) -> Path | None:
    """Return `cached_folder` if it has the weights; if `convert`, those of a GGUF file are put there first."""
    folder = cached_folder(editable)
    if folder is not None and editable.source is not None and not has_weights(folder):
        file = gguf_file(editable.name) if convert else None
        folder = None if file is None else converted(editable.name, file)
    return folder


def folder_of(source: str, commit: str | None = None) -> Path | None:
    """Return the folder that `source` names, or the cached folder of a hub id; None if there is none."""
    if (Path(source) / "config.json").is_file():
        return Path(source)
    try:
        file = huggingface_hub.try_to_load_from_cache(source, "config.json", revision=commit)
    except ValueError:  # not the form of a hub id
        return None
    return Path(file).parent if isinstance(file, str) else None


def spread_over(
    device: str,
    device_map: DeviceMap | None,
    offload_folder: str | Path | None,
    max_memory: Mapping[int | str, int | str] | None,
) -> dict[str, Any]:
    """Return transformers' arguments for the devices; ModelError for an impossible device, map, folder or size."""
    if device_map is None:
        if offload_folder is not None or max_memory is not None:
            raise ModelError("an offload folder or a memory limit needs a device map; give auto")
        return {"device_map": _whole(device)}
    if device != "auto":
        raise ModelError(f"device {device!r} and a device map were given; give one of them")
    expected = "a device map was expected: auto, or the device of each module by its name"
    ModelError.require(device_map, (str, Mapping), expected)
    if isinstance(device_map, str) and device_map not in DEVICE_MAPS:
        raise ModelError(f"device map {device_map!r} is not known; give {', '.join(DEVICE_MAPS)}")
    if offload_folder is not None and Path(offload_folder).exists() and not Path(offload_folder).is_dir():
        raise ModelError(f"{offload_folder}: is a file; a folder to offload weights to was expected")
    for size in (max_memory or {}).values():
        try:
            convert_file_size_to_int(size)
        except (AttributeError, TypeError, ValueError) as error:  # for a float, None, or other text
            raise ModelError(f"{size!r} is not an amount of memory; give a number of bytes, or 20GB, 512MB") from error
    return {
        "device_map": device_map if isinstance(device_map, str) else dict(device_map),
        "offload_folder": None if offload_folder is None else str(offload_folder),
        "max_memory": None if max_memory is None else dict(max_memory),
    }


def _whole(device: str) -> str | None:
    """Return the device map of a model that is not offloaded: all devices, one, or none on a CPU-only machine."""
    if device == "auto":
        if (process_device := own_device()) is None:
            return "auto" if torch.accelerator.is_available() else None
        device = str(process_device)
    try:
        kind = torch.device(device).type
    except RuntimeError as error:
        raise ModelError(f"device {device!r} is not known; give auto, cpu, or one that torch knows") from error
    if kind == "cpu":
        return None
    if kind == "meta":
        raise ModelError(f"device {device!r} cannot hold weights; give auto, cpu, or an accelerator")
    try:
        torch.empty(1, device=device)
    except (AssertionError, ImportError, RuntimeError) as error:  # device types raise different errors
        why = shorten(str(error).partition("\n")[0], 60, placeholder=" …")
        raise ModelError(f"device {device!r} cannot be used ({why}): {_accelerators()}") from error
    return device


def _accelerators() -> str:
    """Describe the accelerators that torch finds, and what to give instead of one that it does not find."""
    build, kind = f"torch {torch.__version__}", torch.accelerator.current_accelerator()
    if kind is None:
        return f"{build} was built for CPUs only; give auto or cpu, or install a torch that was built for the device"
    if not (count := torch.accelerator.device_count()):
        return f"{build} was built for {kind.type}, but finds none; give auto or cpu, or check its driver"
    names = ", ".join(f"{kind.type}:{i}" for i in range(count))
    return f"{build} finds {names}; give auto, cpu, or one of these"

"""Models come in by name and go out as checkpoints.

Loading takes a hub id, a folder or a ready pair, reads safetensors only, and runs no remote code unless asked.
Exporting writes a folder that transformers loads anywhere: the weights after one rounding, tokenizer, generation
config, a model card that says what was edited, and the edit itself; then it is read back and compared before it
counts as done.
"""

from __future__ import annotations

import gc
import json
import ssl
import urllib.error
import urllib.request
from http.client import HTTPException
from pathlib import Path
from textwrap import shorten
from typing import Any, TypeAlias

import huggingface_hub
import torch
from safetensors import SafetensorError
from transformers import AutoConfig, AutoModelForCausalLM, AutoTokenizer, PreTrainedModel, PreTrainedTokenizerBase

from ffedit.anatomy import Editable, dissect, probe_ids
from ffedit.card import model_card
from ffedit.editor import Edit
from ffedit.errors import CheckError, FFEditError, ModelError
from ffedit.folders import written

Source: TypeAlias = "str | Path | tuple[PreTrainedModel, PreTrainedTokenizerBase]"
ATLAS = Path(__file__).parent / "atlas" / "model"
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
    return dissect(model, tokenizer, name, value_matrix, saved)


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


def export(editable: Editable, edit: Edit, out: str | Path, force: bool = False) -> Path:
    """Write the edited model as a checkpoint folder that `AutoModelForCausalLM.from_pretrained` loads.

    Args:
        editable: the model that the edit was computed on, unedited.
        edit: what to write into it.
        out: the folder to make; it appears whole or not at all.
        force: replace a folder that is there.

    Returns:
        The folder.

    Raises:
        EditError: the folder exists or cannot be written, or the edit is another model's.
        CheckError: what was written does not give the logits of the model in memory; nothing is left then.
    """
    target = Path(out)
    memory = next(iter(editable.memories.values()))
    with written(target, force) as folder, edit.applied(editable):
        # Tied weights stay one tensor, so that they are written once.
        cast: dict[int, torch.Tensor] = {}
        weights = {
            name: cast.setdefault(weight.data_ptr(), weight.to(memory.saved_dtype))
            if weight.is_floating_point()
            else weight
            for name, weight in editable.model.state_dict().items()
        }
        try:
            editable.model.save_pretrained(folder, state_dict=weights)
        except SafetensorError as error:
            raise OSError(_brief(error)) from error
        del weights, cast
        _set_dtype(folder / "config.json", memory.saved_dtype)
        editable.tokenizer.save_pretrained(folder)
        (folder / "README.md").write_text(model_card(editable, edit), encoding="utf-8")
        edit.save(folder / "ffedit_edit")
        _check(editable, folder)
    return target


def _set_dtype(config: Path, dtype: torch.dtype) -> None:
    """Say the dtype that was written, which may not be the one that was computed in."""
    content = json.loads(config.read_text(encoding="utf-8"))
    content["dtype"] = str(dtype).removeprefix("torch.")
    config.write_text(json.dumps(content, indent=2, sort_keys=True) + "\n", encoding="utf-8")


@torch.no_grad()
def _check(editable: Editable, folder: Path) -> None:
    """Load `folder` anew and compare its logits with those of the edited model in memory, bit for bit."""
    ids = probe_ids(editable, min(32, editable.max_tokens)).to(editable.device)
    expected = editable.model(input_ids=ids, use_cache=False).logits
    again = AutoModelForCausalLM.from_pretrained(folder, dtype="auto", use_safetensors=True).eval()
    if again.dtype != editable.model.dtype:  # a cast takes buffers along: rotary angles are float32 in a 16-bit model
        again = again.to(editable.model.dtype)
    found = again.to(editable.device)(input_ids=ids, use_cache=False).logits
    del again
    gc.collect()
    if not torch.equal(expected, found):
        gap = float((expected - found).abs().max())
        raise CheckError(
            f"the exported checkpoint's logits differ from the model's in memory by {gap:.1e}; not exported"
        )

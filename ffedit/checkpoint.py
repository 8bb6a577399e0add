"""Models come in by name and go out as checkpoints.

Loading takes a hub id, a folder or a ready pair, reads safetensors only, and runs no remote code unless asked.
Exporting writes a folder that transformers loads anywhere: the weights after one rounding, tokenizer, generation
config, a model card that says what was edited, and the edit itself; then it is read back and compared before it
counts as done.
"""

from __future__ import annotations

import gc
import json
from pathlib import Path
from typing import Any, TypeAlias

import torch
from safetensors import SafetensorError
from transformers import AutoModelForCausalLM, AutoTokenizer, PreTrainedModel, PreTrainedTokenizerBase

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
    if Path(path).exists() and not (Path(path) / "config.json").is_file():
        raise ModelError(f"{name}: no config.json in it; a model folder or a hub id was expected")
    common: dict[str, Any] = {"revision": revision, "trust_remote_code": trust_remote_code}
    try:
        tokenizer = AutoTokenizer.from_pretrained(path, **common)
        model = AutoModelForCausalLM.from_pretrained(
            path,
            dtype=DTYPES.get(dtype, "auto"),
            device_map=_device_map(device),
            use_safetensors=True,
            **common,
        )
    except FFEditError:
        raise
    except (OSError, ValueError, KeyError, RuntimeError, ImportError, SafetensorError) as error:
        raise ModelError(f"{name}: cannot be loaded as a causal language model: {_first_line(error)}") from error
    model.eval().requires_grad_(False)
    saved = model.dtype
    if saved == torch.float16 and model.device.type == "cpu":
        model.float()
    return dissect(model, tokenizer, name, value_matrix, saved)


def _device_map(device: str) -> str | None:
    """What accelerate is asked for: everything it finds, one device, or nothing where there is only a CPU."""
    if device == "auto":
        return "auto" if torch.accelerator.is_available() else None
    try:
        torch.device(device)
    except RuntimeError as error:
        raise ModelError(f"device {device!r} is not known; give auto, cpu, or one that torch knows") from error
    return None if device == "cpu" else device


def _first_line(error: BaseException) -> str:
    lines = [line.strip() for line in str(error).splitlines() if line.strip()]
    return lines[0] if lines else type(error).__name__


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
            raise OSError(_first_line(error)) from error
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

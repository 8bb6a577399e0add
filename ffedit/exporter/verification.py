"""`python -m ffedit.exporter.verification < TASK`: check in a fresh process that the files hold what was intended.

Everything is computed again from the files on disk: the changed matrices from the base and the edit, block by block;
all others are compared with the base's bytes. If the model fits in memory, logits are compared too: those of the
folder loaded by transformers, and those of the base with the edit written into it.
"""

from __future__ import annotations

import gc
import importlib.util
import json
import sys
from collections.abc import Mapping
from dataclasses import asdict
from math import prod
from pathlib import Path
from typing import Any

import psutil
import torch
import transformers
from safetensors import safe_open
from torch import Tensor
from transformers import AutoConfig, AutoTokenizer, PreTrainedModel

from ffedit.algebra.linalg import double
from ffedit.algebra.low_rank import Update
from ffedit.editor.edit import Edit
from ffedit.errors import CheckError, FFEditError, brief
from ffedit.exporter import adapter, gguf
from ffedit.exporter.checkpoint import Plan, digest, export_plan, file_name, identity_in, rows_of
from ffedit.exporter.embedded_edits import history, plan_undo, read_originals
from ffedit.exporter.subprocess_check import Checked, Task
from ffedit.files.tensor_ranges import Stored, contents, of_expert, read_header, row_blocks
from ffedit.loading.gguf_reader import config_and_tokenizer, entry, open_gguf, unpacked_model, weight_count
from ffedit.loading.load import decoder_classes, first_that_runs
from ffedit.model.memory import Address
from ffedit.progress import silent

TOKENS = 32


def main() -> None:
    """Verify the task that is read from stdin, and write the result, or the error, to stdout as one line of JSON."""
    task = Task(**json.loads(sys.stdin.read()))
    torch.set_num_threads(task.threads)
    transformers.utils.logging.set_verbosity_error()
    transformers.utils.logging.disable_progress_bar()
    try:
        answer = asdict(CHECKS[task.kind](task))
    except FFEditError as error:
        answer = {"error": str(error)}
    sys.stdout.write(json.dumps(answer) + "\n")


def check_checkpoint(task: Task) -> Checked:
    """Check that a checkpoint is the base with the edit added, and stores the edits and the originals."""
    base, folder = Path(task.base), Path(task.folder)
    before, edits = contents(base), history(folder)
    if [edit.fingerprint() for edit in edits[:-1]] != [edit.fingerprint() for edit in history(base)]:
        raise CheckError("the exported checkpoint does not hold the edits of its base and the new one")
    plan = export_plan(before, edits[-1])
    older, originals = read_originals(base), read_originals(folder)
    for name in plan:
        was_edited = any(name in export_plan(before, edit) for edit in edits[:-1])
        expected = older.get(name) if was_edited else before[name]
        if expected is not None and (name not in originals or not originals[name].same_bytes(expected)):
            raise CheckError(f"the original of {name} was not kept")
    return compare(task, before, plan)


def check_undo(task: Task) -> Checked:
    """Check that a checkpoint is the old one with one edit undone, and stores the remaining edits."""
    undoing = plan_undo(Path(task.base), task.edit)
    if [edit.fingerprint() for edit in history(task.folder)] != [edit.fingerprint() for edit in undoing.left]:
        raise CheckError("the checkpoint does not hold the edits that stay")
    return compare(task, undoing.tensors, undoing.plan)


def compare(task: Task, before: Mapping[str, Stored], plan: Plan) -> Checked:
    """Check that every tensor of the folder is as in the plan, or unchanged where the plan does not have it.

    Config and tokenizer can be loaded; if the model fits in memory, logits agree bit for bit.
    """
    after = contents(Path(task.folder))
    if unshared := sorted(before.keys() ^ after.keys()):
        raise CheckError(f"{unshared[0]} is in only one of the base and the export")
    for name, old in before.items():
        if name not in plan and not old.same_bytes(after[name]):
            raise CheckError(f"{name} is not the base's, and no edit changes it")
        if name in plan and not plan[name].gives(after[name]):
            raise CheckError(f"{name} is not the base's with the edit added")
    opens(task)
    if not fits(before):
        return Checked(len(before), False)
    expected = base_and_edited(task, plan)[1]
    gc.collect()  # the base, before the export is loaded
    _check_logits(expected, logits_of(load(task.folder, task)))
    return Checked(len(before), True)


def opens(task: Task) -> None:
    """Check that config and tokenizer can be loaded."""
    for kind in (AutoConfig, AutoTokenizer):
        try:
            kind.from_pretrained(task.folder, trust_remote_code=task.trust_remote_code)
        except Exception as error:  # a damaged folder may raise anything
            raise CheckError(f"{kind.__name__} cannot read what was written ({brief(error)})") from error


# Logits -------------------------------------------------------------------------------------------


def fits(tensors: Mapping[str, Stored]) -> bool:
    """Return True if the model of these weights fits in memory (`has_room`); float16 is computed in float32."""
    return has_room(sum(prod(t.shape) * 4 if t.kind == "F16" else t.size for t in tensors.values()))


def has_room(size: int) -> bool:
    """Return True if weights of `size` bytes take less than half of the free memory."""
    return bool(size < psutil.virtual_memory().available / 2)


def load(folder: str, task: Task, dtype: torch.dtype | None = None) -> PreTrainedModel:
    """Load a model with transformers as users do, in `dtype`.

    By default in the dtype of its files, but float16 is computed in float32 on a CPU.
    """
    config = AutoConfig.from_pretrained(folder, trust_remote_code=task.trust_remote_code)
    options: dict[str, Any] = {"use_safetensors": True, "trust_remote_code": task.trust_remote_code}
    model: PreTrainedModel = first_that_runs(decoder_classes(config), folder, dtype=dtype or "auto", **options)
    model.eval().requires_grad_(False)
    return model.float() if dtype is None and model.dtype == torch.float16 else model


@torch.no_grad()
def logits_of(model: Any, ids: Tensor | None = None) -> Tensor:
    """Compute logits [1, n, vocabulary] on a few fixed ids."""
    if ids is None:
        text = model.config.get_text_config()
        count = min(TOKENS, int(getattr(text, "max_position_embeddings", None) or TOKENS))
        ids = (torch.arange(count) * 7919 + 11)[None, :] % int(text.vocab_size)
    logits: Tensor = model(input_ids=ids, use_cache=False).logits
    return logits


@torch.no_grad()
def base_and_edited(task: Task, plan: Plan) -> tuple[Any, Tensor]:
    """Load the base; return it unchanged, and the logits that it has with a plan written into it."""
    model: Any = load(task.base, task)
    weights = dict(model.named_parameters())
    unedited: dict[str, Tensor] = {}
    for name, rewrite in plan.items():
        parameter, expert = of_expert(rewrite.parameter)
        path = file_name(weights, parameter)
        if path is None:
            raise CheckError(f"{name} is not a parameter of the loaded model")
        unedited.setdefault(path, weights[path].clone())
        (weights[path] if expert is None else weights[path][expert]).copy_(torch.cat(list(rewrite.blocks())))
    expected = logits_of(model)
    model.load_state_dict(unedited, strict=False)
    return model, expected


def _check_logits(expected: Tensor, logits: Tensor, rounded_otherwise: Plan | None = None) -> None:
    """Check that logits are equal, or nearly so where W + Δ of a plan is `rounded_otherwise`, at another step."""
    eps = [torch.finfo(rewrite.source.dtype).eps for rewrite in (rounded_otherwise or {}).values()]
    tolerance = 0.0 if rounded_otherwise is None else max([1e-4, *(6.5 * step for step in eps)])  # of the largest logit
    gap = float((double(expected) - double(logits)).abs().max())
    if not gap <= tolerance * float(expected.abs().max()):
        raise CheckError(f"the logits of what was written differ from those of the edited model by {gap:.1e}")


def check_memory(task: Task) -> Checked:
    """Check a model written from memory: its weights by their hashes, and if it fits, its logits bit for bit."""
    with safe_open(task.base, framework="pt") as file:
        metadata, ids, expected = file.metadata(), file.get_tensor("ids"), file.get_tensor("logits")
    opens(task)
    stored = contents(Path(task.folder))
    if not fits(stored):
        _check_files(stored, json.loads(metadata["in_files"]), getattr(torch, metadata["saved"]))
        return Checked(len(stored), False)
    hashes = json.loads(metadata["hashes"])
    # Casting after loading would cast buffers too, but rotary angles are float32 in a 16-bit model.
    model = load(task.folder, task, getattr(torch, metadata["dtype"]))
    weights = model.state_dict()
    shared = hashes.keys() & weights.keys()
    for name in shared:
        _check_hash(name, weights[name], hashes[name], getattr(torch, metadata["saved"]))
    model.to(metadata["device"])
    _check_logits(expected, logits_of(model, ids.to(metadata["device"])).cpu())
    return Checked(len(shared), True)


def _check_files(stored: Mapping[str, Stored], hashes: Mapping[str, str], dtype: torch.dtype) -> None:
    """Check that files hold every weight of a model and nothing else, by `hashes` under their names in files."""
    if unknown := sorted(stored.keys() - hashes.keys()):
        raise CheckError(f"{unknown[0]} was written, which the model in memory does not have")
    written = {hashes[name] for name in stored}
    if lost := sorted(name for name in hashes.keys() - stored.keys() if hashes[name] not in written):  # tied ones are
        raise CheckError(f"{lost[0]} was not written")
    for name, tensor in stored.items():
        path, expert = of_expert(name)
        with safe_open(tensor.file, framework="pt") as file:
            weight = file.get_tensor(path) if expert is None else file.get_slice(path)[expert]
        _check_hash(name, weight, hashes[name], dtype)


def _check_hash(name: str, weight: Tensor, expected: str, dtype: torch.dtype) -> None:
    if digest(weight, dtype) != expected:
        raise CheckError(f"{name} is not what is in memory")


# Adapters -----------------------------------------------------------------------------------------


def check_adapter(task: Task) -> Checked:
    """Check an adapter: B A = Δ, and if PEFT is installed and the model fits, the same logits as the edited model."""
    (edit,) = history(task.folder)
    stored = read_header(Path(task.folder) / adapter.WEIGHTS)
    for address, update in edit.updates.items():
        _check_product(str(address), adapter.read_factors(stored, identity_in(edit, address)), update)
    if importlib.util.find_spec("peft") is None:
        return Checked(len(edit.updates), False, peft=False)
    before = contents(Path(task.base)) if task.base else {}
    if not before or not fits(before):  # the base is not on disk, or does not fit in memory
        return Checked(len(edit.updates), False, peft=None)
    import peft

    plan = export_plan(before, edit)
    model, expected = base_and_edited(task, plan)
    try:
        logits = logits_of(peft.PeftModel.from_pretrained(model, task.folder).eval())
    except Exception as error:  # PEFT may fail on a model in any way
        raise CheckError(
            f"PEFT cannot put this adapter on {type(model).__name__} ({brief(error)}); export a checkpoint (--format)"
        ) from error
    _check_logits(expected, logits, plan)
    return Checked(len(edit.updates), True, peft=True)


def _check_product(name: str, factors: adapter.Factors, update: Update) -> None:
    """Check that the product of an adapter's factors is Δ."""
    left, right = factors
    blocks = ((rows_of(update, i, j, False), left[i:j] @ right) for i, j in row_blocks(*update.shape))
    gap = sum(float((delta - product).square().sum()) for delta, product in blocks) ** 0.5
    if not gap <= 1e-5 * update.norm():
        raise CheckError(f"the adapter's product for {name} differs from the edit's by {gap:.1e}")


# GGUF ---------------------------------------------------------------------------------------------


def check_gguf(task: Task) -> Checked:
    """Check a GGUF file: entries and tensors are the base's but for what the edit changes, and transformers reads it.

    If the model fits in memory, the logits of the file are compared with those of the base with the packed matrices.
    """
    file, source = Path(task.folder), Path(task.base)
    (edit,) = history(file.parent)
    packed = gguf.pack(source, edit)
    changed = {matrix.name: matrix for matrix in packed.values()}
    before, after = (open_gguf(path) for path in (source, file))
    for name in before.fields.keys() - {gguf.ENTRY, "GGUF.kv_count"}:
        if after.get_field(name) is None or entry(before, name) != entry(after, name):
            raise CheckError(f"the entry {name} is not the base's")
    if [tensor.name for tensor in before.tensors] != [tensor.name for tensor in after.tensors]:
        raise CheckError("the tensors of the file are not those of the base")
    for old, new in zip(before.tensors, after.tensors, strict=True):
        kind, data = old.tensor_type.name, old.data
        if old.name in changed:
            kind, data = changed[old.name].kind, changed[old.name].data
        if new.tensor_type.name != kind or new.data.shape != data.shape or not (new.data == data).all():
            raise CheckError(f"{old.name} is not what was to be written")
    dtype = torch.bfloat16 if edit.computed_in == torch.bfloat16 else torch.float32
    if not has_room(dtype.itemsize * weight_count(before)):
        return Checked(len(after.tensors), False)
    expected = _packed_logits(_model_of(source, before, dtype), edit, packed)
    gc.collect()  # the base, before the export is loaded
    _check_logits(expected, logits_of(_model_of(file, after, dtype)))
    return Checked(len(after.tensors), True)


def _model_of(file: Path, reader: Any, dtype: torch.dtype) -> Any:
    config, _ = config_and_tokenizer(str(file), file, reader, file)
    return unpacked_model(str(file), file, reader, file, config, dtype, silent).eval()


@torch.no_grad()
def _packed_logits(model: Any, edit: Edit, packed: Mapping[Address, gguf.Packed]) -> Tensor:
    """Write packed matrices into their base, and return its logits."""
    weights = dict(model.named_parameters())
    for at, matrix in packed.items():
        identity = identity_in(edit, at)
        weights[identity["parameter"]].copy_(matrix.weight.T if identity["transposed"] else matrix.weight)
    return logits_of(model)


def check_gguf_adapter(task: Task) -> Checked:
    """Check that a LoRA adapter in a GGUF file adds Δ to each matrix that the edit changes, and to no other."""
    file = Path(task.folder)
    (edit,) = history(file.parent)
    added, expected = gguf.read_adapter(file), {gguf.tensor_name(at): delta for at, delta in edit.updates.items()}
    if added.keys() != expected.keys():
        raise CheckError("the adapter is not of the matrices that the edit changes")
    for name, update in expected.items():
        _check_product(name, added[name], update)
    return Checked(len(added), False)


CHECKS = {
    "gguf": check_gguf,
    "gguf adapter": check_gguf_adapter,
    "checkpoint": check_checkpoint,
    "undo": check_undo,
    "adapter": check_adapter,
    "memory": check_memory,
}

if __name__ == "__main__":
    main()

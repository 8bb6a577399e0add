"""Run the published ROME code itself, imported from a checkout of it, on a model that it was not written for.

    git clone https://github.com/kmeng01/rome DIR

This repository has no copy of it: `execute_rome` of the checkout computes each update, with the settings of its own
hparams/ROME/gpt2-xl.json (Meng et al. 2022, arXiv 2202.05262). It was written for GPT-2 and GPT-J on a GPU, for
transformers 4.15 and PyTorch 1.10. It needs PyYAML, matplotlib and datasets. These parts are replaced at run time, only
while it is imported or runs:

- The current folder is the checkout while it is imported: `util.globals` reads globals.yml there.
- Hyper-parameters: the layer, the names of the model's modules, the layer of the loss, which is the last one, and
  Adam's rate, if another one is asked for.
- "cuda": the model's device is used wherever the code asks for it (`OnDevice`).
- `config.n_embd`: the width of the model, where its configuration has another name for it.
- `compute_u.get_inv_cov`, which downloads statistics of Wikipedia: the inverse of ffedit's C for the same layer, formed
  in float64 and cast to float32.
- `rome_main.CONTEXT_TEMPLATES_CACHE`, which the code fills with "{}" and "TEXT. {}" of texts that it samples: the same
  with the prefixes of `rivals`, 10 of 5 and 10 of 10 tokens (the code counts the token that begins a text, too). The
  code's own loop runs, but gives an attention mask for new tokens alone, with which transformers 5 lets them see
  nothing before them: its texts are noise.
- The tokenizer pads on the right, with its end-of-text token if it has no padding token, as in the code's own
  experiments.
- Its output is not shown; its losses are read from it.

The code counts the tokens of a prompt's pieces, and adds δ to the output of the module that holds the value matrix. A
tokenizer that puts a token in front of a text, a prompt whose subject neither begins it nor follows a blank, and
a value matrix in no feed-forward module are refused.
"""

import importlib
import io
import os
import re
import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, redirect_stdout
from dataclasses import dataclass, replace
from pathlib import Path
from types import ModuleType
from typing import Any

import torch
from rivals import RankOne, matrix_of
from torch import Tensor
from torch.overrides import TorchFunctionMode

from ffedit import Editable, Fact, FFEditError, KeyValueMemory
from ffedit.model.hooks import frozen

NUMBERS = Path("hparams", "ROME", "gpt2-xl.json")
ABSENT = object()


@dataclass(frozen=True)
class Checkout:
    """Parts of the published code that are called or replaced.

    Attributes:
        main: its module `rome.rome_main`.
        compute_u: its module `rome.compute_u`.
        numbers: its `ROMEHyperParams` for GPT-2 XL.
    """

    main: ModuleType
    compute_u: ModuleType
    numbers: Any


def open_checkout(folder: Path) -> Checkout:
    """Import the published code from a checkout of kmeng01/rome.

    Raises:
        FFEditError: the folder holds something else, or a package that the code needs is not installed.
    """
    root, here = folder.resolve(), Path.cwd()
    if not (root / "rome" / "rome_main.py").is_file() or not (root / NUMBERS).is_file():
        raise FFEditError(f"{folder}: rome/rome_main.py or {NUMBERS} is not there; give a checkout of kmeng01/rome")
    sys.path.insert(0, str(root))
    os.chdir(root)
    try:
        main, compute_u = (importlib.import_module(f"rome.{name}") for name in ("rome_main", "compute_u"))
    except ModuleNotFoundError as error:
        raise FFEditError(f"{folder}: the published code needs {error.name}, which is not installed") from error
    finally:
        os.chdir(here)
        sys.path.remove(str(root))
    return Checkout(main, compute_u, main.ROMEHyperParams.from_json(root / NUMBERS))


def published_code(
    editable: Editable,
    fact: Fact,
    layer: int,
    C_inverse: Tensor,
    prefixes: Sequence[str],
    checkout: Checkout,
    rate: float = 0.5,
) -> RankOne:
    """Let the published code compute the update that writes `fact`.

    In the code, `left` is the right vector and `right`, of length 1, the left one; losses have three decimals.

    Args:
        editable: the model, in float32; the code changes its weights and puts them back.
        fact: the fact to write.
        layer: the layer to edit.
        C_inverse: inverse of the second moment of the layer's keys over ordinary text, [d_ff, d_ff], float32.
        prefixes: texts before the prompt, by `rivals.sampled_prefixes(editable, PUBLISHED)`; the bare prompt comes on
            top.
        checkout: the code.
        rate: Adam's rate; 0.5 for GPT-2 XL.

    Raises:
        FFEditError: the code would split this prompt wrongly, or with this tokenizer, or it cannot edit the layer.
    """
    if editable.start_tokens:
        raise FFEditError(
            f"the tokenizer of {editable.name} puts {len(editable.start_tokens)} tokens in front of a text; the "
            "published code counts the tokens of pieces: take a model whose tokenizer puts none there"
        )
    memory, request, printed = matrix_of(editable, layer), request_of(fact), io.StringIO()
    numbers = numbers_for(memory, editable, checkout, rate)
    with frozen(editable.model), substituted(editable, checkout, C_inverse, prefixes), redirect_stdout(printed):
        deltas = checkout.main.execute_rome(editable.model, editable.tokenizer, request, numbers)
    ((right, left),) = deltas.values()
    losses = tuple(float(loss) for loss in re.findall(r"^loss (\S+) =", printed.getvalue(), re.MULTILINE))
    return RankOne(memory.address, left.double(), right.double(), losses)


def numbers_for(memory: KeyValueMemory, editable: Editable, checkout: Checkout, rate: float) -> Any:
    """Return the published hyper-parameters of GPT-2 XL with this layer, its module names and Adam's rate."""
    block, mlp, matrix = module_templates(memory, editable)
    return replace(
        checkout.numbers,
        layers=[memory.address.layer],
        v_lr=rate,
        v_loss_layer=len(editable.layers) - 1,
        layer_module_tmp=block,
        mlp_module_tmp=mlp,
        rewrite_module_tmp=matrix,
    )


def module_templates(memory: KeyValueMemory, editable: Editable) -> tuple[str, str, str]:
    """Return the paths of a layer, of its feed-forward module and its value matrix, with "{}" for the layer's number.

    Raises:
        FFEditError: the value matrix is in the layer itself, not in a feed-forward module.
    """
    block = next(name for name, module in editable.model.named_modules() if module is memory.block)
    layer = block.removesuffix(str(memory.address.layer)) + "{}"
    matrix = layer + memory.name.removeprefix(block)
    if (mlp := matrix.rpartition(".")[0]) == layer:
        raise FFEditError(f"{memory.name} of {editable.name} is in no feed-forward module, as the published code needs")
    return layer, mlp, matrix


def request_of(fact: Fact) -> dict[str, Any]:
    """Return the fact as the published code takes it.

    Raises:
        FFEditError: the code would find the subject elsewhere.
    """
    start, end = fact.span
    before, after = fact.text[:start], fact.text[end:]
    if before[-1:].strip() or {"{", "}"} & {*before, *after}:
        raise FFEditError(
            f"{fact.text!r}: the published code finds a subject that begins its prompt or follows a blank, in a "
            "prompt without braces; leave this fact out"
        )
    return {"prompt": f"{before}{{}}{after}", "subject": fact.subject, "target_new": {"str": fact.new_object}}


@contextmanager
def substituted(editable: Editable, checkout: Checkout, C_inverse: Tensor, prefixes: Sequence[str]) -> Iterator[None]:
    """In the block, the replacements that the module's docstring lists are in effect."""
    tokenizer, config = editable.tokenizer, editable.model.config
    pad = tokenizer.pad_token or tokenizer.eos_token
    templates = ["{}", *(f"{prefix}. {{}}" for prefix in prefixes)]
    with (
        replaced(config, n_embd=editable.d_model),
        replaced(tokenizer, padding_side="right", pad_token=pad),
        replaced(checkout.compute_u, get_inv_cov=lambda *_: C_inverse),
        replaced(checkout.main, CONTEXT_TEMPLATES_CACHE=templates),
        OnDevice(editable.device),
    ):
        yield


@contextmanager
def replaced(holder: Any, **values: Any) -> Iterator[None]:
    """In the block, `holder` has these attributes; afterwards it has those from before."""
    before = {name: getattr(holder, name, ABSENT) for name in values}
    try:
        for name, value in values.items():
            setattr(holder, name, value)
        yield
    finally:
        for name, value in before.items():
            if value is ABSENT:
                delattr(holder, name)
            else:
                setattr(holder, name, value)


class OnDevice(TorchFunctionMode):
    """In the block, torch functions use `device` where their arguments name "cuda"."""

    def __init__(self, device: torch.device) -> None:
        super().__init__()
        self.device = device

    def __torch_function__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        def here(value: Any) -> Any:
            return self.device if isinstance(value, str) and value == "cuda" else value

        return function(*map(here, args), **{name: here(value) for name, value in (kwargs or {}).items()})

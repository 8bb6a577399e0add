"""The files of an edit's folder, read and checked without torch; and the recipe that makes the edit again.

Two hashes protect them. The *fingerprint* is the edit's identity: factors, keys, values and facts. The *checksum*
covers the whole manifest, provenance included: an edit that was scored has the same fingerprint and another checksum.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np
import yaml
from safetensors import SafetensorError, deserialize

from ffedit.editor.config import dotted
from ffedit.errors import EditError, FactError
from ffedit.facts.fact import Fact

if TYPE_CHECKING:
    from ffedit.editor.edit import Edit

FORMAT = 2
TENSORS, MANIFEST = "edit.safetensors", "manifest.json"
EDITS = "ffedit_edits"  # in a checkpoint: the folder of the edits that are in its weights
DTYPES = {"F64": "float64", "F32": "float32", "F16": "float16", "BF16": "bfloat16"}


class Numbers(NamedTuple):
    """A tensor of an edit: the name of its dtype, its shape, and its bytes."""

    dtype: str
    shape: list[int]
    content: bytes

    def array(self) -> np.ndarray[Any, np.dtype[np.float64]]:
        """Return the numbers in float64."""
        if self.dtype == "bfloat16":  # the upper half of a float32, which numpy has not
            upper = np.frombuffer(self.content, np.uint16).astype(np.uint32) << 16
            return upper.view(np.float32).astype(np.float64).reshape(self.shape)
        return np.frombuffer(self.content, self.dtype).astype(np.float64).reshape(self.shape)


class Described:
    """What an edit says of itself, in memory and on disk."""

    facts: tuple[Fact, ...]
    provenance: Mapping[str, Any]

    @property
    def base(self) -> str:
        """Fingerprint of the model that the edit was computed on."""
        return str(self.provenance["base"])

    @property
    def in_chat(self) -> bool:
        """True if all of the edit was computed inside the model's chat template."""
        parts = self.provenance.get("parts", [self.provenance])
        return all(part.get("chat", False) for part in parts)

    @property
    def says(self) -> list[tuple[str | None, str | None]]:
        """By fact, what the model said to its prompt without the edit and with it; None where it was not measured."""
        said = self.provenance.get("says", {})
        before, after = (said.get(side) or [None] * len(self.facts) for side in ("before", "after"))
        return list(zip(before, after, strict=True))


@dataclass(frozen=True)
class SavedEdit(Described):
    """An edit on disk, without its tensors.

    `numbers` are the tensors by name, such as "4/left" or "4.7/keys" for expert 7 of layer 4; the rest is as of `Edit`.
    """

    facts: tuple[Fact, ...]
    provenance: Mapping[str, Any]
    numbers: Mapping[str, Numbers]

    @classmethod
    def read(cls, folder: Path) -> SavedEdit:
        """Read an edit; EditError where there is none, or it is damaged, changed by hand, or of another format."""
        check_edit(folder)
        try:
            manifest = json.loads((folder / MANIFEST).read_text(encoding="utf-8"))
            if manifest["format"] != FORMAT:
                raise EditError(f"{folder}: an edit of format {manifest['format']}; this version reads {FORMAT}")
            raw = dict(deserialize((folder / TENSORS).read_bytes()))  # type: ignore[no-untyped-call]
            numbers = {name: Numbers(DTYPES[at["dtype"]], at["shape"], bytes(at["data"])) for name, at in raw.items()}
            edit = cls(tuple(Fact.from_dict(fact) for fact in manifest["facts"]), manifest["provenance"], numbers)
            if missing := [name for name in edit.expected() if name not in numbers]:
                raise KeyError(missing[0])
            _ = edit.base  # the provenance has one
            same_numbers = manifest["fingerprint"] == edit.fingerprint()
            same_manifest = manifest.pop("checksum") == checksum(manifest)
        except (OSError, SafetensorError, KeyError, TypeError, ValueError, AttributeError, FactError) as error:
            raise EditError(f"{folder}: the edit is damaged or foreign ({error}); make it anew") from error
        if not same_numbers:
            raise EditError(f"{folder}: numbers or facts were changed after the edit was saved; make it anew")
        if not same_manifest:
            raise EditError(f"{folder}: {MANIFEST} was changed after the edit was saved; make the edit anew")
        return edit

    def fingerprint(self) -> str:
        """Return the edit's identity (`digest`)."""
        return digest(self.facts, self.numbers.items())

    @property
    def addresses(self) -> list[str]:
        """Layer, or layer and expert, of each memory that changes, in ascending order."""
        names = {name.partition("/")[0] for name in self.numbers}
        return sorted(names, key=lambda address: [int(number) for number in address.split(".")])

    def expected(self) -> Iterator[str]:
        """Yield the names of all tensors that the changes consist of."""
        for address in self.addresses:
            factors = ("matrix",) if f"{address}/matrix" in self.numbers else ("left", "right")
            yield from (f"{address}/{name}" for name in (*factors, "keys", "values"))

    @property
    def layers(self) -> list[int]:
        """The layers that change."""
        return sorted({int(address.partition(".")[0]) for address in self.addresses})

    @property
    def rank(self) -> int:
        """Rank of the largest update, as of `Edit`."""
        left = [entry.shape[1] for name, entry in self.numbers.items() if name.endswith("/left")]
        dense = [min(entry.shape) for name, entry in self.numbers.items() if name.endswith("/matrix")]
        return max(left + dense, default=0)

    def norms(self) -> dict[str, float]:
        """Compute ‖Δ‖ (Frobenius) by address."""
        norms = {}
        for address in self.addresses:
            if (matrix := self.numbers.get(f"{address}/matrix")) is not None:
                norms[address] = float(np.linalg.norm(matrix.array()))
            else:
                left, right = (self.numbers[f"{address}/{side}"].array() for side in ("left", "right"))
                norms[address] = float(np.sqrt(max(0.0, ((left.T @ left) * (right @ right.T)).sum())))
        return norms


def check_edit(folder: Path) -> None:
    """Refuse a folder without a manifest, which holds no edit (EditError); `SavedEdit.read` reads the files."""
    if not (folder / MANIFEST).is_file():
        raise EditError(f"{folder}: holds no edit ({MANIFEST} and {TENSORS} were expected)")


def embedded(checkpoint: Path) -> list[Path]:
    """Return the folders of the edits in the weights of a checkpoint, oldest first; EditError where one is missing."""
    inside = checkpoint / EDITS
    names = sorted((path.name for path in inside.glob("*") if path.is_dir()), key=lambda name: (len(name), name))
    if names != [f"{i:03}" for i in range(len(names))]:
        raise EditError(f"{inside}: edits 000 to {len(names) - 1:03} were expected, found {', '.join(names)}")
    return [inside / name for name in names]


def digest(facts: Sequence[Fact], numbers: Iterable[tuple[str, Numbers]]) -> str:
    """Hash facts, changes as they are factored, keys and values to 16 hexadecimal digits."""
    hashed = hashlib.sha256(json.dumps([fact.to_dict() for fact in facts]).encode())
    for name, tensor in sorted(numbers):
        hashed.update(f"{name}{list(tensor.shape)}torch.{tensor.dtype}".encode())
        hashed.update(tensor.content)
    return hashed.hexdigest()[:16]


def checksum(manifest: Mapping[str, Any]) -> str:
    """Hash the manifest as it will be read back: JSON has no tuples, and only strings as keys."""
    plain = json.loads(json.dumps(manifest))
    return hashlib.sha256(json.dumps(plain, sort_keys=True).encode()).hexdigest()[:16]


def recipe_of(edit: Edit | SavedEdit) -> dict[str, Any]:
    """Return the options of `ffedit apply` that make an edit again, whatever the defaults are; EditError for a sum."""
    about, layers = edit.provenance, edit.layers
    if "config" not in about:
        raise EditError(f"an edit by {about.get('method')!r} has no recipe: `ffedit apply` does not make such")
    if layers != list(range(layers[0], layers[-1] + 1)):
        raise EditError(f"an edit of layers {layers} has no recipe: `ffedit apply` writes to layers side by side")
    numbers = json.loads(json.dumps(dotted(about["config"])))  # YAML has no tuples
    return {
        "model": about["model"],
        "dtype": about["computed_in"],
        **({"chat": True} if edit.in_chat else {}),
        "method": about["method"],
        "layers": layers[-1],
        "spread": len(layers),
        "fact_token": numbers.pop("key.fact_token"),
        "seed": numbers.pop("seed"),
        **about.get("inputs", {}),
        "set": numbers,
        "facts": [fact.to_dict() for fact in edit.facts],
    }


def to_yaml(recipe: Mapping[str, Any], edit: Edit | SavedEdit) -> str:
    """Write a recipe as YAML, headed by what it makes."""
    versions = " ".join(f"{name} {version}" for name, version in edit.provenance.get("versions", {}).items())
    return (
        f"# Makes edit {edit.fingerprint()} of base {edit.base} again: ffedit run FILE\n# {versions}\n{yaml_of(recipe)}"
    )


def yaml_of(recipe: Mapping[str, Any]) -> str:
    """Write a recipe as YAML without a heading."""
    return str(yaml.safe_dump(recipe, sort_keys=False, allow_unicode=True, width=110))

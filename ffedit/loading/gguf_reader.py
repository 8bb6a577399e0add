"""Read a GGUF file: check its header, and let transformers make a model and a tokenizer of it.

A GGUF file has no checksum, and a damaged one may fail anywhere in transformers, with any error; here each failure
becomes one line. Threads unpack the tensors ahead of transformers, which takes them in the file's order.
"""

from __future__ import annotations

import os
import re
import shutil
import struct
from collections import Counter, deque
from collections.abc import Callable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import contextmanager
from copy import copy
from functools import lru_cache, partial
from itertools import islice
from pathlib import Path
from typing import TYPE_CHECKING, Any
from unittest.mock import patch

import lazy_loader
import numpy as np
import torch
import transformers
from transformers import AutoConfig, AutoModelForCausalLM, AutoTokenizer, modeling_gguf_pytorch_utils

from ffedit.errors import ModelError
from ffedit.files.placing import beside
from ffedit.files.shards import gguf_parts, is_pointer
from ffedit.loading.reading import check_declared, check_loaded, quiet, readable
from ffedit.progress import Progress

if TYPE_CHECKING:
    import gguf as gguf
else:  # an extra, which is imported when a file is read
    gguf = lazy_loader.load("gguf")

VERSIONS = (2, 3)
UNPACKING = "unpacking, million weights"  # a stage of progress
PIECE, PIECES = 2**18, 64  # weights that are unpacked at once, and pieces in one task of a thread
# Tensors that are unpacked while another is put into the model, and threads for that: more would wait for Python.
AHEAD, THREADS = 2, 2


def checked(name: str, file: Path) -> Any:
    """Return a file's `gguf.GGUFReader`; refuse a part of a model, an encoder, and types that gguf cannot unpack."""
    reader = open_gguf(file)
    if not reader.tensors:
        raise ModelError(f"{file}: holds no weights (only a vocabulary?); a GGUF file of a model was expected")
    if (parts := entry(reader, "split.count", 1)) > len(gguf_parts(file)):
        raise ModelError(
            f"{name}: is one of {parts} parts, and the others are missing; name them NAME-00001-of-{parts:05}.gguf "
            "and so on, or join them (llama-gguf-split --merge)"
        )
    architecture = _architecture(reader)
    causal = entry(reader, f"{architecture}.attention.causal", True)
    if causal is False or "bert" in architecture or architecture == "t5encoder":
        raise ModelError(f"{name}: {architecture} is an encoder; a causal decoder is needed")
    if "tokenizer.ggml.tokens" not in reader.fields:
        raise ModelError(f"{name}: no tokenizer in it (tokenizer.ggml.tokens was expected)")
    for kind in kinds(reader):
        try:
            gguf.dequantize(torch.zeros(1, gguf.GGML_QUANT_SIZES[kind][1], dtype=torch.uint8).numpy(), kind)
        except NotImplementedError as error:
            raise ModelError(
                f"{name}: quantised as {kind.name}, which gguf does not unpack; use a file in another quantisation"
            ) from error
    return reader


def open_gguf(file: Path) -> Any:
    """Return a reader that checks every length of a GGUF file (it has no checksum); ModelError for a damaged one.

    `file` is the first part of a model in several, which holds the metadata; the reader has the tensors of all.
    """
    first, *others = (_open_part(part) for part in gguf_parts(file))
    for other in others:
        first.tensors.extend(other.tensors)
    return first


def _open_part(file: Path) -> Any:
    """Return the reader of one file."""

    class Strict(gguf.GGUFReader):
        """Reader that fails at the end of the file, where gguf's own goes on with empty arrays.

        It reads an array without a call for each entry: a tokenizer's arrays have hundreds of thousands.
        """

        def __setattr__(self, name: str, value: Any) -> None:
            # A slice of a memory map takes ten times as long as one of the array on it.
            super().__setattr__(name, value.view(np.ndarray) if isinstance(value, np.memmap) else value)

        def _get(self, offset: int, dtype: Any, count: int = 1, *order: Any, **options: Any) -> Any:
            if offset + np.dtype(dtype).itemsize * int(count) > len(self.data):
                raise EOFError
            return super()._get(offset, dtype, count, *order, **options)

        def _get_field_parts(self, orig_offs: int, raw_type: int) -> Any:
            if raw_type != gguf.GGUFValueType.ARRAY:
                return super()._get_field_parts(orig_offs, raw_type)
            kind, count = self._get(orig_offs, np.uint32), self._get(orig_offs + 4, np.uint64)
            if count[0] > len(self.data):
                raise EOFError
            first, item_type = orig_offs + 12, gguf.GGUFValueType(int(kind[0]))
            types = [gguf.GGUFValueType.ARRAY, *([item_type] if count[0] else [])]
            if item_type == gguf.GGUFValueType.STRING:
                strings, end = self._strings(first, int(count[0]))
                return end - orig_offs, [kind, count, *strings], [*range(3, 3 + len(strings), 2)], types
            if (scalar := self.gguf_scalar_to_np.get(item_type)) is None:
                return super()._get_field_parts(orig_offs, raw_type)
            numbers = self._get(first, scalar, int(count[0]))
            rows = list(numbers[:, None])
            return 12 + numbers.nbytes, [kind, count, *rows], [*range(2, 2 + len(rows))], types

        def _strings(self, start: int, count: int) -> tuple[list[Any], int]:
            """Return the length and the bytes of each of `count` strings from byte `start` on, and where they end."""
            length = struct.Struct("<Q")
            parts: list[Any] = []
            data: Any = self.data
            for _ in range(count):
                if start + 8 > len(data):
                    raise EOFError
                end = start + 8 + length.unpack_from(data, start)[0]
                if end > len(data):
                    raise EOFError
                parts += data[start : start + 8], data[start + 8 : end]
                start = end
            return parts, start

    if is_pointer(file):
        raise ModelError(f"{file}: a Git LFS pointer, not the file itself; fetch the file")
    with file.open("rb") as opened:
        magic, version = opened.read(4), opened.read(4)
    if magic != b"GGUF":
        raise ModelError(f"{file}: no GGUF file (it begins with {magic!r}; b'GGUF' was expected)")
    if len(version) == 4 and (number := int.from_bytes(version, "little")) not in VERSIONS:
        supported = " or ".join(map(str, VERSIONS))
        raise ModelError(f"{file}: GGUF version {number} is not known; version {supported} was expected")
    try:
        return Strict(file)
    except Exception as error:  # a damaged header may fail anywhere in the reader, with any error
        if "GGMLQuantizationType" in str(error):
            raise ModelError(
                f"{file}: a weight is of a GGML type that gguf does not know ({error}); update it"
            ) from error
        size = f"{file.stat().st_size:,} bytes"
        raise ModelError(f"{file}: damaged, or cut off ({size} are not all of it); fetch it anew") from error


def entry(reader: Any, name: str, default: Any = None) -> Any:
    """Return the value of an entry in a file's header; ModelError for text that is not UTF-8."""
    field = reader.get_field(name)
    try:
        return default if field is None else field.contents()
    except UnicodeDecodeError as error:
        raise ModelError(f"GGUF file: its entry {name} is damaged ({error}); fetch it anew") from error


def _architecture(reader: Any) -> str:
    """Return the architecture of the model, as llama.cpp calls it."""
    return str(entry(reader, "general.architecture", "unknown"))


def kinds(reader: Any) -> list[Any]:
    """Return the GGML types of the weights, the type of most weights first."""
    counts: Counter[Any] = Counter()
    for tensor in reader.tensors:
        counts[tensor.tensor_type] += tensor.n_elements
    return [kind for kind, _ in counts.most_common()]


def weight_count(reader: Any) -> int:
    """Return the number of weights in a GGUF file."""
    return sum(int(tensor.n_elements) for tensor in reader.tensors)


def config_and_tokenizer(name: str, file: Path, reader: Any, near: Path) -> tuple[Any, Any]:
    """Read a GGUF file's config, as of a model that was never quantised, and its tokenizer.

    A temporary folder is made beside the path `near`. Raises ModelError if transformers cannot read the file.
    """
    version = f"transformers {transformers.__version__}"
    config: Any
    with _alone(file, reader, near) as folder:
        advice = "; give the model as a Hugging Face folder"
        with readable(f"{name}: {version} does not read {_architecture(reader)} from a GGUF file", advice):
            config = AutoConfig.from_pretrained(folder, gguf_file="model.gguf")
        if config.is_encoder_decoder:
            raise ModelError(f"{name}: {config.model_type} is an encoder with a decoder; a causal decoder is needed")
        size = weight_count(reader)
        config.architectures = [check_declared(name, AutoModelForCausalLM, config, size, len(reader.tensors), "file")]
        with readable(f"{name}: the tokenizer cannot be read"):
            tokenizer = AutoTokenizer.from_pretrained(folder, gguf_file="model.gguf")
        _check_words(name, tokenizer)
    config.dtype = torch.float32
    return config, tokenizer


def _check_words(name: str, tokenizer: Any) -> None:
    """Refuse a tokenizer that splits words of its own vocabulary, as transformers 5.17 reads from Gemma 3's files."""
    vocabulary = tokenizer.get_vocab()
    words = ((token, number) for token, number in vocabulary.items() if re.fullmatch("[▁Ġ][A-Za-z]{3,}", token))
    unsplit = [
        tokenizer.encode(f"a {token[1:]}", add_special_tokens=False)[-1:] == [number]
        for token, number in islice(words, 100)
    ]
    if sum(unsplit) < len(unsplit) / 2:
        raise ModelError(
            f"{name}: transformers {transformers.__version__} misreads this file's tokenizer (it splits words that "
            "are in the vocabulary); use a newer transformers, or give the model as a Hugging Face folder"
        )


def unpacked_model(
    name: str, file: Path, reader: Any, near: Path, config: Any, dtype: torch.dtype, progress: Progress
) -> Any:
    """Unpack the weights of a GGUF file into a model; `near` and errors as for `config_and_tokenizer`."""
    options: dict[str, Any] = {}
    if hasattr(transformers, "GgufConfig"):  # versions that have it unpack only when asked to
        options["quantization_config"] = transformers.GgufConfig(dequantize=True)
    loaded: Any
    lean = copy(reader)  # without a tokenizer's arrays, which transformers would read entry by entry
    lean.fields = {name: field for name, field in reader.fields.items() if not name.startswith("tokenizer.")}
    with (
        _alone(file, lean, near) as folder,
        _unpacked_ahead(name, reader, progress),
        readable(f"{name}: the weights cannot be read"),
    ):
        loaded = AutoModelForCausalLM.from_pretrained(
            folder,
            gguf_file="model.gguf",
            config=config,
            dtype=dtype,
            output_loading_info=True,
            ignore_mismatched_sizes=True,
            **options,
        )
    model, info = loaded
    check_loaded(name, info, "file", "transformers knows no other name for it in GGUF")
    _check_weights(name, reader, model)
    if hasattr(model.config, "quantization_config"):  # with it, transformers would refuse to save plain weights
        del model.config.quantization_config
    model.hf_quantizer, model.is_quantized = None, False
    return model


@contextmanager
def _alone(file: Path, reader: Any, near: Path) -> Iterator[Path]:
    """Yield a folder that holds a GGUF file alone: transformers would use a tokenizer that lies beside it.

    Within the block, transformers reads the file with `reader`.
    """
    # transformers would parse the file for each part of a model, and name the tensors anew for each module.
    shared: dict[str, Any] = {
        "GGUFReader": lambda *_, **__: reader,
        "get_tensor_name_map": lru_cache(1)(gguf.get_tensor_name_map),
    }
    with beside(near) as folder, patch.multiple(gguf, **shared), quiet():
        try:
            os.symlink(file.absolute(), folder / "model.gguf")
        except OSError:  # Windows, without the permission for links
            shutil.copyfile(file, folder / "model.gguf")
        yield folder


@contextmanager
def _unpacked_ahead(name: str, reader: Any, progress: Progress) -> Iterator[None]:
    """Within the block, give transformers tensors that threads unpack ahead of it, in the order of the file.

    Progress is counted in weights, because tensors differ in size, and replaces transformers' own bar.
    """
    dequantize = gguf.dequantize
    done, total = 0, weight_count(reader)

    with ThreadPoolExecutor(THREADS) as threads:
        waiting, coming = iter(reader.tensors), deque[tuple[Any, Any, list[Future[Any]]]]()

        def begin(data: Any, kind: Any) -> None:
            weights, parts = unpacked(data, kind, dequantize)
            coming.append((data, weights, [threads.submit(part) for part in parts]))

        def next_of(data: Any, kind: Any) -> Any:
            nonlocal done
            for tensor in islice(waiting, AHEAD + 1 - len(coming)):
                begin(tensor.data, tensor.tensor_type)
            if not coming or coming[0][0] is not data:
                begin(data, kind)
                coming.rotate()
            _, weights, parts = coming.popleft()
            if not all(part.result() for part in parts):
                raise ModelError(f"{name}: damaged: some of its weights are NaN or infinite; fetch it anew")
            done += weights.size
            progress(UNPACKING, round(done / 1e6), round(total / 1e6))
            return weights

        names: dict[str, Any] = {"tqdm": lambda tensors, *_, **__: tensors, "np": _Uncopied()}
        patched = patch.multiple(modeling_gguf_pytorch_utils, create=True, **names)
        with patch.object(gguf, "dequantize", next_of), patched:
            yield


class _Uncopied:
    """numpy, whose `copy` returns a writeable array itself: nothing else holds the unpacked weights.

    transformers copies each tensor, which takes longer than unpacking it. Read-only arrays are views of the file.
    """

    def __getattr__(self, name: str) -> Any:
        return getattr(np, name)

    @staticmethod
    def copy(array: Any) -> Any:
        return array if array.flags.writeable else np.copy(array)


def unpacked(data: Any, kind: Any, dequantize: Callable[[Any, Any], Any]) -> tuple[Any, list[Callable[[], bool]]]:
    """Return an array for a tensor's weights, [.., weights of a row], float32, and functions that fill its parts.

    Each function unpacks a part as `gguf.dequantize` does, but in pieces of fixed size, and returns whether its weights
    are all finite. gguf takes 16 rows at a time: intermediate results of long rows exceed a processor's cache, and for
    short rows its calls take longer than their work.
    """
    block, size = gguf.GGML_QUANT_SIZES[kind]
    shape = data.shape if data.dtype != np.uint8 else (*data.shape[:-1], data.shape[-1] // size * block)
    blocks, weights = data.reshape(-1, 1 if data.dtype != np.uint8 else size), np.empty(shape, dtype=np.float32)
    flat, step = weights.reshape(-1), PIECE // block

    def fill(start: int) -> bool:
        finite = True
        for first in range(start, min(start + PIECES * step, len(blocks)), step):
            piece = dequantize(blocks[first : first + step].reshape(1, -1), kind)[0]
            flat[first * block :][: len(piece)] = piece
            with np.errstate(all="ignore"):  # a sum is faster, and overflows only for huge numbers
                finite &= bool(np.isfinite(piece.sum()) or np.isfinite(piece).all())
        return finite

    return weights, [partial(fill, start) for start in range(0, len(blocks), PIECES * step)]


def _check_weights(name: str, reader: Any, model: Any) -> None:
    """Check that each weight of the file is in the model; transformers leaves some out silently."""
    tensors = {weight.data_ptr(): weight for weight in model.state_dict().values()}.values()
    left_out = ["rope_freqs.weight"]
    if model.config.tie_word_embeddings:  # then some files hold the embedding twice
        left_out.append("output.weight")
    stored = sum(int(tensor.n_elements) for tensor in reader.tensors if tensor.name not in left_out)
    read = sum(weight.numel() for weight in tensors)
    if read < stored:
        raise ModelError(
            f"{name}: transformers reads only {read:,} of {stored:,} weights of {_architecture(reader)} in this file; "
            "give the model as a Hugging Face folder"
        )

"""Each mistake is one line and exit 1; the disk and the model are as before."""

from __future__ import annotations

import json
import os
import signal
import sys
from collections.abc import Callable
from importlib import import_module
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers as hf
import zoo
from making import made
from refusing import OUTPUTS, Refuses, apply, here, refuses
from safetensors.torch import load_file, save_file
from shell import ASKED, FACT, disk, forked, save_model, shell, trained_folder
from tokenizers import normalizers

import ffedit
from ffedit.exporter import exporting
from ffedit.files import cache

__all__ = ["apply", "here", "refuses"]

# Facts --------------------------------------------------------------------------------------------


def fact(**changes: Any) -> str:
    return json.dumps({**FACT, **changes})


@pytest.mark.parametrize(
    ("content", "told"),
    [
        (None, ["no file facts.json"]),
        ("", ["facts.json holds no facts"]),
        ("Eiffel Tower: Rome", ["facts.json is not JSON", "line 1"]),
        (fact() + "\n{", ["facts.json, record 2", "line 2 is not JSON", "--skip-bad uses the 1 good record"]),
        ('{"who": "Eiffel tower", "where": "Rome"}', ["unknown format", "who, where", "try --map prompt="]),
        (fact(target=None), ["no new object"]),
        (f"[{fact()}, {fact(target='Madrid')}]", ["record 1", "'Rome' here and 'Madrid' in record 2"]),
    ],
)
def test_facts_that_cannot_be_used_are_refused_in_one_line(
    apply: Refuses, here: Path, content: str | None, told: list[str]
) -> None:
    if content is not None:
        (here / "facts.json").write_text(content)
    line = apply("facts.json", loads=False)
    assert all(words in line for words in told), line


@pytest.mark.parametrize(
    ("changes", "told"),
    [
        ({"target": "Timbuktu"}, "does not know"),
        ({"prompt": "the city of " * 30 + "{} is"}, "the model reads at most 64"),
    ],
)
def test_facts_that_do_not_fit_the_model(apply: Refuses, here: Path, changes: dict[str, str], told: str) -> None:
    (here / "facts.json").write_text(fact(**changes))
    assert told in apply("facts.json", loads=True)


def test_probes_that_do_not_fit_are_found_before_the_work(
    apply: Refuses, here: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("ffedit.cli.work.applying.find_layer", lambda *_: pytest.fail("it was traced"))
    (here / "facts.json").write_text(fact(neighbors=["the city of " * 30 + "Madrid is"]))
    assert "the model reads at most 64" in apply("facts.json", loads=True)


@pytest.mark.parametrize(
    ("content", "words", "told", "loads"),
    [
        ("", [], "names.txt holds nothing to protect; expected names and texts, one a line", False),
        (
            "old tower",
            ["--method", "ft"],
            "ft changes the layer for every text, so it protects nothing; use memit",
            False,
        ),
        ("the city of " * 30, [], "the model reads at most 64", True),
    ],
)
def test_what_cannot_be_protected_is_refused_in_one_line(
    apply: Refuses, here: Path, content: str, words: list[str], told: str, loads: bool
) -> None:
    (here / "names.txt").write_text(content)
    assert told in apply("fact.json", "--protect", "names.txt", *words, loads=loads)


def test_a_target_that_comes_to_no_token(refuses: Refuses, here: Path) -> None:
    editable = zoo.trained("gpt2", True)
    editable.tokenizer.backend_tokenizer.normalizer = normalizers.Replace("~", "")
    save_model(editable, here / "deaf")
    asked = ["--subject", FACT["subject"], "--prompt", FACT["prompt"], "--target", "~"]
    assert "'~' gives no token" in refuses("apply", *asked, *OUTPUTS, "-m", "deaf", loads=True)


def test_prompts_that_cannot_be_asked(refuses: Refuses, model: Path) -> None:
    long = "the city of " * 30
    for prompt, told in ((long, "shorten it"), ("\udcff", "not valid Unicode")):
        assert told in refuses("ask", prompt, "-m", model)
    assert "takes 64 in all" in refuses("ask", "the tower", "-m", model, "--tokens", "64")


# Options ------------------------------------------------------------------------------------------


@pytest.mark.parametrize("layers", ["3", "-1", "1-3", "2-1", "two"])
def test_layers_that_are_not_there_are_refused_in_one_line(apply: Refuses, layers: str) -> None:
    line = apply("fact.json", f"--layers={layers}", loads=True)
    assert "layers 0 to 2" in line or "auto, trace, one layer (4) or a range (3-8)" in line


@pytest.mark.parametrize(
    ("token", "loads", "told"),
    [
        ("Rome", False, "fact token 'Rome' is not a word of the subject 'Eiffel tower'"),
        ("2", True, "fact token 2 was asked for, but the subject 'Eiffel tower' has 2 tokens; a number from 0 to 1"),
    ],
)
def test_tokens_that_the_subject_lacks_are_found_before_the_work(
    apply: Refuses, monkeypatch: pytest.MonkeyPatch, token: str, loads: bool, told: str
) -> None:
    monkeypatch.setattr("ffedit.layer_choice.choose.shown", lambda *_: pytest.fail("it was traced"))
    assert told in apply("fact.json", "--layer", "0", "--fact-token", token, loads=loads)


def test_settings_of_a_method_that_does_not_run_are_refused(refuses: Refuses) -> None:
    for words in (["apply", "fact.json", "--method"], ["bench", "fact.json", "--out", "b", "--methods"]):
        told = refuses(*words, "rome", "--set", "memit.ridge=0.1", loads=False)
        assert "--set memit.ridge=0.1 is a setting of memit, which does not run" in told
    told = refuses("locate", "fact.json", "--leak", "--set", "alphaedit.ridge=0.1", loads=False)
    assert "--set alphaedit.ridge=0.1 is a setting of alphaedit" in told


def test_a_text_beside_the_statistics_is_refused(here: Path, capsys: pytest.CaptureFixture[str]) -> None:
    for words in (["apply", "fact.json"], ["bench", "fact.json", "--out", "b"]):
        ran = shell(capsys, *words, "--stats", "s", "--corpus", "text.txt")
        assert ran.code == 2 and "--stats s has the statistics, so --corpus text.txt would not be read" in ran.err


@pytest.mark.parametrize(
    ("words", "told"),
    [
        (["evaluate", "fact.json", "--edited", "./nowhere"], "./nowhere: no such folder"),
        (["evaluate", "fact.json", "--text", "none.txt"], "none.txt: no such file"),
        (["bench", "fact.json", "--out", "b", "--text", "none.txt"], "none.txt: no such file"),
        (["stats", "--corpus", "none.txt"], "none.txt: no such file"),
        (["choose-layer", "none.json"], "no file none.json"),
        (["evaluate", "-"], "standard input is closed"),
    ],
)
def test_wrong_paths_are_found_before_the_work(
    refuses: Refuses, monkeypatch: pytest.MonkeyPatch, words: list[str], told: str
) -> None:
    monkeypatch.setattr("sys.stdin", None)
    monkeypatch.setattr(f"ffedit.cli.work.{words[0].replace('-', '_')}", lambda *_, **__: pytest.fail("it was begun"))
    assert told in refuses(*words, loads=False)


# Models -------------------------------------------------------------------------------------------


def quantise(folder: Path) -> None:
    config = json.loads((folder / "config.json").read_text())
    config["quantization_config"] = {"quant_method": "bitsandbytes", "load_in_4bit": True}
    (folder / "config.json").write_text(json.dumps(config))


def weights(change: Callable[[dict[str, torch.Tensor]], object]) -> Callable[[Path], None]:
    def rewrite(folder: Path) -> None:
        tensors = load_file(folder / "model.safetensors")
        change(tensors)
        save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})

    return rewrite


VALUE = "transformer.h.1.mlp.c_proj.weight"
BROKEN: dict[str, tuple[Callable[[Path], object], list[str]]] = {
    "quantised": (quantise, ["quantised (bitsandbytes)", "16 or 32 bits"]),
    "NaN": (weights(lambda t: t[VALUE][3].fill_(float("nan"))), [VALUE, "NaN"]),
    "one weight missing": (weights(lambda t: t.pop(VALUE)), [VALUE, "missing"]),
    "one weight of another shape": (
        weights(lambda t: t.update({VALUE: torch.zeros(3, 4)})),
        [VALUE, "[3, 4]", "[128, 32]"],
    ),
    "weights cut off": (lambda d: (d / "model.safetensors").write_bytes(b"\0" * 99), ["the model cannot be read"]),
    "no weights": (lambda d: (d / "model.safetensors").unlink(), ["model.safetensors"]),
    "config is no JSON": (lambda d: (d / "config.json").write_text("{"), ["config.json"]),
    "config of nothing": (lambda d: (d / "config.json").write_text("[]"), ["config.json"]),
    "no config": (lambda d: (d / "config.json").unlink(), ["no config.json in it"]),
    "tokenizer is broken": (lambda d: (d / "tokenizer.json").write_text("{}"), ["the tokenizer cannot be read"]),
    "a token for the unknown that is unknown": (
        lambda d: (d / "tokenizer.json").write_text((d / "tokenizer.json").read_text().replace('"<unk>":', '"<uuk>":')),
        ["the tokenizer cannot be read", "[UNK]"],
    ),
    "no tokenizer": (lambda d: [file.unlink() for file in d.glob("tokenizer*")], ["no tokenizer in it"]),
}


@pytest.mark.parametrize("case", BROKEN)
def test_models_that_are_broken_are_refused_in_one_line(refuses: Refuses, here: Path, case: str) -> None:
    change, told = BROKEN[case]
    change(trained_folder(here / "broken"))
    line = refuses("apply", *ASKED, *OUTPUTS, "-m", "broken")
    assert line.startswith("broken: ") and all(words in line for words in told), line
    assert refuses("ask", "the tower", "-m", "broken") == line


def test_models_that_are_no_causal_decoders(refuses: Refuses, here: Path) -> None:
    t5 = hf.T5Config(vocab_size=97, d_model=32, d_kv=8, d_ff=64, num_layers=2, num_heads=4, decoder_start_token_id=0)
    bert = hf.BertConfig(
        vocab_size=97, hidden_size=32, num_hidden_layers=2, num_attention_heads=4, intermediate_size=64
    )
    for coder, parameters in ((hf.T5ForConditionalGeneration(t5), 44_704), (hf.BertForMaskedLM(bert), 37_921)):
        assert coder.num_parameters() == parameters
        coder.save_pretrained(here / "encoder")
        zoo.words().save_pretrained(here / "encoder")
        assert "causal decoder" in refuses("apply", *ASKED, *OUTPUTS, "-m", "encoder")


_SIZES = {"vocab_size": 97, "hidden_size": 32, "num_hidden_layers": 4, "bos_token_id": 0, "eos_token_id": 1}
_HYBRID = {
    **{"intermediate_size": 48, "num_attention_heads": 4, "num_key_value_heads": 4, "num_mem_blocks": 1},
    **{"mamba_d_state": 4, "mamba_ngroups": 1, "n_mamba_heads": 8, "mamba_headdim": 8, "use_mamba_kernels": False},
    "layers_block_type": ["mamba", "hybrid", "mamba", "hybrid"],
}


@pytest.mark.parametrize(
    ("config", "parameters", "seen"),
    [
        (hf.MambaConfig(**_SIZES, state_size=4), 33_728, "mixer.out_proj"),
        (hf.Zamba2Config(**_SIZES, **_HYBRID), 85_536, "mamba.out_proj"),
    ],
)
def test_state_space_models_have_no_value_matrix(
    refuses: Refuses, here: Path, config: Any, parameters: int, seen: str
) -> None:
    tiny = hf.AutoModelForCausalLM.from_config(config)
    assert tiny.num_parameters() == parameters, tiny.num_parameters()
    tiny.save_pretrained(here / "m")
    zoo.words().save_pretrained(here / "m")
    for line in (refuses("apply", *ASKED, *OUTPUTS, "-m", "m"), refuses("ask", "the tower", "-m", "m")):
        assert "value matrix was expected in layer 0, found 0" in line and seen in line
        assert "a layer without a feed-forward part cannot be edited" in line


def test_an_adapter_of_what_no_adapter_holds(refuses: Refuses, here: Path, model: Path) -> None:
    made(ffedit.load(model), {1: 2}, dense=True).save(here / "e")
    line = refuses("export", "e", "-m", model, "--out", "x", "--format", "adapter")
    assert "layer 1 is dense" in line and "export a checkpoint (--format)" in line


def test_a_model_that_is_not_here_is_told_at_once(
    refuses: Refuses, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    assert "./nowhere: no such folder" in refuses("ask", "the tower", "-m", "./nowhere")
    monkeypatch.setattr("huggingface_hub.constants.ENDPOINT", "http://127.0.0.1:9")
    monkeypatch.setattr("ffedit.loading.load.AutoConfig.from_pretrained", None)  # it would try for a minute
    line = refuses("ask", "the tower", "-m", "some-org/some-model")
    assert "some-org/some-model: no such folder" in line and "http://127.0.0.1:9 cannot be reached" in line
    monkeypatch.setattr("huggingface_hub.is_offline_mode", lambda: True)
    assert "not in the cache" in refuses("ask", "the tower", "-m", "some-org/some-model")


def test_an_edit_of_another_model(refuses: Refuses, here: Path, model: Path) -> None:
    made(ffedit.load(model), {1: 2}).save(here / "e")
    save_model(zoo.shared("llama"), here / "other")
    assert "apply it to the model it was made for" in refuses("ask", "the tower", "--edit", "e", "-m", "other")
    (here / "e" / "manifest.json").write_text("{}")
    assert "damaged or foreign" in refuses("export", "e", "--out", "x")


# The machine --------------------------------------------------------------------------------------


def test_a_cache_that_cannot_be_cleared(refuses: Refuses, monkeypatch: pytest.MonkeyPatch) -> None:
    def fail() -> int:
        raise PermissionError(13, "Permission denied", "moments/a")

    monkeypatch.setattr(cache, "clear", fail)
    assert refuses("cache", "clear") == "moments/a: Permission denied\n"


@pytest.mark.parametrize(
    ("module", "name"),
    [("locator.trace", "restore"), ("editor.value", "_optimise")],
)
def test_ctrl_c_leaves_model_and_disk_as_before(
    apply: Refuses, monkeypatch: pytest.MonkeyPatch, module: str, name: str
) -> None:
    def interrupt(*_: Any, **__: Any) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr(import_module(f"ffedit.{module}"), name, interrupt)
    apply("fact.json", "--layer", "1", code=130, loads=True)


def test_ctrl_c_in_a_process_of_its_own(here: Path, model: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def check(task: Any) -> None:
        sys.stdout.write(str(sorted(path.name for path in Path(task.folder).iterdir())))
        os.kill(os.getpid(), signal.SIGINT)

    before, corpus = disk(here), model.parent / "corpus.txt"
    monkeypatch.setattr(exporting, "check_fresh", check)
    words = ["--layer", "1", "--set", "value.steps=1", "--force", "--corpus", corpus]
    done = forked("apply", "fact.json", "-q", "-m", model, *words, *OUTPUTS)
    assert done.code == 130 and "model.safetensors" in done.out, "it came while the folder was being written"
    assert done.err.strip() == "interrupted: the model and the disk are as before" and disk(here) == before


@pytest.mark.parametrize(
    ("words", "size"),
    [
        (["full"], 1_000),
        (["e", "--export", "full"], 60_000),
        (["e", "--json", "r.json", "--plot", "full.png"], 20_000),
    ],
)
def test_a_full_disk(here: Path, model: Path, words: list[str], size: int) -> None:
    before, quick = disk(here), ["-q", "--layer", "1", "--set", "value.steps=1", "--force"]
    corpus = ["--corpus", model.parent / "corpus.txt"]
    done = forked("apply", "fact.json", *quick, "-m", model, *corpus, "--out", *words, size=size)
    assert done.code == 1 and done.err.startswith(f"error: {words[-1]}: cannot be written (")
    assert done.err.count("\n") == 1 and disk(here) == before


@pytest.mark.parametrize(
    ("error", "said"),
    [
        (RuntimeError("CUDA error: device-side assert triggered\nCUDA kernel errors"), "the device failed (CUDA error"),
        (RuntimeError("NCCL error in: ProcessGroupNCCL.cpp:1, unhandled cuda error"), "the device failed (NCCL error"),
        (RuntimeError("CUDA out of memory. Tried to allocate 2.00 GiB"), "not enough memory (CUDA out of memory"),
        (MemoryError(), "not enough memory (MemoryError)"),
        (RuntimeError("can't start new thread"), "not enough memory (can't start new thread"),
    ],
)
def test_a_device_that_fails_is_one_line(
    error: Exception,
    said: str,
    model: Path,
    empty: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    def fails(*_: object, **__: object) -> None:
        raise error

    monkeypatch.setattr("ffedit.evaluator.responses.ask", fails)
    monkeypatch.setattr("ffedit.evaluate", fails)
    before = disk(empty)
    ran = shell(capsys, "evaluate", *ASKED, "--model", model)
    assert ran.code == 1 and said in ran.err and ran.err.count("\n") == 1 and disk(empty) == before
    error.args = ("shapes do not match",)
    if isinstance(error, RuntimeError):
        with pytest.raises(RuntimeError, match="shapes do not match"):
            shell(capsys, "evaluate", *ASKED, "--model", model)

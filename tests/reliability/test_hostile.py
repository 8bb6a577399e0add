"""Files made to do harm: none is executed, none leaves its folder, none takes memory that it does not fill.

Each promise of `docs/threat-model.md` names a test of this file, or of `test_fuzz.py`.
"""

from __future__ import annotations

import json
import os
import pickle
import struct
import sys
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import fuzzing
import pytest
import zoo
from making import made, on_disk
from safetensors.torch import load_file
from shell import shell

import ffedit
from ffedit.cli.run import read_recipe
from ffedit.editor.edit import Edit
from ffedit.editor.statistics_files import read_folder
from ffedit.errors import EditError, FactError, FFEditError, ModelError
from ffedit.exporter.checkpoint import rewrite
from ffedit.exporter.gguf import edits_in
from ffedit.exporter.model_card import model_card, origin_of
from ffedit.facts.fact import Fact, Probe
from ffedit.facts.reading import read_facts
from ffedit.facts.text import plain
from ffedit.files.resuming import json_lines, read_journal
from ffedit.files.tensor_ranges import contents, read_header
from ffedit.model.tokenization import turn

DEEP, LONG = "[" * 100_000, "1" * 5000
# Text that clears a screen, sets a title, makes a link, turns the direction of what follows, and is HTML and Markdown.
EVIL = (
    "\x1b[2J\x1b]0;title\x07\x1b]8;;http://evil\x1b\\link\u202egnp\u009b31m<script>alert(1)</script>[x](http://evil)|`"
)
ACTIVE = ("\x1b", "\x07", "\u202e", "\u009b")


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A random GPT-2 on disk; read only."""
    return on_disk("gpt2", tmp_path_factory.mktemp("hostile") / "gpt2", shards="1MB")


def copied(model: Path, folder: Path, **config: Any) -> Path:
    """The model with other entries in its config; weights are linked."""
    folder.mkdir()
    for path in model.iterdir():
        os.link(path, folder / path.name)
    about = json.loads((model / "config.json").read_text())
    (folder / "config.json").unlink()
    (folder / "config.json").write_text(json.dumps(about | config))
    return folder


class Bomb:
    """Pickles into a call that makes a file."""

    def __init__(self, mark: Path) -> None:
        self.mark = mark

    def __reduce__(self) -> Any:
        return Path.touch, (self.mark,)


# Nothing is executed ------------------------------------------------------------------------------


@pytest.mark.parametrize("name", ["pytorch_model.bin", "model.pt", "model.safetensors"])
def test_no_pickle_is_loaded(model: Path, tmp_path: Path, name: str) -> None:
    folder = copied(model, tmp_path / "m")
    (folder / "model.safetensors").unlink()
    (folder / name).write_bytes(pickle.dumps(Bomb(tmp_path / "executed")))
    with pytest.raises(ModelError) as caught:
        ffedit.load(folder)
    assert "\n" not in str(caught.value) and not (tmp_path / "executed").exists()


def test_code_in_a_checkpoint_is_not_run(model: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    mapped = {"AutoConfig": "evil.Evil", "AutoModelForCausalLM": "evil.Evil", "AutoTokenizer": ["evil.Evil", None]}
    for kind in ("gpt2", "of-no-library"):
        folder = copied(model, tmp_path / kind, auto_map=mapped, model_type=kind)
        (folder / "evil.py").write_text(f"open({str(tmp_path / 'executed')!r}, 'w')\nclass Evil: pass\n")
        ran = shell(capsys, "doctor", "--model", folder)
        assert ran.code in (0, 1) and "Traceback" not in ran.err and not (tmp_path / "executed").exists()


def test_a_recipe_does_not_consent_for_who_runs_it(capsys: pytest.CaptureFixture[str], empty: Path) -> None:
    for name in ("trust_remote_code", "trust-remote-code"):
        Path("r.yaml").write_text(f"{name}: true")
        ran = shell(capsys, "run", "r.yaml")
        assert ran.code == 1 and "is for you to say" in ran.err and ran.err.count("\n") == 1


@pytest.mark.parametrize(
    ("template", "told"),
    [
        ("{% for a in range(9999) %}{% for b in range(9999) %}{% endfor %}{% endfor %}", "does not end"),
        ("{% macro f() %}{{ f() }}{% endmacro %}{{ f() }}", "recursion"),
        ("{{ range(10**9) | list }}", "too big"),
        ("{{ ''.__class__.__mro__[1].__subclasses__() }}", "unsafe"),
        ("{{ cycler.__init__.__globals__.os.getcwd() }}", "unsafe"),
        ("{{ messages.append(1) }}", "unsafe"),
        ("{% include '/etc/passwd' %}", "loader"),
    ],
)
def test_a_chat_template_ends_and_stays_in_its_sandbox(template: str, told: str) -> None:
    tokenizer = zoo.words()
    tokenizer.chat_template = template
    before = sys.gettrace()
    with pytest.raises(ModelError, match=f"chat template cannot be used: .*{told}"):
        turn(tokenizer, "the Nile is in")
    assert sys.gettrace() is before


# Nothing leaves its folder ------------------------------------------------------------------------


@pytest.mark.parametrize("name", ["../secret.safetensors", "/etc/passwd", "a/../../secret.safetensors"])
def test_an_index_names_no_file_outside_its_folder(tmp_path: Path, name: str) -> None:
    (tmp_path / "m").mkdir()
    (tmp_path / "m" / "model.safetensors.index.json").write_text(json.dumps({"weight_map": {"w": name}}))
    with pytest.raises(ModelError, match="outside the folder"):
        contents(tmp_path / "m")


def test_what_a_link_leads_to_is_not_shipped(model: Path, tmp_path: Path) -> None:
    folder = copied(model, tmp_path / "m")
    (tmp_path / "secret.txt").write_text("mine")
    (folder / "notes.txt").symlink_to(tmp_path / "secret.txt")
    (target := tmp_path / "out").mkdir()
    with pytest.raises(EditError, match=r"notes\.txt: a link to .*secret\.txt"):
        rewrite(folder, contents(folder), {}, target)
    (folder / "notes.txt").unlink()
    # The hub's cache: every file of a snapshot is a link to a blob.
    snapshot = tmp_path / "models--a--b" / "snapshots" / "0"
    snapshot.mkdir(parents=True)
    os.rename(folder, blobs := tmp_path / "models--a--b" / "blobs")
    for path in blobs.iterdir():
        (snapshot / path.name).symlink_to(path)
    (target := tmp_path / "again").mkdir()
    rewrite(snapshot, contents(snapshot), {}, target)
    assert load_file(target / "model.safetensors").keys() == load_file(blobs / "model.safetensors").keys()


def test_an_edit_whose_numbers_are_a_device_is_refused(tmp_path: Path) -> None:
    made(zoo.shared("gpt2"), {1: 1}).save(tmp_path / "e")
    (tmp_path / "e" / "edit.safetensors").unlink()
    (tmp_path / "e" / "edit.safetensors").symlink_to("/dev/zero")
    with pytest.raises(EditError, match=r"no file edit\.safetensors"):
        Edit.load(tmp_path / "e")


# Nothing takes memory that it does not fill -------------------------------------------------------


@pytest.mark.parametrize("shape", [[2**40, 2, 2], [2**40, 2**40], [2**20, 1, 1], [-1, -1], [3.5], "ab", [True, 1]])
@pytest.mark.parametrize("kind", ["F32", "I4", ["F32"]])
def test_a_header_that_declares_more_than_its_file_is_refused(tmp_path: Path, shape: Any, kind: Any) -> None:
    header = json.dumps({"w": {"dtype": kind, "shape": shape, "data_offsets": [0, 0]}}).encode()
    (tmp_path / "model.safetensors").write_bytes(struct.pack("<Q", len(header)) + header)
    with pytest.raises(ModelError, match="no safetensors file that can be read"):
        read_header(tmp_path / "model.safetensors")


@pytest.mark.parametrize("config", [{"n_layer": 10**9}, {"n_embd": 2**16, "n_head": 4}, {"vocab_size": 2**33}])
def test_a_config_that_declares_more_than_its_checkpoint_is_refused(
    model: Path, tmp_path: Path, config: dict[str, int]
) -> None:
    with pytest.raises(ModelError, match=r"its config declares [\d,]+ (layers|weights)"):
        ffedit.load(copied(model, tmp_path / "m", **config))


def test_a_gguf_file_that_declares_more_than_it_holds_is_refused(tmp_path: Path) -> None:
    import gguf_making

    model, tokenizer = gguf_making.parts("llama")
    path = gguf_making.write_gguf(tmp_path / "m.gguf", model, tokenizer)
    whole = path.read_bytes()
    for name, number in (("llama.block_count", 2**31 - 1), ("llama.feed_forward_length", 2**30)):
        at = whole.index(name.encode()) + len(name) + 4
        path.write_bytes(whole[:at] + struct.pack("<I", number) + whole[at + 4 :])
        with pytest.raises(ModelError, match="its config declares"):
            ffedit.load(path)


def test_aliases_in_a_recipe_do_not_multiply(tmp_path: Path) -> None:
    lists = ["a0: &a0 [x, x, x, x, x, x, x, x, x, x]"]
    lists += [f"a{i}: &a{i} [{', '.join([f'*a{i - 1}'] * 10)}]" for i in range(1, 12)]
    merged = ["a0: &a0 {x: 0}", *(f"a{i}: &a{i} {{<<: [{', '.join([f'*a{i - 1}'] * 10)}]}}" for i in range(1, 12))]
    for text in ("\n".join(lists), "\n".join(merged), "a0: &a0 x\na: &a [*a]"):
        (tmp_path / "r.yaml").write_text(text)
        with pytest.raises(EditError, match=r"r.yaml:2: .*\*a0? is an alias"):
            read_recipe(tmp_path / "r.yaml")


# Each is refused in one line ----------------------------------------------------------------------

READERS: dict[str, tuple[str, Callable[[Path], object]]] = {
    "facts": ("facts.json", read_facts),
    "index": ("model.safetensors.index.json", lambda path: contents(path.parent)),
    "manifest": ("manifest.json", lambda path: Edit.load(path.parent)),
    "recipe": ("recipe.yaml", read_recipe),
    "journal": ("results.jsonl", read_journal),
}


@pytest.mark.parametrize("text", [DEEP, '{"a":' * 50_000, LONG], ids=["lists", "objects", "integer"])
@pytest.mark.parametrize("reader", READERS)
def test_depth_and_length_are_refused(tmp_path: Path, reader: str, text: str) -> None:
    name, read = READERS[reader]
    (tmp_path / name).write_text(text + "\n")
    with pytest.raises(FFEditError) as caught:
        read(tmp_path / name)
    assert len(str(caught.value)) < 600


def test_depth_in_a_header_of_tensors_is_refused(tmp_path: Path) -> None:
    (tmp_path / "m.safetensors").write_bytes(struct.pack("<Q", len(DEEP)) + DEEP.encode())
    with pytest.raises(ModelError):
        read_header(tmp_path / "m.safetensors")


def test_what_a_gguf_file_says_of_edits_is_checked() -> None:
    class Reader:
        def __init__(self, text: Any) -> None:
            self.text = text

        def get_field(self, name: str) -> Any:
            return self

        def contents(self) -> Any:
            return self.text

    for text in (DEEP, "{}", "[1]", 5, "not JSON"):
        with pytest.raises(EditError, match=r"ffedit\.edits is not ffedit's"):
            edits_in(Reader(text))
    assert edits_in(Reader('[{"edit": "a"}]')) == [{"edit": "a"}]


@pytest.mark.parametrize("text", ["\0", "a\0b", "\x1b[31m", "bell\x07", "\x7f", "\u200b", "\u202e\u202c"])
def test_a_control_character_is_no_text_of_a_fact(text: str) -> None:
    for field in ("subject", "target", "previous"):
        with pytest.raises(FactError, match=r"control character|no visible character") as caught:
            Fact(**{"subject": "Eiffel Tower", "prompt": "{} is in", "target": "Rome", field: text})
        assert all(c.isprintable() for c in str(caught.value))
    with pytest.raises(FactError):
        Probe("the Nile is in", text)
    assert Fact("برج إيفل\u200f", "{} is\tin\n", "e\u0301 👩\u200d🚀").target == "e\u0301 👩\u200d🚀"


# What others wrote is shown, not obeyed -----------------------------------------------------------


@pytest.fixture
def evil(tmp_path: Path) -> Path:
    """An edit whose texts are all `EVIL`, signed as its maker would."""
    edit = fuzzing._edit()
    fact = Fact("Eiffel Tower", f"{{}} is in {EVIL[EVIL.index('<') :]}", "Rome")
    texts = {"model": EVIL, "method": EVIL, "warnings": [EVIL], "says": {"before": [EVIL], "after": [EVIL]}}
    texts |= {"verdict": {"text": EVIL}, "versions": {EVIL: EVIL}}
    about = {**edit.provenance, **texts}
    about["statistics"] = {"1": {**about["statistics"]["1"], "corpus": EVIL}}
    about["source"] = {**about["source"], "file": EVIL}
    replace(edit, facts=(fact,), provenance=about).save(tmp_path / EVIL.replace("/", "-"))
    return tmp_path / EVIL.replace("/", "-")


def test_the_terminal_shows_escapes_and_obeys_none(evil: Path, capsys: pytest.CaptureFixture[str]) -> None:
    for words in (("show", evil), ("show", evil, "--recipe"), ("show", "no" + EVIL), ("ask", "a", "--model", EVIL)):
        ran = shell(capsys, *words)
        assert ran.out or ran.code in (1, 2)
        assert not any(c in ran.out + ran.err for c in ACTIVE), words
        assert "--recipe" in words or "U+001B" in ran.out + ran.err


def test_a_note_and_brackets_are_no_markup(empty: Path, capsys: pytest.CaptureFixture[str]) -> None:
    record = {"subject": f"[/bold] {EVIL}", "prompt": "{} is in", "target": "Rome"}
    Path("f.json").write_text(json.dumps([record, {"subject": "Eiffel Tower", "prompt": "{} is in", "target": "Rome"}]))
    ran = shell(capsys, "evaluate", "f.json", "--model", "no-such-model/[/bold]")
    assert ran.code == 1 and not any(c in ran.out + ran.err for c in ACTIVE)


def test_a_model_card_is_markdown_of_ours_only(evil: Path) -> None:
    edit = Edit.load(evil)
    card = model_card(replace(origin_of("atlas", None), name=EVIL), [edit])
    _, _, body = card[3:].partition("\n---\n")
    assert not any(c in body for c in ACTIVE)
    outside_code = "".join(body.split("`")[::2])
    assert "<script>" not in outside_code.replace(r"\<script", "") and "](http" not in outside_code.replace(r"\](", "")
    assert plain("a|b\n<i> [x](y) [0.1, 0.2] a_b") == r"a\|b \<i\> [x\](y) [0.1, 0.2] a_b"


# Forms that fuzzing broke -------------------------------------------------------------------------


def signed(folder: Path, change: Callable[[dict[str, Any]], object]) -> Path:
    """Change the manifest of an edit, and sign it as its maker would."""
    made(zoo.shared("gpt2"), {1: 1}).save(folder)
    manifest = json.loads((folder / "manifest.json").read_text())
    change(manifest)
    files = {path.name: path.read_bytes() for path in folder.iterdir()}
    for name, content in fuzzing.signed({**files, "manifest.json": json.dumps(manifest).encode()}).items():
        (folder / name).write_bytes(content)
    return folder


@pytest.mark.parametrize(
    ("entry", "value", "told"),
    [
        ("verdict", "took", "provenance.verdict is 'took'; an object was expected"),
        ("versions", {"torch": 2}, "provenance.versions.torch is 2"),
        ("norms", {"1": 10**400}, "a number of 1329 bits"),
        ("norm_ratio", True, "provenance.norm_ratio is True"),
        ("matrices", {"1": {}}, "provenance.matrices.1 has no parameter"),
        ("says", {"before": ["a", "b"]}, "not have an answer for each fact"),
        ("scores", {"before": {"a": 1}, "after": {"b": 1}}, "other scores before than after"),
        ("solved", [{"tokens": [1]}], "does not say how each value"),
        ("subjects", {"1": ["a", "b"]}, "do not fit a change"),
        ("config", {"value": {"steps": "5"}}, "provenance.config.value.steps is '5'"),
        ("configs", {"e": {"key": {"fact_token": []}}}, "provenance.configs.e.key.fact_token is"),
        ("parts", [{}], r"provenance.parts\[0\] has no fingerprint"),
    ],
)
def test_a_signed_edit_of_another_form_is_refused(tmp_path: Path, entry: str, value: Any, told: str) -> None:
    folder = signed(tmp_path / "e", lambda manifest: manifest["provenance"].update({entry: value}))
    with pytest.raises(EditError, match=told):
        Edit.load(folder)


def test_an_edit_that_names_no_model_asks_for_one(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    folder = signed(tmp_path / "e", lambda manifest: manifest["provenance"].pop("model"))
    ran = shell(capsys, "ask", "a", "--edit", folder)
    assert ran.code == 1 and "name its base with --model" in ran.err


@pytest.mark.parametrize(
    ("line", "told"),
    [
        ('{"method": "rome"}', "has no when"),
        ('{"method": [], "when": "after", "chunk": 0, "fact": 0}', "the line.method is"),
        ('{"method": "rome", "when": "after", "chunk": 0, "fact": 0}', "has no scores"),
        ('{"method": "rome", "when": "after", "chunk": 0, "fact": null, "norm_ratio": 1}', "has no seconds"),
        (
            '{"method": "rome", "when": "end", "chunk": 0, "fact": 0, "says": "", "scores": {"efficacy": -1}}',
            "are from 0 to 1",
        ),
    ],
)
def test_a_line_that_is_no_result_is_named(tmp_path: Path, line: str, told: str) -> None:
    (tmp_path / "results.jsonl").write_text(json_lines([json.loads(line)]))
    with pytest.raises(EditError, match=f"results.jsonl, line 1: not a result of `ffedit bench`.*{told}"):
        fuzzing.results.Journal(tmp_path, writes=False)


@pytest.mark.parametrize("line", ["[]", "null", '"crc32"', '["crc32"]', "1", "{}", '{"crc32": []}', '{"crc32": "0"}'])
def test_a_line_without_its_checksum_is_damaged(tmp_path: Path, line: str) -> None:
    (tmp_path / "results.jsonl").write_text(line + "\n")
    with pytest.raises(EditError, match=r"results\.jsonl, line 1: damaged"):
        fuzzing.results.Journal(tmp_path, writes=False)


def test_results_of_facts_that_a_run_has_not_are_refused(tmp_path: Path) -> None:
    for line in (
        {"method": "rome", "when": "after", "chunk": 0, "fact": 7, "says": "", "scores": {}},
        {"method": None, "when": "before", "chunk": 0, "fact": None, "problems": {"first": "x"}},
    ):
        (tmp_path / "results.jsonl").write_text(json_lines([line]))
        journal = fuzzing.results.Journal(tmp_path, writes=False)
        with pytest.raises(EditError, match="the results are of fact"):
            fuzzing.report(journal, [Fact("a", "{} is", "b")], ["rome"], False, {}, ())


@pytest.mark.parametrize("about", [{"count": 2**63}, {"count": "9"}, {"address": "x"}, {"ridge": None}, {"texts": [1]}])
def test_key_statistics_of_another_form_are_refused(tmp_path: Path, about: dict[str, Any]) -> None:
    (name, content), *_ = fuzzing.statistics_files()[1].items()
    length = int.from_bytes(content[:8], "little")
    header = json.loads(content[8 : 8 + length])
    moments = json.loads(header["__metadata__"]["moments"]) | about
    header["__metadata__"]["moments"] = json.dumps(moments)
    text = json.dumps(header).encode()
    (tmp_path / name).write_bytes(struct.pack("<Q", len(text)) + text + content[8 + length :])
    with pytest.raises(EditError, match=r"not a file of key statistics|which is not a layer"):
        read_folder(tmp_path)

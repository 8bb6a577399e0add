"""Facts from tables and from the hub: what the package `datasets` reads."""

from __future__ import annotations

import logging
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from records import MILL, SAMPLES, message, samples, write

from ffedit.facts.fact import Fact
from ffedit.facts.reading import read_facts
from ffedit.facts.sources import find_table


@pytest.fixture
def datasets() -> Any:
    """The package `datasets`, silent."""
    found = pytest.importorskip("datasets", reason="tables are read with the package datasets, which is not installed")
    found.disable_progress_bars()
    return found


# Tables -------------------------------------------------------------------------------------------


@samples
@pytest.mark.parametrize("kind", ["parquet", "saved", "arrow", "folder"])
def test_a_table_reads_as_the_file_does(
    datasets: Any, kind: str, record: dict[str, Any], facts: list[Fact], tmp_path: Path
) -> None:
    table = datasets.Dataset.from_list([record])
    (folder := tmp_path / "table").mkdir()
    if kind in ("saved", "arrow"):
        table.save_to_disk(folder)
        place = folder if kind == "saved" else next(folder.glob("*.arrow"))
    else:
        place = folder if kind == "folder" else folder / "facts [1].PARQUET"
        table.to_parquet(folder / "train-00000-of-00001.parquet" if kind == "folder" else place)
    assert read_facts(place) == facts


def test_what_a_row_does_not_have_is_no_field(datasets: Any, tmp_path: Path) -> None:
    short = {"subject": "Red Mill", "prompt": "{} lies in", "target": "Oslo"}
    rows = [SAMPLES["ffedit"][0], short]
    datasets.Dataset.from_list(rows).to_parquet(tmp_path / "facts.parquet")
    assert read_facts(tmp_path / "facts.parquet") == [*SAMPLES["ffedit"][1], Fact(**short)]


def test_a_split_is_named_where_there_are_several(datasets: Any, tmp_path: Path) -> None:
    rows = {name: datasets.Dataset.from_list([{**MILL, "case_id": name}]) for name in ("train", "test")}
    datasets.DatasetDict(rows).save_to_disk(tmp_path / "both")
    for name in rows:
        assert read_facts(f"{tmp_path / 'both'}:{name}")[0].case_id == name
    for asked in ("both", "both:dev"):
        path = str(tmp_path / asked)
        assert message(read_facts, path) == f"{path}: the splits are train, test; add one behind a colon"


def test_a_table_that_cannot_be_read(datasets: Any, tmp_path: Path) -> None:
    (bad := tmp_path / "bad.parquet").write_text("x")
    assert message(read_facts, bad).startswith(f"{bad} is not a table that can be read: ")
    datasets.Dataset.from_list([MILL]).select([]).to_parquet(tmp_path / "none.parquet")
    assert message(read_facts, tmp_path / "none.parquet").endswith("holds no facts; expected at least one record")
    missing = tmp_path / "missing.parquet"
    assert message(read_facts, missing).startswith(f"no file {missing}")


def test_without_the_package_a_table_says_how_to_get_it(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "datasets", None)
    (path := tmp_path / "facts.parquet").write_bytes(b"PAR1")
    assert message(read_facts, path) == f"{path}: to read it, pip install 'ffedit[datasets]'"
    assert read_facts(write(tmp_path / "facts.json", MILL)) == [Fact(**MILL)]


# The hub ------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("name", "asked"),
    [
        ("NeelNanda/counterfact-tracing", ("NeelNanda/counterfact-tracing", None, None)),
        ("azhx/counterfact:train", ("azhx/counterfact", None, None)),
        ("owner/name#en:train", ("owner/name", "en", None)),
        ("owner/name.v2#en", ("owner/name.v2", "en", None)),
        ("zjunlp/KnowEdit/benchmark/some.json", ("zjunlp/KnowEdit", None, "benchmark/some.json")),
    ],
)
def test_a_name_of_the_hub_is_asked_for_without_remote_code(
    name: str, asked: tuple[Any, ...], empty: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    calls = []

    def load_dataset(place: str, configuration: str | None, data_files: str | None) -> Any:
        calls.append((place, configuration, data_files))
        return {"train": [{**MILL, "relation": None}]}

    monkeypatch.setitem(sys.modules, "datasets", SimpleNamespace(load_dataset=load_dataset))
    assert read_facts(name) == [Fact(**MILL)]
    assert calls == [asked]


def test_a_hub_that_does_not_answer_is_one_line(
    empty: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def load_dataset(*asked: Any, **options: Any) -> Any:
        logging.getLogger("huggingface_hub.utils").error("Retrying in 1s")
        raise ConnectionError("Couldn't reach it\non the Hub")

    monkeypatch.setitem(sys.modules, "datasets", SimpleNamespace(load_dataset=load_dataset))
    level = logging.getLogger("huggingface_hub").level
    assert message(read_facts, "owner/name") == (
        "owner/name: no such path, and it cannot be read as a data set of the hub (Couldn't reach it on the Hub); "
        "download a file of the data set and name that file"
    )
    assert logging.getLogger("huggingface_hub").level == level and not caplog.records


def test_a_path_that_exists_always_wins(empty: Path) -> None:
    (empty / "azhx").mkdir()
    assert read_facts(str(write(empty / "azhx" / "counterfact", MILL).relative_to(empty))) == [Fact(**MILL)]
    (empty / "facts").mkdir()
    odd = write(empty / "facts:train", MILL)
    assert read_facts(odd.name) == [Fact(**MILL)]


@pytest.mark.parametrize(
    "name",
    ["facts", "facts.json", "edits/f.json", "here/a/f.json", "here/facts", "./a/b", "../a/b", "/a/b", "-", "", "a b/c"],
)
def test_a_missing_file_is_not_looked_for_on_the_hub(name: str, empty: Path) -> None:
    (empty / "here").mkdir()
    assert find_table(name) is None

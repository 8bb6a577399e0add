"""Stream the records of a file, of standard input, or of a data set.

A file is JSON (an object, a list, JSON lines, or values one after the other), a table with a header (CSV, TSV), YAML,
or parquet or arrow; a folder of tables and a data set of the hub are read with the package `datasets` (an extra,
imported when the first table is read; it runs no code that comes with a data set). JSON lines, CSV and tables are
streamed: a record is read when it is asked for.

`records.py` finds the records, one or many, in a value of JSON or YAML.
"""

from __future__ import annotations

import ast
import csv
import glob
import io
import json
import logging
import os
import re
import sys
from codecs import BOM_UTF16_BE, BOM_UTF16_LE
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass
from functools import partial
from itertools import chain
from pathlib import Path
from typing import Any, TypeAlias

import yaml

from ffedit.errors import FactError, brief
from ffedit.facts.fact import SLOT
from ffedit.facts.records import records_in
from ffedit.facts.synonyms import role_of

# A table by its path or its name on the hub, then #configuration and :split; and the path of a file in a data set.
TABLE = re.compile(r"(?P<path>.+?)(#(?P<configuration>[\w.-]+))?(:(?P<split>[\w.-]+))?", re.DOTALL)
HUB = re.compile(r"(?P<set>\w[\w.-]*/\w[\w.-]*)(/(?P<file>[\w./-]+))?")
SUFFIXES = {".parquet": "parquet", ".arrow": "arrow"}
DELIMITERS = ",;\t"
OPEN = ("[", "{", ",", ":")  # at the end of a line: its JSON value continues on the next
# First bytes of files that hold no facts, with what they are and what to do.
NO_FACTS = {
    b"PK\x03\x04": "a workbook or a zip archive; save the sheet as CSV in UTF-8, or unpack it",
    b"\x1f\x8b": "compressed; unpack it: gunzip",
    b"version https://git-lfs": "a pointer of Git LFS and not the data; fetch it: git lfs pull",
}
EMPTY = frozenset({"nan", "null", "<na>"})  # text of cells without a value
KEPT = "\ufdd0"  # marks spaces that begin an unquoted cell: no character of Unicode, so that no text has it

Source: TypeAlias = "str | os.PathLike[str]"


def name_of(source: Source) -> str:
    """Return the name of a source, for messages."""
    return "standard input" if os.fspath(source) == "-" else os.fspath(source)


def stream_records(path: Source) -> Iterator[Any]:
    """Yield the records of a source, and a FactError in place of a row that cannot be read.

    Raises:
        FactError: there is no such source, it cannot be read, or it holds no records.
    """
    name = name_of(path)
    if (table := find_table(os.fspath(path))) is not None:
        records = table.records()
    else:
        lines = _lines(path, name)
        begun: list[str] = []
        for line in lines:
            begun.append(line)
            if line.strip():
                break
        head = begun[-1] if begun else ""
        records = _reader(os.fspath(path), head)(name, chain(begun, lines))
    first = next(records, None)
    if first is None:
        raise FactError(f"{name} holds no facts; expected a JSON object, a list, or JSON lines")
    yield first
    yield from records


def _lines(path: Source, name: str) -> Iterator[str]:
    """Yield the lines of UTF-8, or of UTF-16 if a BOM says so (Excel's "Unicode text"), with line ends, without BOM."""
    offset = 0
    try:
        stdin: Any = getattr(sys.stdin, "buffer", sys.stdin)  # its bytes, if it has a buffer: always UTF-8
        if stdin is None and os.fspath(path) == "-":
            raise FactError("standard input is closed; name a file of facts, or send them there")
        with nullcontext(stdin) if os.fspath(path) == "-" else open(path, "rb") as stream:
            for line in stream:
                if offset == 0 and isinstance(line, bytes):
                    _refuse_other(name, line)
                    if line.startswith((BOM_UTF16_LE, BOM_UTF16_BE)):
                        rest: Any = stream.read()
                        yield from io.StringIO((line + rest).decode("utf-16"), newline="\n")
                        return
                text = line if isinstance(line, str) else line.decode("utf-8")
                yield text.removeprefix("\ufeff") if offset == 0 else text
                offset += len(line)
    except FileNotFoundError:
        raise FactError(f"no file {name}; expected a file of facts, or - for standard input") from None
    except UnicodeDecodeError as error:
        where = f"{name} is not {error.encoding[:6].upper()} text (byte {offset + error.start})"
        raise FactError(f"{where}; expected JSON, CSV or YAML, saved as UTF-8") from None
    except (OSError, ValueError) as error:  # also a name that no file can have
        raise FactError(f"{name} cannot be read: {getattr(error, 'strerror', None) or error}") from None


def _refuse_other(name: str, head: bytes) -> None:
    for magic, kind in NO_FACTS.items():
        if head.startswith(magic):
            raise FactError(f"{name} is {kind}")


def _reader(path: str, head: str) -> Callable[[str, Iterator[str]], Iterator[Any]]:
    """Return the reader of a text by its suffix, or by its first line if the suffix says nothing."""
    suffix = Path(path).suffix.casefold()
    if suffix in (".yaml", ".yml"):
        return _yaml
    if suffix in (".csv", ".tsv", ".tab"):
        return partial(_table, delimiter=_delimiter(head) if suffix == ".csv" else "\t")
    if suffix in (".json", ".jsonl", ".ndjson") or head.lstrip()[:1] in ("{", "["):
        return _json
    try:
        cells = next(csv.reader(io.StringIO(head, newline=""), delimiter=_delimiter(head)), [])
    except csv.Error:  # a cell that is too long
        cells = []
    if len(cells) > 1 and any(role_of((cell,)) for cell in cells if cell.strip()):
        return partial(_table, delimiter=_delimiter(head))
    return _yaml if re.match(r"---|- |\w+:( |$)", head) else _json


def _json(name: str, lines: Iterator[str]) -> Iterator[Any]:
    """Yield the records of JSON lines, a FactError in place of a broken one; read any other JSON as a whole."""
    number, values = 0, 0
    line = next(lines, "")
    while line:
        number, following = number + 1, ""
        try:
            records = records_in(json.loads(line.rstrip("\r\n")) if line.strip() else [])
        except (ValueError, RecursionError) as error:  # also an integer of thousands of digits, thousands of brackets
            following = next(lines, "")
            if line.rstrip().endswith(OPEN) or not _is_object(following):
                yield from _read_whole(name, [line, following, *lines], number, values > 0)
                return
            yield _broken_line(number, error)
        else:
            values += bool(line.strip())
            yield from records
        line = following or next(lines, "")


def _read_whole(name: str, lines: list[str], number: int, among_values: bool) -> Iterator[Any]:
    """Yield the records of JSON in lines, numbered from `number`; if `among_values`, a FactError per broken line."""
    try:
        yield from [record for value in [*_values("".join(lines))] for record in records_in(value)]
    except (ValueError, RecursionError) as error:
        if among_values:
            for i, line in enumerate(lines):
                try:
                    yield from records_in(json.loads(line.rstrip("\r\n"))) if line.strip() else []
                except (ValueError, RecursionError) as line_error:
                    yield _broken_line(number + i, line_error)
        elif isinstance(error, json.JSONDecodeError):
            position = f"(line {number - 1 + error.lineno}, column {error.colno})"
            raise FactError(f"{name} is not JSON {position}: {error.msg.removesuffix(' starting at')}") from None
        else:
            raise FactError(f"{name} is not JSON that can be read: {error}") from None


def _is_object(line: str) -> bool:
    try:
        return isinstance(json.loads(line), dict)
    except (ValueError, RecursionError):
        return False


def _broken_line(number: int, error: Exception) -> FactError:
    column = f" (column {error.colno})" if isinstance(error, json.JSONDecodeError) else ""
    why = getattr(error, "msg", str(error)).removesuffix(" starting at")
    return FactError(f"line {number} is not JSON{column}: {why}", kind="a line that is not JSON")


def _values(text: str) -> Iterator[Any]:
    """Yield JSON values that stand one after the other."""
    decoder, end = json.JSONDecoder(), 0
    while space := re.compile(r"[ \t\r\n]*(?=[^ \t\r\n])").match(text, end):
        value, end = decoder.raw_decode(text, space.end())
        yield value


def _table(name: str, lines: Iterator[str], delimiter: str) -> Iterator[Any]:
    """Yield the rows of a text table, by the names in its first row; a FactError in place of a broken row.

    Spaces that begin a cell belong to it (" is" may follow a subject), but not those in front of a quote, nor any in a
    table whose header has them, too.
    """
    spaced = False
    begins_with_spaces = re.compile(rf'(^|{re.escape(delimiter)})(?= +[^ "])')
    marked = (line if spaced else begins_with_spaces.sub(rf"\1{KEPT}", line) for line in lines)
    rows = csv.reader(marked, delimiter=delimiter, strict=True, skipinitialspace=True)
    try:
        header = next((row for row in rows if any(row)), [])
    except csv.Error as error:
        raise FactError(f"{name} is not a table that can be read (line {rows.line_num}): {error}") from None
    spaced = any(cell.startswith(KEPT) for cell in header)
    header = [cell.replace(KEPT, "").strip() for cell in header]
    if any(SLOT in cell for cell in header):
        expected = delimiter.join(("subject", "prompt", "target", "previous"))
        raise FactError(f"{name}: its first row holds a fact; put a header above it, such as {expected}")
    header = [f"{cell} ({i})" if cell in header[:i] else cell for i, cell in enumerate(header)]
    while True:
        first = rows.line_num + 1
        try:
            row = [cell.replace(KEPT, "") for cell in next(rows)]
        except StopIteration:
            return
        except csv.Error as error:
            where = f"line {first}" if rows.line_num == first else f"lines {first} to {rows.line_num}"
            yield FactError(f"{where}: {error}; is a quote open?", kind="a row that cannot be read")
            continue
        if len(row) > len(header):
            counts = f"line {rows.line_num} has {len(row)} cells and the header {len(header)}"
            yield FactError(f"{counts}; put text that holds {delimiter!r} between quotes", kind="a row of more cells")
        elif any(cell.strip() for cell in row):
            yield {title: _cell(text) for title, text in zip(header, row, strict=False)}


def _delimiter(head: str) -> str:
    return max(DELIMITERS, key=head.count)


def _cell(text: str) -> Any:
    """Return the value of a cell: text, or the list or object that it spells in JSON or Python; None for NaN."""
    if text.strip().casefold() in EMPTY:
        return None
    if text[:1] in ("[", "{") and len(text) > 2:
        for parse in (json.loads, ast.literal_eval):
            try:
                value = parse(text)
            except (ValueError, SyntaxError, RecursionError, MemoryError):
                continue
            return value if isinstance(value, list | dict) else text
    return text


class _Texts(yaml.SafeLoader):
    """YAML loader that reads plain scalars but null as text ("no" is a word, 1998 a name) and refuses aliases."""

    yaml_implicit_resolvers = {  # noqa: RUF012  # a loader's table, as PyYAML defines it
        initial: [(tag, pattern) for tag, pattern in resolvers if tag == "tag:yaml.org,2002:null"]
        for initial, resolvers in yaml.SafeLoader.yaml_implicit_resolvers.items()
    }

    def compose_node(self, parent: yaml.Node | None, index: int) -> yaml.Node | None:
        """Refuse an alias: aliases of aliases could make any number of records."""
        if self.check_event(yaml.AliasEvent):
            mark = self.peek_event().start_mark  # type: ignore[no-untyped-call]
            raise yaml.MarkedYAMLError(problem="aliases are not read", problem_mark=mark)
        return super().compose_node(parent, index)


def _yaml(name: str, lines: Iterator[str]) -> Iterator[Any]:
    try:
        for document in yaml.load_all("".join(lines), _Texts):  # a SafeLoader
            yield from records_in([] if document is None else document)
    except yaml.MarkedYAMLError as error:
        line = f" (line {error.problem_mark.line + 1})" if error.problem_mark else ""
        raise FactError(f"{name} is not YAML{line}: {error.problem}") from None
    except (yaml.YAMLError, ValueError, RecursionError, TypeError) as error:
        raise FactError(f"{name} is not YAML that can be read: {brief(error)}") from None


@dataclass(frozen=True)
class Table:
    """Named table, not read yet; `path` is a path or owner/name on the hub, perhaps with the path of one file in it."""

    name: str
    path: str
    configuration: str | None = None
    split: str | None = None

    def records(self) -> Iterator[dict[str, Any]]:
        """Yield the rows, without the nulls of fields that a record lacks. Raises FactError if they cannot be read."""
        if os.path.isfile(self.path):
            with _explained(self), open(self.path, "rb") as file:
                head = file.read(max(map(len, NO_FACTS)))
            _refuse_other(self.name, head)
        try:
            import datasets
        except ImportError as error:
            raise FactError(f"{self.name}: to read it, pip install 'ffedit[datasets]'") from error
        with _explained(self):
            splits = self._splits(datasets)
        only_split = next(iter(splits)) if len(splits) == 1 else ""
        if (split := self.split or only_split) not in splits:
            raise FactError(f"{self.name}: the splits are {', '.join(splits)}; add one behind a colon")
        rows = 0
        with _explained(self):
            for row in splits[split]:
                rows += 1
                yield _without_nulls(row)
        if not rows:
            raise FactError(f"{self.name} holds no facts; expected at least one record")

    def _splits(self, datasets: Any) -> Mapping[str, Any]:
        """Return the rows of each split, as `datasets` gives them. Local files are streamed: no second copy is made."""
        path = Path(self.path)
        if path.is_file():
            kind = SUFFIXES[path.suffix.lower()]
            return dict(datasets.load_dataset(kind, data_files=glob.escape(self.path), streaming=True))
        if (path / "state.json").exists() or (path / "dataset_dict.json").exists():
            saved = datasets.load_from_disk(self.path)
            return saved if isinstance(saved, dict) else {str(saved.split or "train"): saved}
        if path.is_dir():
            return dict(datasets.load_dataset(os.path.abspath(path), self.configuration, streaming=True))
        hub = HUB.fullmatch(self.path)
        assert hub is not None
        return dict(datasets.load_dataset(hub["set"], self.configuration, data_files=hub["file"]))


def find_table(name: str) -> Table | None:
    """Return the table that `name` names, or None; FactError for a folder that holds none."""
    match = TABLE.fullmatch(name)
    if name == "-" or match is None:
        return None
    table = Table(name, name) if os.path.exists(name) else Table(name, **match.groupdict())
    path = Path(table.path)
    if os.path.isdir(path):
        if not any(file.suffix in SUFFIXES for file in path.rglob("*")):
            raise FactError(f"{name} is a folder; expected a file of facts, or a folder of parquet or arrow files")
        return table
    if os.path.exists(path):
        return table if path.suffix.lower() in SUFFIXES else None
    hub = HUB.fullmatch(table.path)
    # A name that ends as a file does, or lies in an existing folder, is a missing file.
    as_file = hub is not None and hub["file"] is None and path.suffix[1:].isalpha()
    missing = hub is None or as_file or os.path.exists(path.parts[0])
    return None if missing else table


@contextmanager
def _explained(table: Table) -> Iterator[None]:
    """Raise one-line errors for failures of `datasets`, the hub or the network, and silence their own logs."""
    loggers = [logging.getLogger(name) for name in ("datasets", "huggingface_hub")]
    levels = [logger.level for logger in loggers]
    for logger in loggers:
        logger.setLevel(logging.CRITICAL)
    try:
        yield
    except Exception as error:  # the errors that `datasets` and the hub raise have no common class
        why = brief(error)
        if os.path.exists(table.path):
            raise FactError(f"{table.name} is not a table that can be read: {why}") from error
        raise FactError(
            f"{table.name}: no such path, and it cannot be read as a data set of the hub ({why}); "
            "download a file of the data set and name that file"
        ) from error
    finally:
        for logger, level in zip(loggers, levels, strict=True):
            logger.setLevel(level)


def _without_nulls(value: Any) -> Any:
    if isinstance(value, dict):
        return {name: _without_nulls(inner) for name, inner in value.items() if inner is not None}
    return [_without_nulls(inner) for inner in value if inner is not None] if isinstance(value, list) else value

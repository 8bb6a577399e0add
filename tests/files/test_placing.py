"""What a kill leaves is cleared or finished by the next run; a result takes its place whole, or not at all."""

from __future__ import annotations

import os
import shutil
import signal
import sys
from collections.abc import Callable
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import pytest
from shell import disk

from ffedit import EditError
from ffedit.files.atomic import check_file, check_free, os_errors, read_whole, write_file, write_text, written
from ffedit.files.placing import beside, placed, sweep

UNFINISHED = ".unfinished"


def killed(work: Callable[[], object]) -> None:
    """Do some work in a process that is killed before it ends by itself."""
    pid = os.fork()
    if pid == 0:
        try:
            work()
        finally:
            os._exit(70)
    assert os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) == -signal.SIGKILL


def die(*_: object) -> None:
    os.kill(os.getpid(), signal.SIGKILL)


def folder_of(path: Path, text: str) -> None:
    path.mkdir()
    (path / "file.safetensors").write_text(text)


# What is left ---------------------------------------------------------------------------------------------


def test_what_a_kill_left_goes_with_the_next_and_what_another_process_makes_stays(tmp_path: Path) -> None:
    target = tmp_path / "a[1]*"

    def begin() -> None:
        with written(target) as made:
            (made / "file.safetensors").write_text("half")
            die()

    killed(begin)
    assert len(list(tmp_path.iterdir())) == 1
    with beside(target) as live:  # of this process, which is not killed
        (live / "mine").touch()
        check_free(target, False)
        with written(target) as made:
            (made / "file.safetensors").write_text("whole")
        assert (live / "mine").exists()
    assert disk(tmp_path).keys() == {"a[1]*", "a[1]*/file.safetensors"}


def test_sweeping_deletes_only_unfinished_work_of_its_target(tmp_path: Path) -> None:
    (elsewhere := tmp_path / "elsewhere").mkdir()
    (elsewhere / "file.safetensors").touch()
    folder_of(tmp_path / ".out.settings", "a person's")
    folder_of(tmp_path / ".out.abcdefgh.old", "a person's")
    folder_of(tmp_path / ".other.abcdefgh.unfinished", "of another target")
    (tmp_path / ".out.link1234.unfinished").symlink_to(elsewhere)
    before = disk(tmp_path)
    check_free(tmp_path / "out", False)
    assert disk(tmp_path) == before
    sweep(tmp_path)
    assert before.keys() - disk(tmp_path).keys() == {
        ".other.abcdefgh.unfinished",
        ".other.abcdefgh.unfinished/file.safetensors",
    }


def test_the_checks_before_long_work_leave_nothing_and_clear_what_was_left(tmp_path: Path) -> None:
    for name in ("file.json", "folder"):
        (tmp_path / f".{name}.abcdefgh.unfinished").mkdir()
    write_text(tmp_path / "there.json", "{}")
    (tmp_path / ".there.json.abcdefgh.unfinished").mkdir()
    check_file(tmp_path / "file.json")
    check_file(tmp_path / "there.json")
    check_free(tmp_path / "folder", False)
    assert [path.name for path in tmp_path.iterdir()] == ["there.json"]


@pytest.mark.skipif(sys.platform != "linux", reason="/proc")
def test_a_file_that_cannot_be_replaced_is_refused_before_long_work(tmp_path: Path) -> None:
    name = Path("/proc/self/comm")  # which can be written, in a folder that cannot
    check_file(name, appended=True)
    (link := tmp_path / "link").symlink_to(tmp_path / "nowhere" / "file.json")
    for target in (name, link):
        with pytest.raises(EditError, match="cannot be written"):
            check_file(target)


@pytest.mark.parametrize(("character", "times"), [("é", 127), ("😀", 60)])
def test_names_as_long_as_a_file_system_takes_them_are_written(tmp_path: Path, character: str, times: int) -> None:
    path = tmp_path / (character * times)
    write_text(path, "text")
    assert path.read_text() == "text"


# Moves ----------------------------------------------------------------------------------------------------


def killed_while_it_replaces(out: Path) -> None:
    """A process that has moved the old folder away, and is killed before it moves the new one there."""

    def work() -> None:
        replace = os.replace
        os.replace = lambda source, target: die() if Path(target) == out else replace(source, target)
        with written(out, force=True) as made:
            (made / "file.safetensors").write_text("new")

    folder_of(out, "old")
    killed(work)
    assert not out.exists()


def test_a_folder_that_is_replaced_is_not_lost_by_a_kill(tmp_path: Path) -> None:
    killed_while_it_replaces(tmp_path / "out")
    check_free(tmp_path / "out", True)
    assert disk(tmp_path).keys() == {"out", "out/file.safetensors"}
    assert (tmp_path / "out" / "file.safetensors").read_text() == "new"


def test_what_was_put_there_after_a_kill_is_not_replaced(tmp_path: Path) -> None:
    killed_while_it_replaces(tmp_path / "out")
    folder_of(tmp_path / "out", "by hand")
    check_free(tmp_path / "out", True)
    assert (tmp_path / "out" / "file.safetensors").read_text() == "by hand" and len(list(tmp_path.iterdir())) == 1


def test_where_it_cannot_be_moved_the_old_folder_is_put_back(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    folder_of(tmp_path / "model", "old")
    before, replace = disk(tmp_path), os.replace

    def refusing(source: Path, target: Path) -> None:
        if Path(source).name == "made":
            assert not (tmp_path / "model").exists(), "the old one was moved away"
            raise OSError(28, "No space left on device")
        replace(source, target)

    monkeypatch.setattr(os, "replace", refusing)
    with (
        pytest.raises(EditError, match=r"model: cannot be written \(No space"),
        written(tmp_path / "model", force=True) as made,
    ):
        (made / "file.safetensors").write_text("new")
    assert disk(tmp_path) == before


def test_without_force_what_another_process_has_made_meanwhile_stays(tmp_path: Path) -> None:
    with pytest.raises(EditError, match="exists already"), written(tmp_path / "out") as made:
        (made / "file.safetensors").write_text("mine")
        folder_of(tmp_path / "out", "another's")
    assert (tmp_path / "out" / "file.safetensors").read_text() == "another's" and len(list(tmp_path.iterdir())) == 1
    for force, left in ((False, "another's"), (None, "mine"), (True, "mine")):
        refused = nullcontext() if left == "mine" else pytest.raises(EditError, match="exists already")
        with refused, placed(tmp_path / "file", force) as made:
            made.write_text("mine")
            (tmp_path / "file").write_text("another's")
        assert (tmp_path / "file").read_text() == left


def test_a_folder_is_not_replaced_by_a_file(tmp_path: Path) -> None:
    folder_of(tmp_path / "results", "a person's")
    before = disk(tmp_path)
    with pytest.raises(EditError, match=r"results: cannot be written \(a folder has this name\)"):
        write_file(tmp_path / "results", Path.touch)
    assert disk(tmp_path) == before


def test_an_interrupt_while_a_folder_is_replaced_waits_for_the_last_move(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    replace = os.replace

    def interrupted(source: Path, target: Path) -> None:
        signal.raise_signal(signal.SIGINT)
        replace(source, target)

    folder_of(tmp_path / "model", "old")
    monkeypatch.setattr(os, "replace", interrupted)
    with pytest.raises(KeyboardInterrupt), written(tmp_path / "model", force=True) as made:
        (made / "file.safetensors").write_text("new")
    assert disk(tmp_path).keys() == {"model", "model/file.safetensors"}
    assert (tmp_path / "model" / "file.safetensors").read_text() == "new"


# What the system refuses ----------------------------------------------------------------------------------


def test_a_file_system_without_permissions_is_written_to(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*_: Any, **__: Any) -> None:
        raise PermissionError(1, "Operation not permitted")

    monkeypatch.setattr(os, "chmod", refuse)
    write_text(tmp_path / "a.txt", "whole")
    assert (tmp_path / "a.txt").read_text() == "whole"


def test_what_libraries_raise_at_a_write_is_named_as_the_disk_s() -> None:
    with pytest.raises(OSError, match="No space left"), os_errors():
        raise Exception("No space left on device (os error 28)")  # as tokenizers does
    full = OSError(28, "No space left on device")
    with pytest.raises(OSError) as caught, os_errors():
        raise full
    assert caught.value is full


# Reading --------------------------------------------------------------------------------------------------


def test_a_file_that_is_replaced_while_it_is_read_is_read_again(tmp_path: Path) -> None:
    path, versions = tmp_path / "state", iter(["second", "third"])
    path.write_text("first")

    def read(path: Path) -> str:
        before = path.read_text()
        if (after := next(versions, None)) is not None:
            write_text(path, after)
        if before == "second":
            raise RuntimeError("two versions")
        return before

    assert read_whole(path, read) == "third"
    with pytest.raises(ValueError, match="damaged"):
        read_whole(path, lambda _: int("damaged"))
    with pytest.raises(FileNotFoundError):
        read_whole(tmp_path / "none", read)


def test_what_the_system_refuses_to_delete_once_is_in_no_result(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    plainly, refused = shutil.rmtree, []

    def once(path: Path, ignore_errors: bool = False) -> None:
        if path.parent.name == "deep" and not refused:
            refused.append(path)
        else:
            plainly(path, ignore_errors=ignore_errors)

    monkeypatch.setattr(shutil, "rmtree", once)
    with placed(tmp_path / "result") as made:
        (made / "deep").mkdir(parents=True)
        write_text(made / "deep" / "file", "whole")
    assert refused and [str(p.relative_to(tmp_path)) for p in sorted(tmp_path.rglob("*"))] == [
        "result",
        "result/deep",
        "result/deep/file",
    ]


# What `force` replaces ---------------------------------------------------------------------------------------


def test_force_replaces_what_holds_weights_and_nothing_else(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (mine := tmp_path / "mine").mkdir()
    (mine / "thesis.txt").write_text("years")
    with pytest.raises(EditError, match="holds no weights"):
        check_free(mine, True)
    with pytest.raises(EditError, match="is a file"):
        check_free(mine / "thesis.txt", True)
    (tmp_path / "packed.gguf").write_text("a model")
    check_free(tmp_path / "packed.gguf", True)
    with pytest.raises(EditError, match="is a file"):
        check_free(tmp_path / "packed.gguf", True, folder=True)
    (mine / "edit.safetensors").write_text("an edit")
    check_free(mine, True)
    (inside := mine / "inside").mkdir()
    for here, target in ((mine, Path()), (inside, mine)):
        monkeypatch.chdir(here)
        with pytest.raises(EditError, match="is the working folder, or contains it"):
            check_free(target, True)

"""The drivers that kill commands and that run them at once, shortened: some seeded cases of each kind."""

from __future__ import annotations

from pathlib import Path

import courses
import kill
import pytest
import together

pytestmark = pytest.mark.skipif(not hasattr(courses.os, "fork"), reason="processes are forked")
SEED = 0


@pytest.fixture(scope="module")
def start(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The folder that every case begins with, without GGUF files."""
    courses.imported()
    return courses.prepare(tmp_path_factory.mktemp("reliability"), with_gguf=False)


@pytest.mark.parametrize("name", ["export over another", "stats into the cache", "cache clear"])
def test_a_command_that_is_killed_anywhere_leaves_nothing_half_and_is_mended_by_the_next(
    name: str, start: Path, tmp_path: Path
) -> None:
    trial = kill.Trial(courses.COURSES[name], start, tmp_path / "case")
    last = len(trial.calls)
    writes = [call for call, kind in enumerate(trial.calls, 1) if kind == 2]
    faults = [judge() for _, _, judge in kill.at_moments({name: trial}, 2, SEED)]
    faults += [trial.at_call(last // 2), trial.at_call(last - 1), trial.at_write(writes[-1])]
    assert faults == [None] * 5


def test_the_driver_sees_what_is_half_lost_or_left(start: Path, tmp_path: Path) -> None:
    trial = kill.Trial(courses.COURSES["export over another"], start, tmp_path / "case")
    whole = trial.after
    assert trial._fault_of_left(whole) is None and trial._fault_of_left(trial.before) is None
    half = {name: content for name, content in whole.items() if name != "result/config.json"}
    assert trial._fault_of_left(half) is not None
    gone = {name: content for name, content in whole.items() if not name.startswith("result")}
    assert trial._fault_of_left(gone) == "result is gone"
    assert trial._fault_of_left({**whole, "fact.json": "other"}) == "fact.json is not as it was"
    assert trial._fault_of_left({**whole, "more": "folder"}) == "more was not there before"


@pytest.mark.parametrize(
    "name", ["one cache: traces", "one output: export over another", "one folder of results, with a stale lock"]
)
def test_commands_at_once_leave_what_one_leaves(name: str, start: Path, tmp_path: Path) -> None:
    assert together.fault(together.SCENES[name], start, tmp_path / "case", [0.0, 0.0, 0.1]) is None

"""Many processes: who does what, and that all of them know what each found."""

from __future__ import annotations

import json
import math
import os
import signal
import socket
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from shell import process

from ffedit.inference.distributed import ProcessGroup, own_device, process_group

PROGRAM = """
import json, sys
from pathlib import Path
import torch
from ffedit.errors import EditError, FactError
from ffedit.inference.distributed import process_group

crew = process_group()
own = {"rank": crew.rank, "size": crew.size, "share": crew.share(range(5)), "long": "é" * (1 + 70_000 * crew.rank)}
found = crew.gather(own)
numbers = crew.gather([0.1 + 0.2, float("nan"), None])
tensors = crew.exchange([torch.full((2, item), item / 3, dtype=torch.float64) for item in crew.share(range(5))])
def fails_in_the_second():
    if crew.rank == 1:
        raise FactError("it failed there")
    return "done here"

def without_memory():
    if not crew.first:
        raise MemoryError("it failed there")

def problem_of(work):
    try:
        return crew.in_all(work)
    except (EditError, FactError, MemoryError) as error:
        return [type(error).__name__, str(error)]

problems = [problem_of(work) for work in (fails_in_the_second, without_memory)]
try:
    crew.agree(lambda: {"facts": "same", "model": f"of {crew.rank}"})
except EditError as error:
    problems.append([type(error).__name__, str(error)])
crew.wait()
crew.disband()
left = torch.distributed.is_initialized()
told = [found, numbers, crew.first, left, [tensor.tolist() for tensor in tensors], problems]
(Path(sys.argv[1]) / f"{crew.rank}.json").write_text(json.dumps(told))
"""


@pytest.mark.parametrize("size", [1, 2, 3, 7])
def test_the_shares_are_all_of_the_work_and_nothing_twice(size: int) -> None:
    shares = [ProcessGroup(rank, size).share(range(5)) for rank in range(size)]
    assert sorted(item for share in shares for item in share) == list(range(5))
    assert max(map(len, shares)) - min(map(len, shares)) <= 1


def test_a_process_that_was_started_alone_is_a_crew_of_one(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("WORLD_SIZE", "RANK"):
        monkeypatch.delenv(name, raising=False)
    alone = process_group()
    assert (alone, alone.first, own_device()) == (ProcessGroup(0, 1), True, None)
    assert alone.share("abc") == ["a", "b", "c"]
    assert alone.gather({"a": (1, 0.1 + 0.2)}) == [{"a": [1, 0.1 + 0.2]}]
    tensors = [torch.ones(2), torch.zeros(3)]
    assert all(one is other for one, other in zip(alone.exchange(tensors), tensors, strict=True))
    assert alone.in_all(lambda: "done") == "done"
    alone.wait()
    alone.disband()
    with pytest.raises(TypeError):
        alone.gather(object())


def test_a_rank_that_cannot_be_is_refused() -> None:
    with pytest.raises(ValueError, match="process 2 of 2"):
        ProcessGroup(2, 2)


def test_two_real_processes_learn_what_each_found(tmp_path: Path) -> None:
    (program := tmp_path / "program.py").write_text(PROGRAM)
    # Without a GPU accelerate starts several processes only when it is told that these are for one each.
    launch = ["-m", "accelerate.commands.launch", "--multi_gpu", "--num_processes", "2", "--num_machines", "1"]
    launch += ["--mixed_precision", "no", "--dynamo_backend", "no", "--main_process_port", "0"]
    ran = process(*launch, program, tmp_path)
    assert ran.code == 0, ran.err
    for rank in (0, 1):
        found, numbers, first, left, tensors, (problem, memory, differ) = json.loads(
            (tmp_path / f"{rank}.json").read_text()
        )
        assert [(one["rank"], one["size"], len(one["long"])) for one in found] == [(0, 2, 1), (1, 2, 70_001)]
        assert [one["share"] for one in found] == [[0, 2, 4], [1, 3]]
        for exact, nothing, none in numbers:
            assert exact == 0.1 + 0.2 and math.isnan(nothing) and none is None
        assert tensors == [[[item / 3] * item] * 2 for item in range(5)]
        assert problem == ["FactError", "it failed there"], "an error of one is an error of all"
        there = ["EditError", "the process of rank 1 (of 2) failed: it failed there"]
        assert memory == (["MemoryError", "it failed there"] if rank else there)
        words = "the processes of rank 0 and 1 differ: model of 0, and of 1; give all processes the same files,"
        assert differ == ["EditError", f"{words} options and versions"], "what is alike is not named"
        assert first == (rank == 0) and not left, "no thread is left that could abort a process while it ends"


KILLED = """
import os, signal, sys
from pathlib import Path
from ffedit.errors import ProcessError
from ffedit.inference.distributed import process_group

group = process_group()
group.wait()
if not group.first:
    os.kill(os.getpid(), signal.SIGKILL)
try:
    group.gather("not received")
except ProcessError as error:
    Path(sys.argv[1]).write_text(str(error))
"""


def test_a_process_that_is_killed_is_an_error_of_the_others(tmp_path: Path) -> None:
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = str(free.getsockname()[1])
    address = {**os.environ, "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": port, "WORLD_SIZE": "2"}
    command = [sys.executable, "-c", KILLED, str(tmp_path / "told")]
    both = [subprocess.Popen(command, env={**address, "RANK": rank, "LOCAL_RANK": rank}) for rank in ("0", "1")]
    try:
        assert both[1].wait(120) == -signal.SIGKILL
        both[0].wait(120)
    finally:
        both[0].kill()
    told = (tmp_path / "told").read_text()
    assert told.startswith("another process of this run has ended; the same command continues") and "\n" not in told

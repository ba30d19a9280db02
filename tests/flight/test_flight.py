"""The flight recorder: files of real jobs that went wrong, and what is said of them."""

from __future__ import annotations

import json
import os
import re
import signal
import time

import pytest
import torch

from collectives import _nccl
from collectives.flight import analyse, read_folder
from collectives.flight.__main__ import main
from collectives.flight.reading import read_file
from tests.hosts import joined
from tests.programs import run_python
from tests.ranks import run_ranks
from tests.variables import variables


def recorded(ctx, folder, how, at_fault=1):
    """Rank `at_fault` does as `how` says; the others' errors are theirs."""
    from collectives.errors import CollectivesError

    with variables(COLLECTIVES_FLIGHT_DIR=folder, COLLECTIVES_FLIGHT_LINES=1):
        comm = ctx.new_communicator(timeout=1.5)
    x = torch.ones(256)
    for number in range(40):
        if how == "slow" and number >= 16 and ctx.rank == at_fault:
            time.sleep(0.01)
        comm.all_reduce(x)
    ctx.barrier()
    try:
        if ctx.rank == at_fault:
            if how == "killed":
                os.kill(os.getpid(), signal.SIGKILL)
            elif how == "stopped":
                os.kill(os.getpid(), signal.SIGSTOP)
            elif how == "other":
                comm.broadcast(x, 0)
            elif how == "absent":
                ctx.barrier()
        comm.all_reduce(x, async_op=how == "absent") and comm._queue.drain(None)
    except CollectivesError:
        pass
    if how == "absent" and ctx.rank != at_fault:
        ctx.barrier()
    ctx.barrier(ranks=None if how != "killed" else [rank for rank in range(ctx.size) if rank != at_fault])
    comm.abort()


def grouped(ctx, folder):
    """Small groups whose peer is there at once, and ones that wait for it."""
    with variables(COLLECTIVES_FLIGHT_DIR=folder):
        comm = ctx.new_communicator()
    x, y = torch.full((16,), float(ctx.rank)), torch.empty(16)
    for number in range(40):
        if number % 8 == ctx.rank:
            time.sleep(0.01)
        with comm.group():
            comm.send(x, 1 - ctx.rank)
            comm.recv(y, 1 - ctx.rank)
        assert (y == 1 - ctx.rank).all()
    ctx.barrier()
    operations = [op for ring in read_folder(folder)[0] if ring.rank == ctx.rank for op in ring.operations]
    ctx.barrier()
    comm.close()
    return [(op.submitted, op.started, op.ended) for op in operations if op.name in ("send", "recv")]


def test_sends_and_receives_in_a_group(tmp_path):
    for times in run_ranks(grouped, 2, str(tmp_path)):
        assert len(times) == 80
        assert all(None not in each and list(each) == sorted(each) for each in times), times


def found(folder, kind):
    rings, problems = read_folder(folder)
    assert not problems
    return [each for each in analyse(rings) if each.kind == kind]


def test_a_killed_rank_is_named(tmp_path):
    run_ranks(recorded, 3, str(tmp_path), "killed", timeout=30, deaths={1})
    (death,) = found(tmp_path, "died")
    assert death.ranks == (1,)
    assert re.search(r"rank 1 \(process \d+ on .*\) died after operation number 41 \(all_reduce of 256 float32 at .*"
                     r"test_flight.py:\d+\)", death.text), death.text  # fmt: skip
    errors = found(tmp_path, "error")
    assert {error.ranks for error in errors} == {(0,), (2,)}
    assert all(error.facts["error"]["kind"] == "RemoteError" for error in errors)
    (apart_,) = found(tmp_path, "apart")
    assert apart_.ranks == (1,)


def test_another_call_is_shown_with_its_line(tmp_path):
    run_ranks(recorded, 3, str(tmp_path), "other", timeout=30)
    (different,) = found(tmp_path, "different")
    assert different.ranks == (1,)
    assert "rank 1 called broadcast of 256 float32, root 0 at" in different.text
    assert "ranks 0, 2 called all_reduce of 256 float32 at" in different.text.replace(" and ", ", ")


def test_a_rank_that_never_comes(tmp_path):
    run_ranks(recorded, 3, str(tmp_path), "absent", timeout=30)
    missing = found(tmp_path, "missing")
    assert [each.ranks for each in missing] in ([(1,)], []), missing
    errors = found(tmp_path, "error")
    assert {each.ranks for each in errors} >= {(0,), (2,)}
    assert all(1 in each.facts["error"]["peers"] for each in errors if each.ranks != (1,))


def test_a_slow_rank_and_since_when(tmp_path):
    run_ranks(recorded, 3, str(tmp_path), "slow", timeout=30)
    (slow,) = found(tmp_path, "slow")
    assert slow.ranks == (1,)
    assert 12 <= slow.facts["sequence"] <= 36, slow.text  # the first one is a communicator's own
    assert slow.facts["median_ns"] > 5e6


def several_nodes(ctx, folder, machines):
    from collectives.errors import CollectivesError

    with variables(COLLECTIVES_FLIGHT_DIR=folder), joined(ctx, machines) as comm:
        x = torch.ones(10)
        for _ in range(3):
            comm.all_reduce(x)
        part = comm.split(ctx.rank % 2)
        part.all_reduce(x)
        ctx.barrier()
        if ctx.rank == 2:
            os.kill(os.getpid(), signal.SIGKILL)
        with pytest.raises(CollectivesError):
            comm.all_reduce(x)
        part.abort()
        comm.abort()


def test_several_nodes_and_children(tmp_path):
    run_ranks(several_nodes, 4, str(tmp_path), "aabb", timeout=40, deaths={2})
    rings, _ = read_folder(tmp_path)
    names = sorted({ring.name for ring in rings})
    whole, *parts = names
    assert parts == [f"{whole}/split1/0", f"{whole}/split1/1"]
    deaths = found(tmp_path, "died")
    assert {(death.communicator, death.ranks) for death in deaths} == {(whole, (2,)), (parts[0], (1,))}
    top = {ring.rank: ring for ring in rings if ring.name == whole}
    assert {rank: ring.node for rank, ring in top.items()} == {0: 0, 1: 0, 2: 1, 3: 1}
    assert [op.name for op in top[0].operations if op.collective][-1] == "all_reduce"
    assert all(op.ended for op in top[2].operations)


def in_good_order(ctx, folder):
    with variables(COLLECTIVES_FLIGHT_DIR=folder):
        comm = ctx.new_communicator()
    children = []
    for _ in range(5):
        child = comm.split(0)
        child.all_reduce(torch.ones(4))
        child.close()
        children.append(len(os.listdir(folder)))
    comm.close()
    return children


def test_closed_communicators_use_their_files_again(tmp_path):
    results = run_ranks(in_good_order, 2, str(tmp_path), timeout=30, fresh=True)
    assert all(counts[-1] <= 4 for counts in results), results


PROGRAM = """
import os, signal, tempfile, torch, collectives
tempfile.tempdir = None  # by TMPDIR, and not that of the process from which this one is forked
how = os.environ["HOW"]
comm = collectives.init(engine="host")
for _ in range(3000):
    comm.all_reduce(torch.ones(8))
queue = [comm.all_reduce(torch.ones(8), async_op=True) for _ in range(10)]
[work.wait() for work in queue]
if how == "raise":
    raise ValueError("a fault of the program")
if how == "fork":
    if os.fork() == 0:
        os._exit(0)
    os.wait()
if how == "dump":
    os.kill(os.getpid(), signal.SIGUSR2)
    from collectives import flight
    print(*flight.dump(os.environ["HERE"]))
comm.close()
"""


def run_program(how, folder, **env):
    return run_python(PROGRAM, timeout=60, **{"HOW": how, "COLLECTIVES_FLIGHT_DIR": str(folder), **env})


def test_files_stay_only_where_something_failed(tmp_path):
    assert run_program("fork", tmp_path).returncode == 0
    assert list(tmp_path.iterdir()) == []
    assert run_program("raise", tmp_path).returncode == 1
    (path,) = tmp_path.iterdir()
    ring = read_file(path)
    assert ring.issued == ring.operations[-1].number == 3010
    assert len(ring.operations) == _nccl.FLIGHT_LAYOUT["capacity"]
    assert all(op.ended and op.started and op.submitted <= op.started <= op.ended for op in ring.operations)
    assert [bool(op.stream) for op in ring.operations[-11:]] == [False] + [True] * 10


def test_without_a_folder_it_is_dumped_on_request(tmp_path):
    """By the function, and by SIGUSR2, under the temporary folder, unless another file or user has its name."""
    temporary = tmp_path / "temporary"
    temporary.mkdir()
    done = run_program("dump", "", HERE=str(tmp_path / "here"), TMPDIR=str(temporary))
    assert done.returncode == 0, done.stderr
    (path,) = done.stdout.split()
    assert read_file(path).issued == 3010
    folder = temporary / f"collectives-flight-{os.getuid()}"
    assert f"1 files in {folder}" in done.stderr and folder.stat().st_mode & 0o777 == 0o700
    (path,) = folder.iterdir()
    assert read_file(path).issued == 3010
    path.unlink()
    folder.rmdir()
    folder.symlink_to(tmp_path)
    done = run_program("dump", "", HERE=str(tmp_path / "here"), TMPDIR=str(temporary))
    assert done.returncode == 0 and "isn't a folder of this user's" in done.stderr
    assert sorted(each.name for each in tmp_path.iterdir()) == ["here", "temporary"]


def test_a_folder_that_cannot_be_written_is_said_once(tmp_path):
    file = tmp_path / "file"
    file.write_text("")
    done = run_program("plain", file)
    assert done.returncode == 0
    assert done.stderr.count("the flight recorder goes on in memory") == 1, done.stderr


def test_the_command(tmp_path, capsys):
    run_ranks(recorded, 2, str(tmp_path), "other", timeout=30)
    assert main([str(tmp_path), "--picture", str(tmp_path / "p.svg")]) == 1
    assert "is not the same on all ranks" in capsys.readouterr().out
    assert (tmp_path / "p.svg").read_text().count("<title>") == 2 * 42
    assert main([str(tmp_path), "--json"]) == 1
    report = json.loads(capsys.readouterr().out)
    assert report["findings"][0]["kind"] == "different"
    assert [row["rank"] for row in report["ranks"]] == [0, 1]
    assert main([str(tmp_path / "none")]) == 2
    assert "no such folder" in capsys.readouterr().err

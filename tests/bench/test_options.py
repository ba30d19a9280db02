"""The command line of the benchmark, and what is printed of rows, with no process."""

import io

import pytest

from collectives.bench.__main__ import main
from collectives.bench.cases import OPS, TYPES, Case
from collectives.bench.options import UsageError, parse
from collectives.bench.report import Report, print_ratios


@pytest.mark.parametrize(
    ("words", "sizes"),
    [
        ("-b 8 -e 64 -f 2", [8, 16, 32, 64]),
        ("-b 1K -e 4K -i 1K", [1024, 2048, 3072, 4096]),
        ("-b 8M -e 8M", [8 << 20]),
        ("--sizes 1K,1.5K,2GiB", [1024, 1536, 2 << 30]),
        ("-b 0 -e 2 -f 2", [0, 1, 2]),
    ],
)
def test_sizes(words, sizes):
    assert parse(words.split()).sizes == sizes


def test_nccl_tests_own_command_line():
    options = parse("-b 8 -e 128M -f 2 -n 50 -w 10 -c 1 -z 0 -d all -o all -r all".split())
    assert (len(options.sizes), options.iters, options.warmup, options.root) == (25, 50, 10, "all")
    assert len(options.kinds) == 12 and len(options.redops) == 6
    roots = {case.root for case in parse("--op reduce --sizes 8 -r all".split()).cases(3)}
    assert roots == {0, 1, 2}
    assert [op.name for op in parse("--collective alltoall,sendrecv".split()).ops] == ["all_to_all", "sendrecv"]


def test_turns_and_peers():
    assert parse([]).turns == 1 and parse(["--zero-copy", "both"]).turns == 5
    options = parse(["--peers", "gloo,mpi4py-openmpi,mpi"])  # mpi: a backend of torch's that this torch may not have
    assert options.peers == ["gloo", "mpi4py-openmpi", "mpi"] and options.turns == 5
    assert "deepspeed" in parse(["--peers", "all"]).peers


@pytest.mark.parametrize(
    ("words", "says"),
    [
        ("-b 1M -e 1K", "is larger than -e"),
        ("-b lots", "lots: a size is"),
        ("-f 1", "above 1"),
        ("-i 0", "at least 1 byte"),
        ("-f 2 -i 8", "can't be given together"),
        ("--op allreduces", "no collective 'allreduces'"),
        ("--op sum", "is named by -o"),
        ("-d float33", "no data type 'float33'"),
        ("-o median", "no reduction 'median'"),
        ("-r first", "a root is"),
        ("-n 0", "at least 1"),
        ("-T 0", "above 0"),
        ("--peers gloo,smoke", "no peer 'smoke'"),
        ("--algorithm fast", "no algorithm 'fast'"),
        ("--frobnicate", "unrecognized arguments: --frobnicate"),
    ],
)
def test_a_wrong_command_line_is_named(words, says):
    with pytest.raises(UsageError, match="(?s).*") as caught:
        parse(words.split())
    assert says in str(caught.value)


@pytest.fixture
def alone(monkeypatch):
    for name in ("RANK", "WORLD_SIZE", "OMPI_COMM_WORLD_RANK", "PMI_RANK", "SLURM_PROCID"):
        monkeypatch.delenv(name, raising=False)


@pytest.mark.parametrize(
    ("words", "says"),
    [
        ("--op broadcast -r 2 --ranks 2", "-r 2: the ranks are 0 to 1"),
        ("--json /nowhere/x.jsonl", "--json /nowhere/x.jsonl can't be written"),
        ("--json .", "it is a folder"),
        ("--plot x.doc", "has to end in"),
        ("--ranks 3 --hosts 2", "--hosts 2: 3 ranks can't be"),
    ],
)
def test_what_would_fail_later_fails_before_measuring(alone, capsys, words, says):
    assert main(words.split()) == 2
    output = capsys.readouterr()
    assert says in output.err and not output.out


def test_ranks_that_contradict_the_launcher(alone, monkeypatch, capsys):
    monkeypatch.setenv("RANK", "0")
    monkeypatch.setenv("WORLD_SIZE", "2")
    assert main(["--ranks", "3"]) == 2
    assert "--ranks 3, but RANK and WORLD_SIZE say that there are 2" in capsys.readouterr().err
    monkeypatch.setenv("RANK", "1")
    assert main(["--ranks", "3"]) == 2
    assert not capsys.readouterr().err  # once is enough


def row(nbytes, time, name="host", **fields):
    common = {"op": "all_reduce", "name": name, "ours": name.startswith("host"), "dtype": "float32", "redop": "sum"}
    common |= {"root": -1, "ranks": 2, "in_place": True, "fresh": False, "wrong": 0}
    return common | {"bytes": nbytes, "time_us": time, "algbw_gbs": 1.0, "busbw_gbs": 1.0} | fields


def test_ratios_are_the_peer_s_time_by_ours():
    lines = []
    rows = [row(8, 2.0), row(8, 1.0, "host zero-copy"), row(8, 7.0, "gloo"), row(8, 3.0, "gloo", in_place=False)]
    print_ratios([*rows, row(16, 1.0)], lines.append)
    assert lines[2].split()[2:] == ["2.00", "0.50x", "3.50x"]
    assert lines[3].split()[2:] == ["1.00", "-", "-"]
    print_ratios([row(8, 2.0), row(8, 1.0, "host zero-copy")], lines.append)
    assert len(lines) == 5  # nothing without a peer


def test_wide_numbers_stay_apart():
    stream = io.StringIO()
    report = Report(parse(["--sizes", "1G"]), 2, "host", stream)
    wide = row(1 << 30, 123456789.0, algbw_gbs=0.01, busbw_gbs=12345.67, wrong=536870912)
    report.add(Case.of(OPS["all_reduce"], TYPES["float32"], "sum", 0, 1 << 30, 2), {"host": {True: wide}})
    assert stream.getvalue().split()[-4:] == ["123456789", "0.01", "12345.67", "536870912"]
    assert not report.end()

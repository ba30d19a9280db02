"""The command line of the benchmark, and what is done with rows, with no process."""

import io
import json
import os
import sys

import pytest

from collectives.bench.__main__ import main
from collectives.bench.options import UsageError, parse
from collectives.bench.report import Report, print_ratios, write_csv, write_json


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


@pytest.mark.parametrize(
    ("words", "says"),
    [
        ("-b 1M -e 1K", "-b 1M is larger than -e 1K"),
        ("-b lots", "-b lots: a size is"),
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
        ("--wire bf16 -d int32", "--wire casts"),
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
        ("--json /nowhere/x.json", "--json /nowhere/x.json can't be written"),
        ("--csv .", "it is a folder"),
        ("--plot x.doc", "has to end in"),
        ("--compare /nowhere/x.json", "can't be read"),
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


def test_no_progress_bar_in_a_pipe_and_one_on_a_terminal(monkeypatch):
    from collectives.bench import report

    monkeypatch.setattr(sys.stderr, "isatty", lambda: False, raising=False)
    assert report._bar(3) is None
    monkeypatch.setattr(sys.stderr, "isatty", lambda: True, raising=False)
    bar = report._bar(3)
    assert bar is not None
    bar.close()


def row(nbytes, time, engine="host", **fields):
    common = {"op": "all_reduce", "algorithm": "auto" if engine == "host" else None, "dtype": "float32", "redop": "sum"}
    common |= {"root": -1, "ranks": 2, "in_place": True, "zero_copy": False, "wire": None, "wrong": 0, "machine": "m"}
    return common | {"engine": engine, "bytes": nbytes, "time_us": time, "algbw_gbs": 1.0, "busbw_gbs": 1.0} | fields


def files(tmp_path, old, new):
    write_json(tmp_path / "old.json", old)
    write_json(tmp_path / "new.jsonl", new)
    return ["--from", str(tmp_path / "new.jsonl"), "--compare", str(tmp_path / "old.json")]


def test_compare_finds_a_regression(alone, tmp_path, capsys):
    old = [row(8, 10.0), row(16, 10.0), row(8, 10.0, "gloo")]
    words = files(tmp_path, old, [row(8, 11.9), row(16, 12.1), row(8, 99.0, "gloo")])
    assert main(words) == 3
    output = capsys.readouterr().out
    assert output.count("REGRESSION") == 1 and "1 regression past 20%" in output
    assert main([*words, "--tolerance", "0.25"]) == 0


def test_compare_of_equals_and_of_faster_is_fine(alone, tmp_path, capsys):
    assert main(files(tmp_path, [row(8, 10.0), row(32, 1.0)], [row(8, 5.0), row(64, 1.0)])) == 0
    assert "1 rows in both, 1 only in the old file, 1 only in this run" in capsys.readouterr().out


TIMELESS = json.dumps({"rows": [row(8, None)]})


@pytest.mark.parametrize(
    "text", ["", "{", "[]", '{"rows": 3}', '{"rows": []}', '{"rows": [{"op": "all_reduce"}]}', TIMELESS]
)
def test_compare_with_what_is_no_result_file(alone, tmp_path, capsys, text):
    words = files(tmp_path, [row(8, 1.0)], [row(8, 1.0)])
    (tmp_path / "old.json").write_text(text)
    assert main(words) == 2
    assert "old.json" in capsys.readouterr().err


def test_compare_with_no_row_in_common(alone, tmp_path, capsys):
    assert main(files(tmp_path, [row(8, 1.0, ranks=4)], [row(8, 1.0)])) == 2
    assert "none of this run's rows" in capsys.readouterr().err


def test_ratios_are_the_peer_s_time_by_ours():
    lines = []
    print_ratios([row(8, 2.0), row(8, 7.0, "gloo"), row(8, 3.0, "gloo", in_place=False), row(16, 1.0)], lines.append)
    assert lines[2].split()[1:] == ["2.00", "3.50x"] or lines[2].split()[-2:] == ["2.00", "3.50x"]
    assert lines[3].split()[-1] == "-"


def test_json_replaces_neither_a_pipe_nor_a_link(tmp_path):
    """`--json /dev/null` of root's once made a file of the device."""
    os.mkfifo(tmp_path / "pipe")
    end = os.open(tmp_path / "pipe", os.O_RDWR)
    write_json(tmp_path / "pipe", [row(8, 1.0)])
    assert (tmp_path / "pipe").is_fifo() and json.loads(os.read(end, 65536))["rows"] == [row(8, 1.0)]
    os.close(end)
    (tmp_path / "link").symlink_to("target")
    (tmp_path / "target").write_text("")
    write_json(tmp_path / "link", [row(8, 1.0)])
    assert (tmp_path / "link").is_symlink() and json.loads((tmp_path / "target").read_text())


def test_csv_of_rows_with_different_fields(tmp_path):
    write_csv(tmp_path / "a.csv", [{"op": "x"}, {"op": "y", "wrong": 3}])
    assert (tmp_path / "a.csv").read_text().split() == ["op,wrong", "x,", "y,3"]


def test_wide_numbers_stay_apart():
    report = Report(parse(["--sizes", "1G"]), 2, "host", io.StringIO())
    wide = row(1 << 30, 123456789.0, algbw_gbs=0.01, busbw_gbs=12345.67, wrong=536870912)
    assert report._place(wide).split() == ["123456789", "0.01", "12345.67", "536870912"]


def test_simulate_names_its_program_in_one_line(alone, capsys):
    assert main(["--simulate", "--ranks", "8"]) == 2
    (line,) = capsys.readouterr().err.splitlines()
    assert "python -m benchmarks.scaling" in line


def test_json_holds_what_was_written(tmp_path):
    write_json(tmp_path / "a.json", [row(8, 1.0)])
    assert json.loads((tmp_path / "a.json").read_text())["rows"] == [row(8, 1.0)]
    for _ in range(2):
        write_json(tmp_path / "a.jsonl", [row(8, 1.0)])
    assert len((tmp_path / "a.jsonl").read_text().splitlines()) == 2

"""Who is first, from rows: no process."""

from collectives.bench.__main__ import main
from collectives.bench.ranking import print_ranking, rank_rows
from collectives.bench.report import write_json
from tests.bench.test_options import row


def peer(nbytes, time, engine, caller="c", **fields):
    return row(nbytes, time, engine, caller=caller, **fields)


ROWS = [
    row(1024, 2.0), row(1024, 1.0, zero_copy=True), peer(1024, 1.5, "intelmpi"), peer(1024, 3.0, "openmpi"),
    peer(1024, 4.0, "mpi4py-openmpi", "python"), peer(1024, 500.0, "gloo", "python"),
    row(65536, 10.0), row(65536, 8.0, zero_copy=True), peer(65536, 20.0, "intelmpi"),
    peer(65536, 16.0, "openmpi"), peer(65536, 18.0, "mpi4py-openmpi", "python"),
]  # fmt: skip


def test_the_best_peer_s_time_by_ours():
    small, large = rank_rows(ROWS)
    assert (small["bytes"], small["peer"]["engine"], small["first"]) == (1024, "intelmpi", "host zero-copy")
    assert (small["ratio"], small["zero_copy_ratio"]) == (0.75, 1.5)
    assert (large["peer"]["engine"], large["ratio"], large["zero_copy_ratio"]) == ("openmpi", 1.6, 2.0)


def test_which_rows_count():
    ours = row(8, 5.0)
    without = [
        row(8, 1.0, algorithm="ring"), row(8, 1.0, wire="bfloat16"), row(8, 1.0, in_place=False),
        peer(8, 1.0, "openmpi", in_place=False), peer(8, 1.0, "backend", "python"),
    ]  # fmt: skip
    (entry,) = rank_rows([ours, *without, peer(8, 4.0, "openmpi")])
    assert entry["ours"] is ours and entry["peer"]["time_us"] == 4.0 and entry["first"] == "openmpi"
    assert entry["zero_copy"] is None and entry["zero_copy_ratio"] is None
    assert rank_rows([ours, peer(8, 1.0, "backend", "python")]) == []
    (entry,) = rank_rows([row(8, 3.0, algorithm="ring"), row(8, 2.0, algorithm="direct"), peer(8, 4.0, "gloo")])
    assert entry["ratio"] == 2.0 and entry["first"] == "host direct"
    fresh = [row(8, 9.0, fresh=True), peer(8, 9.0, "gloo", fresh=True)]
    assert [entry["peer"]["time_us"] for entry in rank_rows([ours, peer(8, 1.0, "openmpi"), *fresh])] == [1.0, 9.0]


def printed(rows):
    lines = []
    print_ranking(rows, lines.append)
    return lines


def test_the_table_has_two_parts_and_fits_in_100_columns():
    lines = printed([*ROWS, row(1 << 30, 123456.7), peer(1 << 30, 1234567.8, "mpi4py-intelmpi", "python")])
    assert max(map(len, lines)) <= 100
    starts = [number for number, line in enumerate(lines) if "who is first" in line]
    assert len(starts) == 2 and "called from Python" in lines[starts[1]]
    first, second = lines[: starts[1]], lines[starts[1] :]
    wanted = ["1024", "2.00", "1.00", "intelmpi", "1.50", "0.75", "1.50", "host", "zero-copy"]
    assert first[4].removeprefix("#").split() == wanted
    assert second[4].removeprefix("#").split()[3:6] == ["mpi4py-openmpi", "4.00", "2.00"]
    assert "faster than the best peer: ours in 2 of 3, zero-copy in 2 of 2" in first[-2]


def test_one_part_where_python_calls_all_peers_and_none_without_peers():
    assert sum("who is first" in line for line in printed([row(8, 1.0), peer(8, 2.0, "gloo", "python")])) == 1
    assert printed([row(8, 1.0)]) == []


def test_rows_of_a_file_are_ranked(tmp_path, capsys, monkeypatch):
    for name in ("RANK", "WORLD_SIZE", "OMPI_COMM_WORLD_RANK", "PMI_RANK", "SLURM_PROCID"):
        monkeypatch.delenv(name, raising=False)
    old = [{name: value for name, value in each.items() if name != "caller"} for each in ROWS]  # of an earlier version
    write_json(tmp_path / "old.json", old)
    assert main(["--from", str(tmp_path / "old.json")]) == 0
    assert capsys.readouterr().out.count("who is first") == 1

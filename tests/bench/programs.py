"""Run programs of benchmarks/WHICH in one process, as their command lines say; print one JSON line
for each.

    python programs.py WHICH FOLDER PROGRAM words ... , PROGRAM words ... , spoil PROGRAM words ...

With `spoil` rank 1 changes one element of what each of our reductions gives. Rows go to FOLDER.
"""

import contextlib
import importlib
import itertools
import json
import sys
from pathlib import Path
from unittest import mock

which, folder, *everything = sys.argv[1:]
sys.path.insert(0, str(Path(__file__).resolve().parents[2] / "benchmarks" / which))
from collectives.gradients.ddp_reducer import DDPReducer  # noqa: E402
from collectives.sharded.param import ParamGroup  # noqa: E402

right, right_of_shards = DDPReducer.reduce_bucket, ParamGroup.store_grads


def spoil(self, comm, bucket, buffer, last):
    future = right(self, comm, bucket, buffer, last)
    if comm.rank == 1:
        bucket.flat[5] += 1.0
    return future


def spoil_shard(self, reduced):
    if self.ranks.world.rank == 1:
        reduced[5] += 1.0
    return right_of_shards(self, reduced)


def run(words, output):
    spoils = words[0] == "spoil"
    name, *rest = words[1:] if spoils else words
    sys.argv = [name, *rest, "--output", str(output)]
    with contextlib.ExitStack() as stack:
        if spoils:
            stack.enter_context(mock.patch.object(DDPReducer, "reduce_bucket", spoil))
            stack.enter_context(mock.patch.object(ParamGroup, "store_grads", spoil_shard))
        told = stack.enter_context(contextlib.redirect_stdout(sys.stderr))  # stdout is ours
        assert told is sys.stderr
        try:
            code = importlib.import_module(name).main()
        except SystemExit as end:
            code = end.code
    rows = output.read_text().splitlines() if output.exists() else []
    return {"code": code, "rows": [json.loads(row) for row in rows]}


runs = [list(words) for comma, words in itertools.groupby(everything, ",".__eq__) if not comma]
for number, words in enumerate(runs):
    print(json.dumps(run(words, Path(folder) / f"{number}.jsonl")), flush=True)

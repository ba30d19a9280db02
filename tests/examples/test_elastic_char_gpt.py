"""The elastic example: a rank kills itself, and the others go on with its shards."""

import json

from tests.examples.running import EXAMPLES, SECONDS, login_environment
from tests.programs import FORKING, run_forked


def test_a_rank_kills_itself(tmp_path):
    options = ("--kill", "1:6", "--texts", "480", "--context", "32", "--width", "64", "--layers", "1")
    launcher = ("-m", "collectives.run", "-n", "2", "--elastic", "1:2", str(EXAMPLES / "elastic_char_gpt.py"))
    words = [FORKING, *launcher, *options, "--checkpoints", str(tmp_path / "saved")]
    done = run_forked(words, login_environment(), SECONDS)
    out, err = done.stdout, done.stderr
    assert done.returncode == 0, out + err
    result = json.loads(out.splitlines()[-1])
    assert result["every_text_in_each_epoch"] is True and result["loss"] < result["loss_of_frequencies"]
    # With the other rank alone, or with the one that is started again if that is there in time.
    assert any(f"commit 5: {ranks} ranks" in out for ranks in (1, 2))
    assert any(f"rank 1 died{joined}; going on from the last commit" in err for joined in ("", ", rank 1 joined"))
    assert sorted(path.name for path in (tmp_path / "saved").iterdir()) == ["step_000000001", "step_000000002"]

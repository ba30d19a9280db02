"""docs/coming-from.md: its blocks run on two ranks, and what was one program ends with one set of parameters."""

import json

import numpy as np
import pytest

from tests.examples import page_blocks
from tests.examples.running import fork_example, torchrun_variables

BLOCKS = page_blocks.blocks_of(page_blocks.PAGE.read_text())


@pytest.fixture(scope="module")
def ended(tmp_path_factory):
    code, out, err = fork_example(
        page_blocks.__file__, variables=torchrun_variables, cwd=tmp_path_factory.mktemp("page")
    )
    assert code == 0, out + err
    return json.loads(out.splitlines()[-1])


def test_each_block_trains_the_same_on_both_ranks(ended):
    run = [label for _, label, _ in BLOCKS if label not in ("start", "theirs")]
    assert len(run) == len(ended) >= 16
    assert [name for name, end in ended.items() if not end["same"]] == []
    idle = [name for name, end in ended.items() if not end["trained"]]
    assert [name for name in idle if not name.startswith("Perseus")] == []  # whose block is the import alone


def test_theirs_and_ours_end_with_the_same_parameters(ended):
    by_section = {}
    for name, end in ended.items():
        by_section.setdefault(name.split(": ")[0], []).append(np.array(end["values"]))
    ddp, clipped, adam = by_section["torch's DDP"], by_section["FSDP1"], by_section["DeepSpeed ZeRO"]
    groups = {
        "plain": [*ddp, *by_section["nn.DataParallel"], by_section["FSDP2"][2], *by_section["MindSpore"]],
        "clipped": [*clipped, *by_section["FSDP2"][:2]],
        "AdamW": adam,
        "Horovod": by_section["Horovod"],
    }
    assert [len(ends) for ends in groups.values()] == [5, 4, 2, 3]
    for what, ends in groups.items():
        assert max(np.abs(end - ends[0]).max() for end in ends) < 2e-7, what
    firsts = [ends[0] for ends in groups.values()]
    apart = [np.abs(a - b).max() for i, a in enumerate(firsts) for b in firsts[:i]]
    assert min(apart) > 1e-4  # so that it can fail

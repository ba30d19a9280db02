"""docs/coming-from.md: its blocks run on two ranks, and what was one program ends with one set of parameters."""

import json
import re

import numpy as np
import pytest

from tests.examples import page_blocks
from tests.examples.running import EXAMPLES, fork_example, torchrun_variables

ROOT = EXAMPLES.parent
PAGE = page_blocks.PAGE.read_text()
BLOCKS = page_blocks.blocks_of(PAGE)


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


def test_the_page_has_both_sides_and_its_links_lead_somewhere():
    sides = {}
    for section, label, _ in BLOCKS:
        sides.setdefault(section, set()).add(label.split()[0])
    del sides[""]
    assert len(sides) == 9 and all(found == {"theirs", "ours"} for found in sides.values())
    titles = re.findall(r"^## (.*)$", PAGE, re.MULTILINE)
    anchors = {re.sub(r"[^\w\- ]", "", title.lower()).replace(" ", "-") for title in titles}
    assert set(re.findall(r"\]\(#([^)]*)\)", PAGE)) <= anchors
    for path in re.findall(r"\]\(([\w./-]+?\.md)", PAGE):
        assert (page_blocks.PAGE.parent / path).exists()
    named = set(re.findall(r"`(examples/\w+\.py)`", PAGE))
    assert named and all((ROOT / path).exists() for path in named)


def test_the_names_of_its_tables_exist():
    from collectives import HookState, optim, sharded

    tables = "\n".join(line for line in PAGE.splitlines() if line.startswith("| "))
    ours = "\n".join(line.split(" | ", 1)[1] for line in tables.splitlines())
    for name in set(re.findall(r"HookState\((\w+)=", ours)) | {"wire", "gather", "error_feedback"}:
        assert name in HookState.__init__.__code__.co_varnames, name
    assert all(hasattr(optim, name) for name in re.findall(r"optim\.(\w+)", ours))
    names = ["MixedPrecision", "ShardedGradScaler", "CPUOffload", "StateDictType", "FullStateDictConfig"]
    names += ["CustomPolicy", "transformer_auto_wrap_policy", "size_based_auto_wrap_policy", "lambda_auto_wrap_policy"]
    names += ["enable_wrap", "memory_plan", "materialize", "get_model_state_dict", "save", "load"]
    assert all(name in PAGE and hasattr(sharded, name) for name in names)
    strategies = set(re.findall(r"ShardingStrategy\.(\w+)", PAGE))
    assert strategies <= set(sharded.ShardingStrategy.__members__) and len(strategies) >= 3

"""Training in shards is training by our DDP hook, bit for bit."""

import pytest
from torch.distributed.device_mesh import init_device_mesh

from tests.ddp.training import make_model, over_gloo, run
from tests.sharded.training import RULES, by_ddp, full, same, sharded, steps_of


@over_gloo
def train_all_ways(ctx, rules):
    ways = {f"reshard_after_forward={value}": {"reshard_after_forward": value} for value in (None, True, False)}
    ways["replicas"] = {"mesh": init_device_mesh("cpu", (ctx.size, 1))}
    if ctx.size == 4:
        ways["neighbours"] = {"reshard_after_forward": 2}
        ways["hybrid"] = {"mesh": init_device_mesh("cpu", (2, 2))}
    found = {}
    for rule in rules:
        for micro in (1, 2):
            expected, losses = by_ddp(make_model, rule, ctx.rank, 6, micro=micro)
            for name, options in ways.items():
                model = sharded(**options)
                got = steps_of(model, RULES[rule](model.parameters()), 6, ctx.rank, micro=micro)
                found[rule, micro, name] = same(full(model), expected) + ([] if got == losses else ["losses"])
    return found


@pytest.mark.parametrize(
    ("ranks", "rules"), [(2, list(RULES)), (3, ["adamw, foreach"]), (4, ["adamw, foreach", "our sgd"])]
)
def test_bit_for_bit(ranks, rules, tmp_path):
    for found in run(train_all_ways, ranks, str(tmp_path / "store"), rules):
        assert len(found) == 2 * len(rules) * (6 if ranks == 4 else 4)
        assert {way: wrong for way, wrong in found.items() if wrong} == {}

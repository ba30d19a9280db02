"""Training in shards is training by our DDP hook, bit for bit."""

import pytest
from torch import nn

from collectives.sharded import ModuleWrapPolicy, ShardedDataParallel, ShardingStrategy, fully_shard
from tests.ddp.training import make_model, over_gloo, run
from tests.sharded.training import RULES, by_ddp, full, same, steps_of

STRATEGIES = [each for each in ShardingStrategy if not each.name.startswith("_")]


@over_gloo
def train_all_ways(ctx, rules):
    found = {}
    for rule in rules:
        expected, losses = by_ddp(make_model, rule, ctx.rank, 8)
        for strategy in STRATEGIES:
            model = ShardedDataParallel(
                make_model(), sharding_strategy=strategy, auto_wrap_policy=ModuleWrapPolicy({nn.Linear})
            )
            # test_storage.test_hybrid has replicas.
            got = steps_of(model, RULES[rule](model.parameters()), 8, ctx.rank)
            found[rule, strategy.name] = same(full(model), expected), got == losses
        model = make_model()
        for each in (model[0], model[2], model[4]):
            fully_shard(each, reshard_after_forward=ctx.size // 2 if ctx.size > 2 else True)
        fully_shard(model, reshard_after_forward=False)
        got = steps_of(model, RULES[rule](model.parameters()), 8, ctx.rank)
        found[rule, "fully_shard"] = same(full(model), expected), got == losses
    return found


@pytest.mark.parametrize(
    ("ranks", "rules"),
    [(2, list(RULES)), pytest.param(4, ["adamw, foreach", "our sgd"], marks=pytest.mark.thorough)],
)
def test_bit_for_bit(ranks, rules, tmp_path):
    for rank, found in enumerate(run(train_all_ways, ranks, str(tmp_path / "store"), rules)):
        assert len(found) == len(rules) * (len(STRATEGIES) + 1)
        for way, (differing, same_losses) in found.items():
            assert not differing and same_losses, (rank, way, differing)

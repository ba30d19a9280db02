"""How many kernels a compressed reduction and a quantized gather launch: no more with more ranks."""

from collections import Counter
from functools import partial
from unittest import mock

import torch

from collectives.compression import Bucket, Scaling
from collectives.compression.quantized import Quantized
from collectives.kernels import execution
from collectives.sharded.arena import Arena
from collectives.sharded.quantized_gather import QuantizedAllGather
from tests.ranks import run_ranks

COUNT = 40_000


def launches(call) -> dict:
    """Run a call, and count the kernels that it launches by their names."""
    found, usual = Counter(), execution.run_on_host

    def launch(kernel, *args):
        found[kernel.name] += 1
        return usual(kernel, *args)

    with mock.patch.object(execution, "run_on_host", launch):
        call()
    return dict(found)


def count_launches(ctx):
    comm, found = ctx.communicator(), {}
    shard_numel, scaling = COUNT // ctx.size // 512 * 512, Scaling(divisor=ctx.size)
    for wire, options in (("int8", {"error_feedback": True, "seed": 3}), ("bf16", {"seed": 1}), ("fp8_e4m3", {})):
        flat = torch.randn(COUNT)
        bucket, quantized = Bucket(flat, [flat], [0], 0), Quantized(wire, **options)
        found[wire] = launches(partial(quantized.reduce, comm, bucket, scaling))
        found[f"{wire}, scatter"] = launches(partial(quantized.reduce_scatter, comm, bucket, scaling, shard_numel))
    shard, out = torch.randn(5000), torch.empty(ctx.size * 5000)
    found["gather"] = launches(lambda: QuantizedAllGather("int8").gather(comm, shard, out, Arena(comm), async_op=False))
    return found


def test_launches_do_not_grow_with_the_ranks():
    two, four = (run_ranks(count_launches, ranks)[0] for ranks in (2, 4))
    assert two == four
    assert two["int8"] == {"coll_quantize_feedback": 1, "coll_requantize_feedback": 1, "coll_dequantize": 1}
    assert two["int8, scatter"] == {"coll_quantize_feedback": 1, "coll_reduce_wires": 1}
    assert two["gather"] == {"coll_quantize": 1, "coll_dequantize": 1}

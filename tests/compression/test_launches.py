"""How many kernels a compressed reduction and a quantized gather launch: no more with more ranks."""

from collections import Counter
from functools import partial
from unittest import mock

import pytest
import torch

from collectives.compression import Bucket, Scaling
from collectives.compression.quantized import Quantized
from collectives.kernels import cuda, execution
from collectives.sharded.quantized_gather import QuantizedAllGather
from tests.ranks import run_ranks
from tests.streams.simulated import needs_simulation

COUNT = 40_000


def launches(call) -> dict:
    """Run a call, and count the kernels that it launches on the host or on a GPU by their names."""
    found = Counter()

    def counting(usual):
        def launch(kernel, *args):
            found[kernel.name] += 1
            return usual(kernel, *args)

        return launch

    with (
        mock.patch.object(execution, "run_on_host", counting(execution.run_on_host)),
        mock.patch.object(cuda, "launch", counting(cuda.launch)),
    ):
        call()
    return dict(found)


def count_launches(ctx):
    comm, found = ctx.communicator(), {}
    shard_numel, scaling = COUNT // ctx.size // 512 * 512, Scaling(divisor=ctx.size)
    for wire, options in (("int8", {"error_feedback": True, "seed": 3}), ("bf16", {"seed": 1}), ("fp8_e4m3", {})):
        flat = torch.randn(COUNT).to(ctx.device)
        bucket, quantized = Bucket(flat, [flat], [0], 0), Quantized(wire, **options)
        found[wire] = launches(partial(quantized.reduce, comm, bucket, scaling))
        found[f"{wire}, scatter"] = launches(partial(quantized.reduce_scatter, comm, bucket, scaling, shard_numel))
    shard, out = torch.randn(5000).to(ctx.device), torch.empty(ctx.size * 5000, device=ctx.device)
    alloc_buffer = partial(torch.empty, device=ctx.device)
    gather = QuantizedAllGather("int8")
    found["gather"] = launches(
        lambda: gather.gather(comm, shard, out, lambda numel, dtype: alloc_buffer(numel, dtype=dtype), async_op=False)
    )
    return found


@pytest.mark.parametrize("device", ["host", pytest.param("simulated", marks=needs_simulation)])
def test_launches_do_not_grow_with_the_ranks(device):
    how = {} if device == "host" else {"device": device}
    two, four = (run_ranks(count_launches, ranks, **how)[0] for ranks in (2, 4))
    assert two == four
    assert two["int8"] == {"coll_quantize_feedback": 1, "coll_requantize_feedback": 1, "coll_dequantize": 1}
    assert two["int8, scatter"] == {"coll_quantize_feedback": 1, "coll_reduce_wires": 1}
    assert two["gather"] == {"coll_quantize": 1, "coll_dequantize": 1}

"""Run the Python blocks of docs/coming-from.md as a rank, and print what parameters each of them ends with.

A block's first line is ```python and then: "start" for what the others begin with, "ours", "theirs" for what needs a
library that isn't here, "theirs runs"; and "horovod" where horovod.torch stands for collectives.horovod. The last line
on stdout is a JSON object by rank 0: for each block that ran, by section and number, the parameters, whether they are
those of all ranks, and whether they are others than at the start.
"""

import gc
import json
import re
import sys
from pathlib import Path

import torch
import torch.distributed as dist
from torch.distributed.fsdp import FSDPModule, FullyShardedDataParallel

import collectives.horovod

PAGE = Path(__file__).resolve().parents[2] / "docs" / "coming-from.md"


def blocks_of(page):
    """Give (section, label, code) of each Python block."""
    found, section = [], ""
    for part in re.findall(r"^## .*?$|^```python[^\n]*\n.*?^```$", page, re.DOTALL | re.MULTILINE):
        if part.startswith("## "):
            section = part.removeprefix("## ")
        else:
            first, _, rest = part.partition("\n")
            found.append((section, first.removeprefix("```python").strip(), rest.removesuffix("```")))
    return found


def full(model):
    """Give all parameters of a model, sharded or not, as one tensor in double precision."""
    if isinstance(model, FullyShardedDataParallel):
        with FullyShardedDataParallel.summon_full_params(model):
            return torch.cat([parameter.detach().double().flatten() for parameter in model.parameters()])
    values = model.parameters() if isinstance(model, FSDPModule) else model.state_dict().values()
    whole = [value.full_tensor() if hasattr(value, "full_tensor") else value for value in values]
    return torch.cat([value.detach().double().flatten() for value in whole])


def main():
    blocks = blocks_of(PAGE.read_text())
    once, each = (code for _, label, code in blocks if label == "start")
    common = {}
    exec(compile(once, "start", "exec"), common)
    collectives.horovod.install()  # theirs is horovod.torch
    ended = {}
    for number, (section, label, code) in enumerate(blocks):
        name = f"{section}: {label}: {number}"
        compiled = compile(code, name, "exec")  # what can't run here must be Python, too
        if label in ("start", "theirs"):
            continue
        names = dict(common)
        exec(compile(each, "start", "exec"), names)
        before = full(names["model"])
        exec(compiled, names)
        after = full(names["model"])
        everyone = [torch.empty_like(after) for _ in range(dist.get_world_size())]
        dist.all_gather(everyone, after)
        same = all(torch.equal(one, after) for one in everyone)
        ended[name] = {"values": after.tolist(), "same": same, "trained": not torch.equal(before, after)}
        names.clear()
        gc.collect()
        dist.barrier()
    if dist.get_rank() == 0:
        print(json.dumps(ended), flush=True)
    dist.barrier()
    dist.destroy_process_group()


if __name__ == "__main__":
    sys.exit(main())

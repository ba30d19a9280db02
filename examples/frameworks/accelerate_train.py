"""Hugging Face accelerate on our collectives: ``torchrun --nproc-per-node 2 accelerate_train.py --way backend``.

``--way``: "backend" (every collective), "auto" (DDP's gradients, chosen by time), "hook" (DDP's gradients), or "gloo"
(torch's own). ``--model``: "ddp", or "fsdp2", which torch's fully_shard makes before accelerate gets the rest:
accelerate itself shards on GPUs alone. Rank 0 prints the losses as JSON.
"""

import json

import torch
import torch.distributed as dist
from accelerate import Accelerator
from torch import nn
from torch.distributed.fsdp import fully_shard
from ways import parse_options

import collectives


def main():
    options = parse_options(model=("ddp", "fsdp2"))
    way = options.way
    # accelerate takes a group that is there.
    dist.init_process_group("collectives" if way == "backend" else "gloo")
    accelerator = Accelerator(cpu=True)
    torch.manual_seed(1)
    model = nn.Sequential(nn.Linear(16, 64), nn.Tanh(), nn.Linear(64, 4))
    data = torch.utils.data.TensorDataset(torch.randn(512, 16), torch.randint(0, 4, (512,)))
    loader = torch.utils.data.DataLoader(data, batch_size=8)
    if options.model == "fsdp2":
        for layer in (model[0], model[2], model):
            fully_shard(layer)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    optimizer, loader = accelerator.prepare(optimizer, loader)
    if options.model == "ddp":
        model = accelerator.prepare(model)
    if way == "hook":
        model.register_comm_hook(None, collectives.fused_allreduce)
    losses = []
    for inputs, targets in loader:
        loss = nn.functional.cross_entropy(model(inputs), targets)
        optimizer.zero_grad()
        accelerator.backward(loss)
        optimizer.step()
        losses.append(accelerator.reduce(loss.detach(), "mean").item())
    accelerator.wait_for_everyone()
    if accelerator.is_main_process:
        print(json.dumps({"backend": dist.get_backend(), "model": type(model).__name__, "losses": losses}), flush=True)
    accelerator.free_memory()  # Gloo may abort where a DDP object lives longer than its group
    del model, optimizer, loss
    accelerator.end_training()  # ends the process group, too


if __name__ == "__main__":
    main()

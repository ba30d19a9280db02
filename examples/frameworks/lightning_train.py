"""Lightning on our collectives: ``torchrun --nproc-per-node 2 lightning_train.py --way backend``.

``--way``: "backend", "auto", "hook" or "gloo", as in accelerate_train.py. ``--strategy``: "ddp", "spawn" and "fork"
(DDP, with ranks that Lightning starts so), "fsdp2" and "tensor" (ModelParallelStrategy). ``python lightning_train.py``
alone starts its ranks. Rank 0 prints the losses as JSON.
"""

import json
import logging

import lightning
import torch
import torch.distributed as dist
from lightning.pytorch.strategies import DDPStrategy, ModelParallelStrategy
from torch import nn
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module
from ways import parse_options

import collectives

# Not in main(), which ranks that are spawned don't run.
OPTIONS = parse_options(strategy=("ddp", "spawn", "fork", "fsdp2", "tensor"))


class Classifier(lightning.LightningModule):
    def __init__(self):
        super().__init__()
        self.layers = nn.Sequential(nn.Linear(16, 64), nn.Tanh(), nn.Linear(64, 4))
        self.losses = []

    def configure_model(self):
        if OPTIONS.strategy == "fsdp2":
            for layer in (self.layers[0], self.layers[2], self.layers):
                fully_shard(layer, mesh=self.device_mesh["data_parallel"])
        elif OPTIONS.strategy == "tensor":
            plan = {"0": ColwiseParallel(), "2": RowwiseParallel()}
            parallelize_module(self.layers, self.device_mesh["tensor_parallel"], plan)

    def on_train_start(self):
        # DDPStrategy(ddp_comm_hook=...) registers a hook on CUDA alone, and says nothing elsewhere.
        if OPTIONS.way == "hook":
            self.trainer.strategy.model.register_comm_hook(None, collectives.fused_allreduce)

    def training_step(self, batch, index):
        inputs, targets = batch
        loss = nn.functional.cross_entropy(self.layers(inputs), targets)
        self.losses.append(loss.detach().clone())
        return loss

    def configure_optimizers(self):
        return torch.optim.AdamW(self.parameters(), lr=1e-2)

    def on_train_end(self):
        # The mean of all ranks' losses, by Lightning's own gather.
        losses = self.all_gather(torch.stack(self.losses)).mean(0).tolist()
        if self.trainer.is_global_zero:
            print(json.dumps({"backend": dist.get_backend(), "losses": losses}), flush=True)


def make_strategy():
    backend = "collectives" if OPTIONS.way == "backend" else "gloo"
    if OPTIONS.strategy in ("fsdp2", "tensor"):
        data, tensor = (2, 1) if OPTIONS.strategy == "fsdp2" else (1, 2)
        return ModelParallelStrategy(
            data_parallel_size=data, tensor_parallel_size=tensor, process_group_backend=backend
        )
    start = "popen" if OPTIONS.strategy == "ddp" else OPTIONS.strategy
    return DDPStrategy(process_group_backend=backend, start_method=start)


def main():
    logging.getLogger("lightning.pytorch").setLevel(logging.WARNING)
    torch.manual_seed(1)
    data = torch.utils.data.TensorDataset(torch.randn(512, 16), torch.randint(0, 4, (512,)))
    model = Classifier()
    trainer = lightning.Trainer(
        accelerator="cpu", devices=2, strategy=make_strategy(), max_epochs=1, logger=False, enable_checkpointing=False,
        enable_progress_bar=False, enable_model_summary=False,
    )  # fmt: skip
    trainer.fit(model, torch.utils.data.DataLoader(data, batch_size=8))


if __name__ == "__main__":
    main()

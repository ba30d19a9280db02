"""Lightning on our collectives: ``torchrun --nproc-per-node 2 lightning_train.py --way backend``.

``--way``: "backend", "auto", "hook" or "gloo", as in accelerate_train.py. Rank 0 prints the losses as JSON.
"""

import json
import logging

import lightning
import torch
import torch.distributed as dist
from lightning.pytorch.strategies import DDPStrategy
from torch import nn
from ways import parse_way

import collectives


class Classifier(lightning.LightningModule):
    def __init__(self, way):
        super().__init__()
        self.way = way
        self.layers = nn.Sequential(nn.Linear(16, 64), nn.Tanh(), nn.Linear(64, 4))
        self.losses = []

    def on_train_start(self):
        # DDPStrategy(ddp_comm_hook=...) registers a hook on CUDA alone, and says nothing elsewhere.
        if self.way == "hook":
            self.trainer.strategy.model.register_comm_hook(None, collectives.fused_allreduce)

    def training_step(self, batch, index):
        inputs, targets = batch
        loss = nn.functional.cross_entropy(self.layers(inputs), targets)
        self.losses.append(loss.detach().clone())
        return loss

    def configure_optimizers(self):
        return torch.optim.AdamW(self.parameters(), lr=1e-2)


def main():
    way = parse_way()
    logging.getLogger("lightning.pytorch").setLevel(logging.WARNING)
    torch.manual_seed(1)
    data = torch.utils.data.TensorDataset(torch.randn(512, 16), torch.randint(0, 4, (512,)))
    model = Classifier(way)
    strategy = DDPStrategy(process_group_backend="collectives" if way == "backend" else "gloo")
    trainer = lightning.Trainer(
        accelerator="cpu", devices=2, strategy=strategy, max_epochs=1, logger=False, enable_checkpointing=False,
        enable_progress_bar=False, enable_model_summary=False,
    )  # fmt: skip
    trainer.fit(model, torch.utils.data.DataLoader(data, batch_size=8))
    if dist.get_rank() == 0:
        losses = [loss.item() for loss in model.losses]
        print(json.dumps({"backend": dist.get_backend(), "losses": losses}), flush=True)


if __name__ == "__main__":
    main()

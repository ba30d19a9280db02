"""transformers.Trainer on our collectives: ``torchrun --nproc-per-node 2 trainer_train.py --way backend``.

``--way``: "backend", "auto", "hook" or "gloo", as in accelerate_train.py. Rank 0 prints the losses as JSON.
"""

import json
import tempfile

import torch
import torch.distributed as dist
from torch import nn
from transformers import Trainer, TrainerCallback, TrainingArguments
from ways import parse_options

import collectives


class Classifier(nn.Module):
    def __init__(self):
        super().__init__()
        self.layers = nn.Sequential(nn.Linear(16, 64), nn.Tanh(), nn.Linear(64, 4))

    def forward(self, inputs, labels):
        logits = self.layers(inputs)
        return {"loss": nn.functional.cross_entropy(logits, labels), "logits": logits}


class Digits(torch.utils.data.Dataset):
    def __init__(self):
        generator = torch.Generator().manual_seed(1)
        self.inputs = torch.randn(512, 16, generator=generator)
        self.labels = torch.randint(0, 4, (512,), generator=generator)

    def __len__(self):
        return len(self.labels)

    def __getitem__(self, index):
        return {"inputs": self.inputs[index], "labels": self.labels[index]}


class RegisterHook(TrainerCallback):
    """Registers the hook on the DDP object that the Trainer has made."""

    def __init__(self, trainer):
        self.trainer = trainer

    def on_train_begin(self, args, state, control, **kwargs):
        self.trainer.model_wrapped.register_comm_hook(None, collectives.fused_allreduce)


def main():
    way = parse_options().way
    # The Trainer takes a group that is there; ddp_backend has names of torch's backends alone.
    dist.init_process_group("collectives" if way == "backend" else "gloo")
    with tempfile.TemporaryDirectory() as folder:
        arguments = TrainingArguments(
            folder, use_cpu=True, seed=1, max_steps=30, per_device_train_batch_size=8, learning_rate=1e-2,
            logging_steps=1, save_strategy="no", report_to="none", disable_tqdm=True, dataloader_pin_memory=False,
        )  # fmt: skip
        torch.manual_seed(1)
        trainer = Trainer(Classifier(), arguments, train_dataset=Digits())
        if way == "hook":
            trainer.add_callback(RegisterHook(trainer))
        trainer.train()
        losses = [entry["loss"] for entry in trainer.state.log_history if "loss" in entry]
        if dist.get_rank() == 0:
            found = {"backend": dist.get_backend(), "model": type(trainer.model_wrapped).__name__, "losses": losses}
            print(json.dumps(found), flush=True)
    dist.barrier()
    del trainer
    dist.destroy_process_group()


if __name__ == "__main__":
    main()

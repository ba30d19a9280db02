"""The options of transformers.Trainer; rank 0 prints all results as JSON. Arguments: the backend, a name of OPTIONS."""

import gc
import json
import os
import sys
import tempfile

import torch
import torch.distributed as dist
from transformers import LlamaConfig, LlamaForCausalLM, Trainer, TrainingArguments

import collectives  # noqa: F401  (registers the backend)

OPTIONS = {
    "accumulation": dict(
        gradient_checkpointing=True, gradient_checkpointing_kwargs={"use_reentrant": False},
        gradient_accumulation_steps=2, ddp_find_unused_parameters=True,
    ),
    "bf16": dict(bf16=True, ddp_static_graph=True),
    "fsdp": dict(fsdp="full_shard", fsdp_config={"fsdp_version": 2}),
    "dispatch": dict(accelerator_config={"dispatch_batches": True}),
}  # fmt: skip


class Tokens(torch.utils.data.Dataset):
    def __init__(self, count):
        self.tokens = torch.randint(0, 64, (count, 12), generator=torch.Generator().manual_seed(1))

    def __len__(self):
        return len(self.tokens)

    def __getitem__(self, index):
        return {"input_ids": self.tokens[index], "labels": self.tokens[index]}


def count_right(predicted):
    right = (predicted.predictions.argmax(-1) == predicted.label_ids).mean()
    return {"accuracy": float(right), "count": len(predicted.label_ids)}


def make_trainer(folder, options):
    torch.manual_seed(3)
    model = LlamaForCausalLM(
        LlamaConfig(
            vocab_size=64, hidden_size=32, intermediate_size=64, num_hidden_layers=2, num_attention_heads=2,
            num_key_value_heads=2, max_position_embeddings=16,
        )
    )  # fmt: skip
    arguments = TrainingArguments(
        folder, use_cpu=True, seed=1, max_steps=8, per_device_train_batch_size=4, learning_rate=1e-2, logging_steps=1,
        save_strategy="steps", save_steps=4, report_to="none", disable_tqdm=True, dataloader_pin_memory=False,
        **OPTIONS[options],
    )  # fmt: skip
    return Trainer(
        model, arguments, train_dataset=Tokens(256), eval_dataset=Tokens(21), compute_metrics=count_right
    )


def losses_of(trainer):
    return [entry["loss"] for entry in trainer.state.log_history if "loss" in entry]


def main():
    dist.init_process_group(sys.argv[1])
    folder = [tempfile.mkdtemp() if dist.get_rank() == 0 else None]
    dist.broadcast_object_list(folder, 0)
    trainer = make_trainer(folder[0], sys.argv[2])
    trainer.train()
    evaluated = trainer.evaluate()
    evaluated = {name: evaluated[name] for name in ("eval_loss", "eval_accuracy", "eval_count")}
    resumed = make_trainer(folder[0], sys.argv[2])
    resumed.train(resume_from_checkpoint=os.path.join(folder[0], "checkpoint-4"))
    if sys.argv[2] != "dispatch":  # on Gloo, too, a resumed run gets other batches there
        assert losses_of(resumed) == losses_of(trainer)
        for ours, theirs in zip(resumed.model.parameters(), trainer.model.parameters(), strict=True):
            assert torch.equal(ours, theirs)
    found = {"losses": losses_of(trainer), "evaluated": evaluated, "kind": type(trainer.model_wrapped).__name__}
    every = [None, None]
    dist.all_gather_object(every, found)
    if dist.get_rank() == 0:
        print(f"found {json.dumps(every)}", flush=True)
    dist.barrier()
    for each in (trainer, resumed):
        each.accelerator.free_memory()
    del trainer, resumed, each
    gc.collect()
    dist.destroy_process_group()


if __name__ == "__main__":
    main()

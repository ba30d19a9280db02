"""accelerate's collectives beside DDP; rank 0 prints all ranks' results as JSON. Argument: the backend."""

import json
import os
import sys
import tempfile

import torch
import torch.distributed as dist
from accelerate import Accelerator, utils
from torch import nn

import collectives  # noqa: F401  (registers the backend)


def collectives_of_accelerate(accelerator):
    rank, found = accelerator.process_index, {}
    for dtype in (torch.float32, torch.float64, torch.bfloat16, torch.float16, torch.int64, torch.bool):
        tensor = (torch.arange(6).reshape(2, 3) + rank).to(dtype)
        found[f"gather {dtype}"] = utils.gather({"a": tensor, "b": [tensor, tensor.t()]})
        found[f"broadcast {dtype}"] = utils.broadcast(tensor.clone(), from_process=1)
        if dtype is not torch.bool:
            found[f"sum {dtype}"] = utils.reduce({"x": tensor.clone()}, "sum")
        if dtype.is_floating_point:
            found[f"mean {dtype}"] = utils.reduce({"x": tensor.clone()}, "mean")
    found["scalar"] = accelerator.gather(torch.tensor(rank))
    found["empty"] = accelerator.gather(torch.zeros(0, 3))
    found["strided"] = accelerator.gather(torch.arange(12.0).reshape(3, 4).t()[::2] + rank)
    found["objects"] = utils.gather_object([{"rank": rank}])
    found["broadcast objects"] = utils.broadcast_object_list([rank, {"k": rank}], from_process=1)
    found["padded"] = utils.pad_across_processes(torch.arange(3 + 2 * rank).float(), pad_first=bool(rank))
    if rank == 1:
        accelerator.set_trigger()
    found["trigger"] = accelerator.check_trigger()
    with accelerator.split_between_processes(list(range(7)), apply_padding=True) as part:
        found["part"] = part
    return found


def train_and_resume(accelerator):
    torch.manual_seed(1)
    data = torch.utils.data.TensorDataset(torch.randn(37, 16), torch.randint(0, 4, (37,)))
    model = nn.Sequential(nn.Linear(16, 8), nn.Dropout(0.1), nn.Linear(8, 4))
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    loader = torch.utils.data.DataLoader(data, batch_size=4, shuffle=True)
    model, optimizer, loader = accelerator.prepare(model, optimizer, loader)

    def epoch():
        losses = []
        for inputs, targets in loader:
            with accelerator.accumulate(model):
                loss = nn.functional.cross_entropy(model(inputs), targets)
                accelerator.backward(loss)
                accelerator.clip_grad_norm_(model.parameters(), 0.5)
                optimizer.step()
                optimizer.zero_grad()
            losses.append(accelerator.gather_for_metrics(loss.detach().repeat(len(targets))).tolist())
        return losses

    first = epoch()
    folder = utils.broadcast_object_list([tempfile.mkdtemp()])[0]
    accelerator.save_state(folder)
    second = epoch()
    accelerator.load_state(folder)
    again = epoch()
    assert again == second and first != second
    gathered = [accelerator.gather_for_metrics((inputs.sum(1), targets)) for inputs, targets in loader]
    accelerator.free_memory()
    return {"first": first, "second": second, "gathered": gathered, "files": sorted(os.listdir(folder))}


def main():
    dist.init_process_group(sys.argv[1])
    configuration = utils.DataLoaderConfiguration(dispatch_batches=True, split_batches=False)
    accelerator = Accelerator(cpu=True, gradient_accumulation_steps=2, dataloader_config=configuration)
    found = {**collectives_of_accelerate(accelerator), **train_and_resume(accelerator)}
    every = utils.gather_object([{name: repr(value) for name, value in found.items()}])
    if accelerator.is_main_process:
        print(f"found {json.dumps(every)}", flush=True)
    accelerator.wait_for_everyone()
    accelerator.end_training()


if __name__ == "__main__":
    main()

"""Ray Train on our collectives: ``python ray_train.py --way backend``, or ``--way gloo``; it starts its two workers.

Prints the losses of rank 0 as JSON.
"""

import argparse
import json
import os
import tempfile
from pathlib import Path

import ray
from ray.train import RunConfig, ScalingConfig
from ray.train.torch import TorchConfig, TorchTrainer, prepare_data_loader, prepare_model


def train(config):
    import torch
    import torch.distributed as dist
    from torch import nn

    torch.set_num_threads(1)
    torch.manual_seed(1)
    model = prepare_model(nn.Sequential(nn.Linear(16, 64), nn.Tanh(), nn.Linear(64, 4)))
    data = torch.utils.data.TensorDataset(torch.randn(512, 16), torch.randint(0, 4, (512,)))
    loader = prepare_data_loader(torch.utils.data.DataLoader(data, batch_size=8))
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    losses = []
    for inputs, targets in loader:
        loss = nn.functional.cross_entropy(model(inputs), targets)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    if dist.get_rank() == 0:
        Path(config["result"]).write_text(json.dumps({"backend": dist.get_backend(), "losses": losses}))


def main():
    parser = argparse.ArgumentParser()
    parser.add_argument("--way", choices=("backend", "gloo"), default="backend")
    backend = "collectives" if parser.parse_args().way == "backend" else "gloo"
    os.environ.setdefault("RAY_TRAIN_WORKER_GROUP_START_TIMEOUT_S", "200")  # each worker imports torch and ray
    # Ray makes the process group before a worker has imported anything: before torch 2.14 the backend is registered so.
    environment = {"worker_process_setup_hook": "collectives.backend.register_backend"}
    environment["env_vars"] = {"PYTHONPATH": os.environ.get("PYTHONPATH", "")}
    ray.init(num_cpus=2, include_dashboard=False, object_store_memory=80 * 2**20, runtime_env=environment)
    with tempfile.TemporaryDirectory() as folder:
        result = Path(folder) / "result.json"
        TorchTrainer(
            train, train_loop_config={"result": str(result)}, torch_config=TorchConfig(backend=backend),
            scaling_config=ScalingConfig(num_workers=2), run_config=RunConfig(storage_path=folder),
        ).fit()  # fmt: skip
        print(result.read_text(), flush=True)
    ray.shutdown()


if __name__ == "__main__":
    main()

"""A program as people have it, written for Horovod: nothing in here knows of this project.

Digits are made up.
"""

import argparse
import json

import horovod.torch as hvd
import torch
import torch.multiprocessing as mp
import torch.nn as nn
import torch.nn.functional as F
import torch.optim as optim
import torch.utils.data.distributed
from horovod.common.exceptions import HorovodInternalError
from horovod.torch.elastic.sampler import ElasticSampler
from horovod.torch.mpi_ops import Average


class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.conv = nn.Conv2d(1, 4, kernel_size=5)
        self.fc = nn.Linear(4 * 6 * 6, 10)

    def forward(self, x):
        x = F.relu(F.max_pool2d(self.conv(x), 4))
        return F.log_softmax(self.fc(x.flatten(1)), dim=1)


class Digits(torch.utils.data.Dataset):
    def __init__(self, train):
        generator = torch.Generator().manual_seed(1 if train else 2)
        self.labels = torch.randint(10, (256 if train else 64,), generator=generator)
        self.images = torch.randn(len(self.labels), 1, 28, 28, generator=generator) * 0.3
        for image, label in zip(self.images, self.labels, strict=True):
            image[0, 2 * label : 2 * label + 8] += 1.0

    def __len__(self):
        return len(self.labels)

    def __getitem__(self, index):
        return self.images[index], self.labels[index]


def metric_average(val, name):
    return hvd.allreduce(torch.tensor(val), name=name).item()


def main():
    parser = argparse.ArgumentParser()
    parser.add_argument("--epochs", type=int, default=3)
    parser.add_argument("--lr", type=float, default=0.01)
    parser.add_argument("--workers", type=int, default=0)
    args = parser.parse_args()

    hvd.init()
    torch.manual_seed(42)
    if torch.cuda.is_available():
        torch.cuda.set_device(hvd.local_rank())
    torch.set_num_threads(1)

    kwargs = {"num_workers": args.workers}
    if args.workers and "forkserver" in mp.get_all_start_methods():
        kwargs.update(multiprocessing_context="forkserver", persistent_workers=True)
    train_dataset = Digits(train=True)
    train_sampler = torch.utils.data.distributed.DistributedSampler(
        train_dataset, num_replicas=hvd.size(), rank=hvd.rank()
    )
    train_loader = torch.utils.data.DataLoader(train_dataset, batch_size=16, sampler=train_sampler, **kwargs)
    test_dataset = Digits(train=False)
    test_sampler = torch.utils.data.distributed.DistributedSampler(
        test_dataset, num_replicas=hvd.size(), rank=hvd.rank()
    )
    test_loader = torch.utils.data.DataLoader(test_dataset, batch_size=32, sampler=test_sampler)

    model = Net()
    optimizer = optim.SGD(model.parameters(), lr=args.lr * hvd.size(), momentum=0.5)
    hvd.broadcast_parameters(model.state_dict(), root_rank=0)
    hvd.broadcast_optimizer_state(optimizer, root_rank=0)
    compression = hvd.Compression.none
    optimizer = hvd.DistributedOptimizer(
        optimizer,
        named_parameters=model.named_parameters(),
        compression=compression,
        op=Average,
        gradient_predivide_factor=1.0,
    )

    losses = []
    for epoch in range(1, args.epochs + 1):
        model.train()
        train_sampler.set_epoch(epoch)
        for data, target in train_loader:
            optimizer.zero_grad()
            loss = F.nll_loss(model(data), target)
            loss.backward()
            optimizer.step()
        losses.append(metric_average(loss.item(), "avg_loss"))

    model.eval()
    accuracy = 0.0
    with torch.no_grad():
        for data, target in test_loader:
            accuracy += (model(data).argmax(1) == target).float().sum().item()
    accuracy = metric_average(accuracy / len(test_sampler), "avg_accuracy")
    assert issubclass(HorovodInternalError, RuntimeError)
    assert len(ElasticSampler(test_dataset)) == 64 // hvd.size()
    weights = torch.cat([p.detach().flatten() for p in model.parameters()]).double().sum().item()
    found = {"rank": hvd.rank(), "size": hvd.size(), "losses": losses, "accuracy": accuracy, "weights": weights}
    found["local"] = [hvd.local_rank() == hvd.rank(), hvd.local_size()]
    print("FOUND " + json.dumps(found), flush=True)


if __name__ == "__main__":
    main()

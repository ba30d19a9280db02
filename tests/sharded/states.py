"""A model with parameters of all kinds, and a comparison of state dicts."""

import contextlib

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh

from collectives.sharded import fully_shard, get_model_state_dict


def full_state_dict(model, **options):
    return get_model_state_dict(model, full_state_dict=True, **options)


class Net(nn.Module):
    """A tied weight, a parameter of 0 dimensions, of 0 elements, of fewer than the ranks, a buffer."""

    def __init__(self, seed=3):
        super().__init__()
        torch.manual_seed(seed)
        self.emb = nn.Embedding(11, 7)
        self.net = nn.Sequential(nn.Linear(7, 5), nn.LayerNorm(5), nn.Linear(5, 7))
        self.conv = nn.Conv1d(7, 3, 3, padding=1)
        self.head = nn.Linear(7, 11, bias=False)
        self.head.weight = self.emb.weight
        self.scale = nn.Parameter(torch.tensor(1.5))
        self.none = nn.Parameter(torch.empty(0, 3))
        self.small = nn.Parameter(torch.ones(1))
        self.register_buffer("seen", torch.zeros(2))
        self.register_buffer("table", torch.arange(3.0), persistent=False)

    def forward(self, ids):
        h = self.net(self.emb(ids))
        h = h + self.conv(h.t().unsqueeze(0)).squeeze(0).sum(0, keepdim=True).t()
        return self.head(h) * self.scale + self.none.sum() + self.small


IDS = torch.arange(11)


def sharded(seed=3, device=None, **how):
    """Return the model as two units, over all ranks unless a mesh is given."""
    with torch.device(device or "cpu"):
        model = Net(seed)
    how.setdefault("mesh", init_device_mesh("cpu", (dist.get_world_size(),)))
    fully_shard(model.net, **how)
    return fully_shard(model, **how)


def adamw(params):
    """Make torch's for-loop AdamW."""
    return torch.optim.AdamW(params, 0.01, foreach=False)


def optimizer_of(make, model):
    """Return an optimizer of two groups, by the parameters' dimensions, which shards keep."""
    matrices = [param for param in model.parameters() if param.dim() > 1]
    others = [param for param in model.parameters() if param.dim() < 2]
    return make([{"params": matrices, "weight_decay": 0.1}, {"params": others}])


def train(model, optimizer, steps=3):
    """Train on the same batch on all ranks, so that any number of them gives the same."""
    for _ in range(steps):
        optimizer.zero_grad()
        model(IDS).square().mean().backward()
        optimizer.step()


@contextlib.contextmanager
def one_thread():
    """Compute as the ranks do, whose sums are of one thread."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        yield
    finally:
        torch.set_num_threads(before)


def differences(ours, theirs, path=""):
    """Return what differs in a bit, a shape, a dtype or a type between two state dicts."""
    if isinstance(theirs, dict) and isinstance(ours, dict):
        found = [f"{path}.{key}: in one" for key in ours.keys() ^ theirs.keys()]
        return found + [each for key in ours.keys() & theirs.keys() for each in differences(
            ours[key], theirs[key], f"{path}.{key}")]  # fmt: skip
    if isinstance(theirs, list) and isinstance(ours, list):
        found = [f"{path}: {len(ours)} and {len(theirs)}"] if len(ours) != len(theirs) else []
        pairs = enumerate(zip(ours, theirs, strict=False))
        return found + [each for at, (a, b) in pairs for each in differences(a, b, f"{path}.{at}")]
    if isinstance(theirs, torch.Tensor):
        same = type(ours) is type(theirs) and ours.dtype == theirs.dtype and ours.shape == theirs.shape
        return [] if same and torch.equal(ours, theirs) else [f"{path}: {ours} and {theirs}"]
    return [] if ours == theirs else [f"{path}: {ours} and {theirs}"]

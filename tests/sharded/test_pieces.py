"""States that are loaded from ranks' pieces in memory: bit for bit what a checkpoint on the disk gives."""

import functools

import pytest
import torch

from collectives.sharded import get_model_state_dict, load, save
from collectives.sharded.state.checkpoint import load_state
from collectives.sharded.state.dist_wrapper import DistWrapper, get_module_scheduler
from collectives.sharded.state.optimizer import get_optimizer_state_dict
from collectives.sharded.state.piece_reader import PieceReader
from collectives.sharded.state.rank_piece import RankPiece, read_piece
from tests.ranks import run_ranks
from tests.sharded.states import differences, optimizer_of, sharded, train


def states(model, optimizer):
    return (
        get_model_state_dict(model, full_state_dict=True),
        get_optimizer_state_dict(model, optimizer, full_state_dict=True),
    )


def takes(ctx, folder):
    model = sharded(comm=ctx.communicator())
    optimizer = optimizer_of(lambda groups: torch.optim.AdamW(groups, 0.01), model)
    train(model, optimizer)
    with torch.no_grad():
        model.seen.fill_(4)
    save(folder / "saved", model, optimizer)
    piece = RankPiece()
    piece.take(model, [optimizer], ctx.rank == 0)
    before = piece.data.data_ptr()
    train(model, optimizer)  # what was taken stays as it is
    save(folder / "later", model, optimizer)
    kept = piece.head, piece.data.clone()
    piece.take(model, [optimizer], ctx.rank == 0)
    assert piece.data.data_ptr() == before
    return kept


def loads(ctx, folder, pieces, holders):
    """Load from pieces on the ranks that have them, and from the disk; return both states."""
    found = []
    for way in ("pieces", "disk"):
        model = sharded(seed=5, comm=ctx.communicator())
        optimizer = optimizer_of(lambda groups: torch.optim.AdamW(groups, 0.5), model)
        if way == "disk":
            load(folder / "saved", model, optimizer)
        else:
            ranks = DistWrapper(get_module_scheduler(model), "load", "pieces")
            here = {at: pieces[at] for at, rank in enumerate(holders) if rank == ctx.rank}
            load_state(ranks, functools.partial(PieceReader, ranks, "the pieces", here), model, optimizer)
        assert optimizer.param_groups[0]["lr"] == 0.01 and torch.equal(model.seen, torch.full((2,), 4.0))
        train(model, optimizer)
        found.append(states(model, optimizer))
    return found


@pytest.mark.parametrize(
    ("before", "after", "holders"),
    [(3, 2, (0, 1, 0)), pytest.param(2, 3, (2, 1), marks=pytest.mark.thorough),
     pytest.param(4, 1, (0, 0, 0, 0), marks=pytest.mark.thorough)],
)  # fmt: skip
def test_pieces_are_loaded_on_other_ranks(tmp_path, before, after, holders):
    pieces = run_ranks(takes, before, tmp_path)
    for memory, disk in run_ranks(loads, after, tmp_path, pieces, holders):
        assert not differences(memory[0], disk[0]) and not differences(memory[1], disk[1])


def test_what_all_ranks_have_is_in_one_piece_alone():
    model = torch.nn.Linear(64, 64)
    optimizer = torch.optim.AdamW(model.parameters(), 0.01)
    model(torch.ones(64)).sum().backward()
    optimizer.step()
    first, other = RankPiece(), RankPiece()
    first.take(model, [optimizer], True)
    other.take(model, [optimizer], False)
    size = sum(param.numel() for param in model.parameters()) * 12
    assert first.data.numel() >= size > 10 * other.data.numel()


def tensors_of(piece):
    state = read_piece(piece.head, piece.data)
    flat = {f"model.{name}": value for name, value in state["model"].items()}
    for name, entries in state["optimizer"]["state"].items():
        flat |= {f"{name}.{key}": value for key, value in entries.items()}
    return flat, state["optimizer"]["param_groups"]


def taken_again(make):
    """A piece that is taken again has what a new one has, whatever changes between."""
    model = torch.nn.Sequential(torch.nn.Linear(3, 3), torch.nn.BatchNorm1d(3))
    optimizer = make(model.parameters())
    piece = RankPiece()

    def step():
        optimizer.zero_grad()
        model(torch.randn(4, 3)).sum().backward()
        optimizer.step()

    def set_rate():
        optimizer.param_groups[0]["lr"] = 0.5

    def replace_buffer():
        model[1].running_mean = torch.full((3,), 7.0)

    def replace_memory():
        model[0].weight.data = torch.full((3, 3), 9.0)

    def replace_state():
        state = optimizer.state[model[0].weight]
        state.update({key: value.clone() if isinstance(value, torch.Tensor) else value for key, value in state.items()})

    def add_group():
        optimizer.add_param_group({"params": [torch.nn.Parameter(torch.ones(2))], "lr": 3.0})
        model.register_parameter("extra", optimizer.param_groups[-1]["params"][0])

    others = (set_rate, replace_buffer, replace_memory, replace_state, add_group)
    for change in (step, *(each for other in others for each in (step, other)), step):
        change()
        piece.take(model, [optimizer], True)
        new = RankPiece()
        new.take(model, [optimizer], True)
        (ours, groups), (theirs, new_groups) = tensors_of(piece), tensors_of(new)
        assert not differences(ours, theirs) and groups == new_groups, change


def test_pieces_that_are_taken_again():
    taken_again(lambda params: torch.optim.AdamW(params, 0.01))
    taken_again(lambda params: torch.optim.SGD(params, 0.01, momentum=0.9))
    taken_again(lambda params: torch.optim.AdamW(params, torch.tensor(0.01)))


class Extra(torch.nn.Module):
    calls = 0

    def get_extra_state(self):
        self.calls += 1
        return torch.tensor(float(self.calls))


def test_a_state_that_is_computed_anew_is_taken_anew():
    model = torch.nn.Sequential(torch.nn.Linear(2, 2), Extra())
    optimizer = torch.optim.SGD(model.parameters(), 0.01)
    piece = RankPiece()
    for calls in (1, 2, 3):
        piece.take(model, [optimizer], True)
        assert read_piece(piece.head, piece.data)["model"]["1._extra_state"] == calls

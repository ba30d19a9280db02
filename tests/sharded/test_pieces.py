"""States that are loaded from ranks' pieces in memory: bit for bit what a checkpoint on the disk gives."""

import functools

import pytest
import torch

from collectives.sharded import get_model_state_dict, load, save
from collectives.sharded.state.checkpoint import load_state
from collectives.sharded.state.dist_wrapper import DistWrapper, get_module_scheduler
from collectives.sharded.state.optimizer import get_optimizer_state_dict
from collectives.sharded.state.piece_reader import PieceReader
from collectives.sharded.state.rank_piece import RankPiece
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
    [(3, 2, (0, 1, 0)), pytest.param(2, 3, (2, 1), marks=pytest.mark.sampled(one_in=2)),
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

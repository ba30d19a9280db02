"""Train the GPT of char_gpt.py in shards, in a job that goes on when ranks die.

    python -m collectives.run -n 3 --elastic 1:4 examples/elastic_char_gpt.py --kill 1:20
    torchrun --nnodes 1:2 --nproc-per-node 2 --rdzv-backend collectives --rdzv-endpoint localhost:29400 \\
        examples/elastic_char_gpt.py

Each rank keeps its shards of parameters and optimizer state a second time in another rank's memory.
With --kill 1:20 rank 1's process kills itself in its step 20: the others rebuild its shards from the
copies and go on, and the launcher starts it again; it joins at a commit. Kill a process by hand to
do the same. Shows who is there after each change. The last line on stdout is one JSON object; the
exit status is 1 if a text was left out of an epoch, or if the loss isn't below that of the letters'
frequencies alone.
"""

import argparse
import json
import os
import signal
import sys
import time

import char_gpt
import jobs
import torch
from torch.nn import functional

import collectives
from collectives import elastic
from collectives.sharded import Checkpointer, fully_shard

FIRST_LIFE = os.environ.get("TORCHELASTIC_RESTART_COUNT", "0") == "0"


def parse_arguments():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    option, count = parser.add_argument, jobs.at_least_1
    option("--epochs", type=count, default=2, help="(default: %(default)s)")
    option("--texts", type=count, default=2048, help="of each epoch (default: %(default)s)")
    option("--batch-size", type=count, default=8, help="texts a step and rank (default: %(default)s)")
    option("--context", type=count, default=64, help="characters of a text (default: %(default)s)")
    option("--layers", type=count, default=2, help="(default: %(default)s)")
    option("--width", type=count, default=128, help="a multiple of 32 (default: %(default)s)")
    option("--learning-rate", type=float, default=4e-3, help="(default: %(default)s)")
    option("--every", type=count, default=1, help="commits until the copies are refreshed (default: %(default)s)")
    option("--replicas", type=count, default=1, help="copies of each shard (default: %(default)s)")
    option("--checkpoints", help="folder for a checkpoint after each epoch")
    option("--kill", metavar="RANK:STEP", help="the rank, as started, that kills itself, and when")
    return parser.parse_args()


class Training:
    """What the ranks have in common; the state holds all that changes."""

    def __init__(self, arguments):
        self.arguments = arguments
        self.text, self.held_out = char_gpt.load_text(1 << 20)
        self.victim, self.last_step = map(int, (arguments.kill or "-1:-1").split(":"))
        self.steps = 0  # of this process
        self.checkpointer = Checkpointer(arguments.checkpoints) if arguments.checkpoints else None

    def make_model(self):
        """Return model and optimizer, over the ranks that are there now; the same values on all of them."""
        comm, arguments = elastic.communicator(), self.arguments
        torch.manual_seed(1)
        model = char_gpt.GPT(arguments.layers, arguments.width, arguments.context).to(comm.device)
        for block in model.blocks:
            fully_shard(block, comm=comm)
        fully_shard(model, comm=comm)
        return model, torch.optim.AdamW(model.parameters(), lr=arguments.learning_rate, weight_decay=0.1)

    def die_if_asked(self):
        self.steps += 1
        if FIRST_LIFE and os.environ.get("RANK") == str(self.victim) and self.steps == self.last_step:
            os.kill(os.getpid(), signal.SIGKILL)

    def run(self, state):
        """Train from the state on. Called again after each change of the ranks."""
        comm, arguments = elastic.communicator(), self.arguments
        model, optimizer = self.make_model()
        state.attach(model, optimizer)
        jobs.say(comm, f"epoch {state.epoch}, commit {state.commits}: {comm.size} ranks")
        trained = torch.zeros(arguments.texts, dtype=torch.int64)  # on this rank since the last commit

        def commit():
            total = trained.to(comm.device, copy=True)
            comm.all_reduce(total)
            trained.zero_()
            state.counts, state.commits = state.counts + total.cpu(), state.commits + 1
            state.commit()

        while state.epoch < arguments.epochs:
            loader = torch.utils.data.DataLoader(range(arguments.texts), arguments.batch_size, sampler=state.sampler)
            for number, indices in enumerate(loader):
                starts = indices * ((len(self.text) - arguments.context - 1) // arguments.texts)
                texts = (part.to(comm.device) for part in char_gpt.cut(self.text, arguments.context, starts))
                optimizer.zero_grad()
                char_gpt.loss_of(model, *texts).backward()
                self.die_if_asked()
                optimizer.step()
                trained[indices] += 1
                state.sampler.record_batch(number, arguments.batch_size)
                commit()
            state.epoch += 1
            state.sampler.set_epoch(state.epoch)
            commit()
            if self.checkpointer is not None:
                self.checkpointer.save(state.epoch, model, optimizer)
        return comm, self.validation_loss(model, comm), state

    @torch.no_grad()
    def validation_loss(self, model, comm):
        """Return the loss on held-out texts, the same ones on all ranks: a sharded forward is collective."""
        starts = torch.linspace(0, len(self.held_out) - self.arguments.context - 2, 64, dtype=torch.float64).long()
        texts, following = char_gpt.cut(self.held_out, self.arguments.context, starts)
        return char_gpt.loss_of(model, texts.to(comm.device), following.to(comm.device)).item()

    def loss_of_frequencies(self):
        """Return the held-out loss of a guess by how often each character comes."""
        often = torch.bincount(self.text, minlength=char_gpt.CHARACTERS).double() + 1
        return functional.nll_loss((often / often.sum()).log().expand(len(self.held_out), -1), self.held_out).item()


def main():
    arguments, began = parse_arguments(), time.perf_counter()
    collectives.init()
    training = Training(arguments)
    state = elastic.ShardedState(
        sampler=elastic.ElasticSampler(range(arguments.texts)), epoch=0, commits=0,
        counts=torch.zeros(arguments.texts, dtype=torch.int64), every=arguments.every, replicas=arguments.replicas,
        checkpointer=training.checkpointer,
    )  # fmt: skip
    comm, loss, state = elastic.run(training.run)(state)
    limit = training.loss_of_frequencies()
    complete = int(state.counts.min()) >= arguments.epochs
    result = {
        "ranks": comm.size, "commits": state.commits, "every_text_in_each_epoch": complete,
        "repeated_texts": int(state.counts.sum()) - arguments.epochs * arguments.texts,
        "loss": round(loss, 4), "loss_of_frequencies": round(limit, 4),
        "seconds": round(time.perf_counter() - began, 1),
    }  # fmt: skip
    if comm.rank == 0:
        print(json.dumps(result), flush=True)
    return 0 if complete and loss < limit else 1


if __name__ == "__main__":
    sys.exit(main())

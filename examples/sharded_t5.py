"""Teach a small T5, in shards, to shorten the docstrings of Python's standard library to their first lines.

    torchrun --nproc-per-node 2 examples/sharded_t5.py

Also runs under mpirun, under srun, or alone. As in PyTorch's advanced FSDP tutorial, but with
nothing to download: a T5 of Hugging Face's transformers made from its configuration, reading bytes
as ByT5 does. Each T5Block is a unit, by `transformer_auto_wrap_policy`. Parameters are gathered and
used in bf16, and kept in fp32; the next unit is prefetched while one is computed. At the end the
parameters are gathered unit by unit on rank 0, which saves them, loads them into an unsharded T5,
and shortens docstrings of the held-out set with it. The last line on stdout is one JSON object; the
exit status is 1 if the parameters differ between ranks, if the loss on held-out docstrings isn't
below that of the bytes' frequencies alone, or if what was saved isn't what was trained.
"""

import argparse
import ast
import functools
import os
import sys
import sysconfig
import time
from pathlib import Path

import jobs
import torch
import torch.distributed as dist
from torch.nn import functional
from transformers import T5Config, T5ForConditionalGeneration
from transformers.models.t5.modeling_t5 import T5Block

from collectives.sharded import (
    BackwardPrefetch,
    FullStateDictConfig,
    MixedPrecision,
    ShardedDataParallel,
    ShardingStrategy,
    StateDictType,
)
from collectives.sharded.wrap import transformer_auto_wrap_policy

PAD, END, FIRST_BYTE = 0, 1, 3  # as in ByT5; 2 is for what isn't known, which a byte never is
SYMBOLS = 256 + FIRST_BYTE
IGNORED = -100  # a label that cross_entropy leaves out
HELD_OUT = 10  # every tenth docstring
SHORTEST, LONGEST = 16, 48  # bytes of a first line
MIXED = MixedPrecision(param_dtype=torch.bfloat16, reduce_dtype=torch.bfloat16, buffer_dtype=torch.bfloat16)


def parse_arguments():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    option, count = parser.add_argument, jobs.at_least_1
    option("--steps", type=count, default=300, help="(default: %(default)s)")
    option("--batch-size", type=count, default=16, help="docstrings a step and rank (default: %(default)s)")
    option("--bytes", type=count, default=96, help="of a docstring that are read (default: %(default)s)")
    option("--layers", type=count, default=2, help="of the encoder and of the decoder (default: %(default)s)")
    option("--width", type=count, default=128, help="a multiple of 32, the width of a head (default: %(default)s)")
    option("--learning-rate", type=float, default=3e-3, help="the highest (default: %(default)s)")
    option("--limit", type=count, default=4 << 20, help="bytes of source text to read (default: %(default)s)")
    option("--samples", type=int, default=3, help="docstrings to shorten at the end (default: %(default)s)")
    option("--seed", type=int, default=1, help="of the parameters and the docstrings' order (default: %(default)s)")
    option("--checkpoint", type=Path, default=Path("out/sharded_t5.pt"), help="the parameters (default: %(default)s)")
    option("--plot", type=Path, default=Path("out/sharded_t5.png"), help="the plot's file (default: %(default)s)")
    arguments = parser.parse_args()
    if arguments.width % 32:
        parser.error(f"--width must be a multiple of 32, not {arguments.width}")
    return arguments


# ---- The text.


def load_docstrings(limit):
    """Return pairs of a docstring and its first line, from the standard library's modules by name, each once."""
    library = Path(sysconfig.get_path("stdlib"))
    pairs, read = {}, 0
    for file in sorted([*library.glob("*.py"), *library.glob("*/*.py")]):
        if read > limit:
            break
        if file.parent.name in ("test", "site-packages"):
            continue
        text = file.read_text("utf-8", errors="replace")
        read += len(text)
        for node in ast.walk(ast.parse(text)):
            if isinstance(node, ast.Module | ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef):
                text = ast.get_docstring(node) or ""
                line, _, rest = text.partition("\n")
                if rest.strip() and SHORTEST <= len(line.encode()) <= LONGEST:
                    pairs[text] = line
    return list(pairs.items())


def to_symbols(text, longest):
    return torch.tensor([FIRST_BYTE + byte for byte in text.encode()[:longest]] + [END])


def to_text(symbols):
    return bytes(int(one) - FIRST_BYTE for one in symbols if one >= FIRST_BYTE).decode(errors="replace")


class Docstrings:
    """What a rank sees: docstrings of its own in each step, and its part of the held-out ones."""

    def __init__(self, arguments, comm):
        self.arguments, self.comm = arguments, comm
        pairs = load_docstrings(arguments.limit)
        self.held_out = pairs[::HELD_OUT]
        self.pairs = [pair for number, pair in enumerate(pairs) if number % HELD_OUT]

    def batch(self, pairs):
        """Return what T5 takes: symbols, where there are some, and the symbols to say."""
        pad = functools.partial(torch.nn.utils.rnn.pad_sequence, batch_first=True)
        symbols = pad([to_symbols(text, self.arguments.bytes) for text, _ in pairs], padding_value=PAD)
        labels = pad([to_symbols(line, LONGEST) for _, line in pairs], padding_value=IGNORED)
        device = self.comm.device
        return {
            "input_ids": symbols.to(device),
            "attention_mask": (symbols != PAD).long().to(device),
            "labels": labels.to(device),
        }

    def of_step(self, step):
        seed = (self.arguments.seed * 1_000_003 + step) * 4096 + self.comm.rank
        chosen = torch.randint(
            len(self.pairs), (self.arguments.batch_size,), generator=torch.Generator().manual_seed(seed)
        )
        return self.batch([self.pairs[number] for number in chosen])

    @torch.no_grad()
    def held_out_loss(self, model):
        """Return the mean loss over all held-out docstrings: each rank reads all, in the same number of forwards."""
        size = self.arguments.batch_size
        parts = [self.held_out[start : start + size] for start in range(0, len(self.held_out), size)]
        total = sum(model(**self.batch(part)).loss.item() * len(part) for part in parts)
        return total / len(self.held_out)

    def loss_of_frequencies(self):
        """Return the held-out loss of a guess by how often each symbol comes in first lines, whatever was read."""
        said = [torch.cat([to_symbols(line, LONGEST) for _, line in pairs]) for pairs in (self.pairs, self.held_out)]
        often = torch.bincount(said[0], minlength=SYMBOLS).double() + 1
        return functional.nll_loss((often / often.sum()).log().expand(len(said[1]), -1), said[1]).item()


# ---- The model.


def make_t5(layers, width):
    """Return a T5 with its first parameters; embedding and output share one table, as in the first T5."""
    return T5ForConditionalGeneration(
        T5Config(
            vocab_size=SYMBOLS,
            d_model=width,
            d_kv=32,
            num_heads=width // 32,
            d_ff=4 * width,
            num_layers=layers,
            num_decoder_layers=layers,
            dropout_rate=0.0,
            pad_token_id=PAD,
            eos_token_id=END,
            decoder_start_token_id=PAD,
            use_cache=False,
        )
    )


def shard(model, comm):
    """Shard a T5 in place, each block a unit; the embedding, which three places share, stays in the outermost."""
    device = torch.device(comm.device)
    return ShardedDataParallel(
        model,
        auto_wrap_policy=functools.partial(transformer_auto_wrap_policy, transformer_layer_cls={T5Block}),
        mixed_precision=MIXED,
        sharding_strategy=ShardingStrategy.FULL_SHARD,
        backward_prefetch=BackwardPrefetch.BACKWARD_PRE,
        forward_prefetch=True,
        limit_all_gathers=True,
        device_id=device if device.type == "cuda" else None,
    )


def save(model, path, comm):
    """Save the full parameters in fp32 on rank 0; the other ranks gather one unit at a time for it."""
    whole = FullStateDictConfig(offload_to_cpu=True, rank0_only=True)
    with ShardedDataParallel.state_dict_type(model, StateDictType.FULL_STATE_DICT, whole):
        state = model.state_dict()
    if comm.rank == 0:
        path.parent.mkdir(parents=True, exist_ok=True)
        unfinished = path.with_name(f"{path.name}.unfinished")
        torch.save(state, unfinished)
        os.replace(unfinished, path)
    dist.barrier()


def compare_saved(model, docstrings, arguments, comm):
    """Load what was saved, by rank 0; return whether it is what was trained, bit for bit, its loss, and the model."""
    plain, found = make_t5(arguments.layers, arguments.width).to(comm.device), torch.zeros(2, device=comm.device)
    with ShardedDataParallel.summon_full_params(model, writeback=False):
        if comm.rank == 0:
            plain.load_state_dict(torch.load(arguments.checkpoint, weights_only=True))
            saved = plain.state_dict()
            found[0] = all(torch.equal(value, saved[name]) for name, value in model.named_parameters())
    if comm.rank == 0:
        found[1] = docstrings.held_out_loss(plain.eval())
    comm.broadcast(found, root=0)
    return bool(found[0]), found[1].item(), plain


# ---- Training.


def train_sharded(model, docstrings, arguments, comm):
    """Make all steps; return the losses, mean of the ranks, and the norms of the gradients."""
    optimizer = torch.optim.AdamW(model.parameters(), lr=arguments.learning_rate, betas=(0.9, 0.98), weight_decay=0.01)
    schedule = torch.optim.lr_scheduler.OneCycleLR(
        optimizer, arguments.learning_rate, arguments.steps, pct_start=0.2, cycle_momentum=False
    )
    losses, norms = torch.empty(arguments.steps, device=comm.device), []
    with jobs.progress(comm, "T5", arguments.steps) as bar:
        for step in range(arguments.steps):
            optimizer.zero_grad()
            loss = model(**docstrings.of_step(step)).loss
            loss.backward()
            norms.append(float(model.clip_grad_norm_(1.0)))
            optimizer.step()
            schedule.step()
            losses[step] = loss.detach().float()
            bar.set_postfix(loss=f"{loss.item():.3f}")
            bar.update()
            if (step + 1) % 25 == 0 or step + 1 == arguments.steps:
                jobs.say(comm, f"step {step + 1:5d}  loss {loss.item():.4f}  norm {norms[-1]:.3f}")
    comm.all_reduce(losses, op="avg")
    return losses.tolist(), norms


def save_plot(path, losses, norms, lines, title):
    """Draw the loss of each step, with these lines across it, and the norms."""
    figure, left, right = jobs.new_figure(title)
    left.plot(range(1, len(losses) + 1), losses, linewidth=1.2, label="training")
    for (name, value), style in zip(lines.items(), ("--", ":"), strict=True):
        left.axhline(value, color="gray", linestyle=style, label=f"{name}: {value:.3f}")
    left.set(xlabel="step", ylabel="loss (nats a byte)", ylim=(0, None), title="Loss, mean of the ranks")
    left.legend()
    right.plot(range(1, len(norms) + 1), norms, linewidth=1.2, color="tab:orange")
    right.set(xlabel="step", ylabel="norm", yscale="log", title="The gradient, before it is clipped to 1")
    jobs.save(figure, path)


def shorten(model, docstrings, count):
    """Return held-out docstrings, what the model makes of each, and the first line."""
    model.eval()
    pairs = docstrings.held_out[:: max(1, len(docstrings.held_out) // count)][:count]
    batch = docstrings.batch(pairs)
    del batch["labels"]
    said = model.generate(**batch, max_new_tokens=LONGEST, do_sample=False, use_cache=True)
    return [(text, to_text(symbols), line) for (text, line), symbols in zip(pairs, said, strict=True)]


def train(arguments, comm):
    """Train, save, load and compare; return the result's dictionary, and whether it is a success."""
    torch.manual_seed(arguments.seed)
    docstrings = Docstrings(arguments, comm)
    model = make_t5(arguments.layers, arguments.width).to(comm.device)
    parameters = sum(parameter.numel() for parameter in model.parameters())
    jobs.say(
        comm,
        f"{comm.size} ranks, engine {comm.engine.name}, device {comm.device}: {len(docstrings.pairs):,} docstrings to "
        f"train on, {len(docstrings.held_out):,} held out, {parameters:,} parameters, {arguments.steps} steps of "
        f"{comm.size} x {arguments.batch_size}",
    )
    model = shard(model, comm)
    start = time.perf_counter()
    losses, norms = train_sharded(model, docstrings, arguments, comm)
    seconds = time.perf_counter() - start
    model.eval()
    of_frequencies = docstrings.loss_of_frequencies()
    held_out = docstrings.held_out_loss(model)
    save(model, arguments.checkpoint, comm)
    identical = jobs.identical_on_all_ranks(model)
    same, saved_loss, plain = compare_saved(model, docstrings, arguments, comm)
    result = {
        "ranks": comm.size,
        "engine": comm.engine.name,
        "steps": arguments.steps,
        "parameters": parameters,
        "identical_parameters": identical,
        "saved_is_trained": same,
        "loss_of_frequencies": round(of_frequencies, 4),
        "loss_first": round(losses[0], 4),
        "loss_last": round(losses[-1], 4),
        "held_out_loss": round(held_out, 4),
        "held_out_loss_of_saved_in_fp32": round(saved_loss, 4),
        "seconds": round(seconds, 2),
    }
    if comm.rank == 0:
        for text, ours, line in shorten(plain, docstrings, arguments.samples) if arguments.samples else ():
            jobs.say(comm, f"\n| {' '.join(text.split())[:100]} ...\n| T5 says:    {ours}\n| first line: {line}")
        lines = {"frequencies alone": of_frequencies, "held out": held_out}
        save_plot(arguments.plot, losses, norms, lines, f"T5 of {parameters:,} parameters in {comm.size} shards")
    return result, identical and same and held_out < of_frequencies


if __name__ == "__main__":
    sys.exit(jobs.run(train, parse_arguments()))

"""Train a small GPT, character by character, on the source text of Python's own standard library.

    torchrun --nproc-per-node 2 examples/char_gpt.py --wire int8
    torchrun --nproc-per-node 2 examples/char_gpt.py --compare bf16,int8
    torchrun --nproc-per-node 2 examples/char_gpt.py --sharded

Also runs under mpirun, under srun, or alone. The gradients are sent in the format that --wire names,
and clipped by the hook; with --compare the same steps are made with fp32 and then with each of the
wires, from the same initial parameters. With --sharded a rank keeps only its shards of parameters,
gradients and optimizer state, and one or two blocks in full at a time. The last line on stdout is
one JSON object; the exit status is 1 if the parameters differ between ranks, if the loss on held-out
text isn't below that of the letters' frequencies alone, or if a compared wire's loss is above fp32's
by more than the tolerance, or its bytes are more than it promises.
"""

import argparse
import copy
import sys
import sysconfig
import time
from pathlib import Path

import jobs
import torch
from torch import nn
from torch.nn import functional
from torch.nn.parallel import DistributedDataParallel

import collectives
from collectives.optim import AdamW
from collectives.sharded import fully_shard, get_model_state_dict

CHARACTERS = 128  # ASCII; what isn't becomes a question mark
HELD_OUT = 10  # every tenth file
# Bytes on the wire by fp32's: the values, a scale of 4 bytes for 256 of 8 bits, and padding.
MOST_BYTES = {"bf16": 0.502, "fp16": 0.502, "fp8_e4m3": 0.27, "fp8_e5m2": 0.27, "int8": 0.27}


def parse_arguments():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    option, count = parser.add_argument, jobs.at_least_1
    option("--wire", default="fp32", help="fp32, bf16, fp16, fp8_e4m3, fp8_e5m2 or int8")
    option("--compare", type=lambda text: text.split(","), help="wires, with commas between, to compare with fp32")
    option("--sharded", action="store_true", help="shard each block and the rest, in place of DDP")
    option("--error-feedback", action=argparse.BooleanOptionalAction, default=True, help="of the wires but fp32")
    option("--tolerance", type=float, default=0.01, help="by which a wire's loss may be higher (default: %(default)s)")
    option("--steps", type=count, default=200, help="(default: %(default)s)")
    option("--batch-size", type=count, default=8, help="texts a step and rank (default: %(default)s)")
    option("--context", type=count, default=64, help="characters of a text (default: %(default)s)")
    option("--layers", type=count, default=2, help="(default: %(default)s)")
    option("--width", type=count, default=128, help="a multiple of 32, the width of a head (default: %(default)s)")
    option("--learning-rate", type=float, default=4e-3, help="the highest (default: %(default)s)")
    option("--limit", type=count, default=1 << 20, help="bytes of text to read (default: %(default)s)")
    option("--held-out", type=count, default=128, help="held-out texts to find the loss of (default: %(default)s)")
    option("--sample", type=int, default=200, help="characters to write at the end (default: %(default)s)")
    option("--seed", type=int, default=1, help="of the parameters, the texts, the sample (default: %(default)s)")
    option("--plot", type=Path, default=Path("out/char_gpt.png"), help="the plot's file (default: %(default)s)")
    arguments = parser.parse_args()
    if arguments.width % 32:
        parser.error(f"--width must be a multiple of 32, not {arguments.width}")
    return arguments


def load_text(limit):
    """Return two tensors of characters, to train on and held out: the standard library's modules, by name."""
    parts, read = ([], []), 0
    for number, file in enumerate(sorted(Path(sysconfig.get_path("stdlib")).glob("*.py"))):
        text = file.read_text("utf-8", errors="replace").encode("ascii", errors="replace")
        parts[number % HELD_OUT == HELD_OUT - 1].append(text)
        read += len(text)
        if read > limit and all(parts):
            break
    return [torch.frombuffer(bytearray(b"".join(part)), dtype=torch.uint8).long() for part in parts]


def cut(text, context, starts):
    """Return texts of `context` characters from these places on, and for each character the one that follows."""
    places = starts[:, None] + torch.arange(context)
    return text[places], text[places + 1]


# ---- The model.


class Block(nn.Module):
    """Attention to the characters before, then two layers on each; both added to what came in."""

    def __init__(self, width):
        super().__init__()
        self.heads = width // 32
        self.norm_attention, self.norm_layers = nn.LayerNorm(width), nn.LayerNorm(width)
        self.query_key_value = nn.Linear(width, 3 * width)
        self.out = nn.Linear(width, width)
        self.layers = nn.Sequential(nn.Linear(width, 4 * width), nn.GELU(), nn.Linear(4 * width, width))

    def forward(self, x):
        batch, context, width = x.shape
        parts = self.query_key_value(self.norm_attention(x)).view(batch, context, 3, self.heads, 32)
        query, key, value = parts.permute(2, 0, 3, 1, 4)
        seen = functional.scaled_dot_product_attention(query, key, value, is_causal=True)
        x = x + self.out(seen.transpose(1, 2).reshape(batch, context, width))
        return x + self.layers(self.norm_layers(x))


class GPT(nn.Module):
    """Characters in, the logits of the next one at each place out."""

    def __init__(self, layers, width, context):
        super().__init__()
        self.context = context
        self.characters = nn.Embedding(CHARACTERS, width)
        self.places = nn.Embedding(context, width)
        self.blocks = nn.ModuleList(Block(width) for _ in range(layers))
        self.head = nn.Sequential(nn.LayerNorm(width), nn.Linear(width, CHARACTERS))
        for table in (self.characters, self.places):
            nn.init.normal_(table.weight, std=0.5)
        # All characters are about alike likely at first, and each block adds little to what came in.
        for layer in (self.head[-1], *(layer for block in self.blocks for layer in (block.out, block.layers[-1]))):
            nn.init.normal_(layer.weight, std=0.02)
            nn.init.zeros_(layer.bias)

    def forward(self, characters):
        x = self.characters(characters) + self.places.weight[: characters.shape[1]]
        for block in self.blocks:
            x = block(x)
        return self.head(x)


def loss_of(model, texts, following):
    """Return the mean over all characters, in nats."""
    return functional.cross_entropy(model(texts).flatten(0, 1), following.flatten())


@torch.no_grad()
def write(model, start, count, seed):
    """Continue a text by so many characters."""
    device = next(model.parameters()).device
    generator = torch.Generator(device).manual_seed(seed)
    text = torch.tensor([list(start.encode("ascii"))], device=device)
    for _ in range(count):
        likely = functional.softmax(model(text[:, -model.context :])[:, -1] / 0.8, dim=-1)
        text = torch.cat([text, torch.multinomial(likely, 1, generator=generator)], dim=1)
    return bytes(text[0].tolist()).decode("ascii")


# ---- Training.


class Texts:
    """What a rank sees: texts of its own in each step, and its part of the held-out ones."""

    def __init__(self, arguments, comm):
        self.arguments, self.comm = arguments, comm
        self.text, self.held_out = load_text(arguments.limit)

    def of_step(self, step):
        arguments = self.arguments
        generator = torch.Generator().manual_seed((arguments.seed * 1_000_003 + step) * 4096 + self.comm.rank)
        starts = torch.randint(len(self.text) - arguments.context, (arguments.batch_size,), generator=generator)
        return (part.to(self.comm.device) for part in cut(self.text, arguments.context, starts))

    @torch.no_grad()
    def validation_loss(self, model):
        """Return the loss on the held-out texts, which lie evenly in their files."""
        last = len(self.held_out) - self.arguments.context - 1
        starts = torch.linspace(0, last, self.arguments.held_out, dtype=torch.float64).long()
        total = torch.zeros(1, dtype=torch.float64)
        for some in starts[self.comm.rank :: self.comm.size].split(32):
            texts, following = (part.to(self.comm.device) for part in cut(self.held_out, self.arguments.context, some))
            total += loss_of(model, texts, following).double().cpu() * len(some)
        total = total.to(self.comm.device)
        self.comm.all_reduce(total)
        return total.item() / len(starts)

    def loss_of_frequencies(self):
        """Return the held-out loss of a guess by how often each character comes, whatever came before it."""
        often = torch.bincount(self.text, minlength=CHARACTERS).double() + 1
        return functional.nll_loss((often / often.sum()).log().expand(len(self.held_out), -1), self.held_out).item()


def shard(model, state):
    """Shard a GPT in place: each block a unit, the tables and the head another; return it."""
    for block in model.blocks:
        fully_shard(block, hook_state=state)
    return fully_shard(model, hook_state=state)


def unsharded(model, initial, comm):
    """Return, on rank 0, a model of its own with the parameters of a sharded one; on the others the initial one."""
    found = copy.deepcopy(initial)
    parameters = get_model_state_dict(model, full_state_dict=True, cpu_offload=True, rank0_only=True)
    if comm.rank == 0:
        found.load_state_dict(parameters)
    return found


def train_on(wire, initial, texts, arguments, comm):
    """Make all steps on one wire; return the losses (mean of the ranks), what else is reported, and the model.

    The model is rank 0's, with nothing sharded.
    """
    compressed = wire != "fp32"
    state = collectives.HookState(wire=wire, error_feedback=compressed and arguments.error_feedback, max_norm=1.0)
    model = copy.deepcopy(initial)
    if arguments.sharded:
        trained = shard(model, state)
    else:
        trained = DistributedDataParallel(model)
        trained.register_comm_hook(state, collectives.fused_allreduce)
    optimizer = AdamW(trained.parameters(), lr=arguments.learning_rate, betas=(0.9, 0.95), weight_decay=0.1)
    schedule = torch.optim.lr_scheduler.OneCycleLR(
        optimizer, arguments.learning_rate, arguments.steps, pct_start=0.1, cycle_momentum=False
    )
    losses = torch.empty(arguments.steps, device=comm.device)
    start = time.perf_counter()
    with jobs.progress(comm, wire, arguments.steps) as bar:
        for step in range(arguments.steps):
            optimizer.zero_grad()
            loss = loss_of(trained, *texts.of_step(step))
            loss.backward()
            optimizer.step()
            schedule.step()
            losses[step] = loss.detach()
            bar.set_postfix(loss=f"{loss.item():.3f}")
            bar.update()
            if (step + 1) % 50 == 0 or step + 1 == arguments.steps:
                jobs.say(comm, f"{wire:>9}  step {step + 1:5d}  loss {loss.item():.4f}  norm {state.grad_norm:.3f}")
    comm.all_reduce(losses, op="avg")
    seconds = time.perf_counter() - start
    found = {
        "loss": texts.validation_loss(model),
        "bytes_a_step": state.stats()["bytes_on_wire"] // arguments.steps,
        "seconds": round(seconds, 2),
        "identical": jobs.identical_on_all_ranks(model),
    }
    jobs.say(comm, f"{wire:>9}  held-out loss {found['loss']:.4f}  {found['bytes_a_step']:,} bytes a step")
    if arguments.sharded:
        model = unsharded(model, initial, comm)
    return losses.tolist(), found, model


def prepare(arguments, comm):
    """Give the texts, the model that the training starts from, and the number of its parameters."""
    torch.manual_seed(arguments.seed)
    texts = Texts(arguments, comm)
    model = GPT(arguments.layers, arguments.width, arguments.context).to(comm.device)
    return texts, model, sum(parameter.numel() for parameter in model.parameters())


def save_plot(path, losses, results, title):
    """Draw the losses, smoothed, and the held-out loss over the bytes."""
    figure, left, right = jobs.new_figure(title)
    for wire, values in losses.items():
        width = max(1, len(values) // 20)
        smooth = torch.tensor(values).unfold(0, width, 1).mean(1).tolist()
        left.plot(range(width, len(values) + 1), smooth, label=wire, linewidth=1.2)
        right.scatter(results[wire]["bytes_a_step"] / 2**20, results[wire]["loss"], label=wire)
    left.set(xlabel="step", ylabel="loss (nats a character)", title=f"Training loss, mean of {width} steps")
    left.legend()
    right.set(xlabel="MiB sent by a rank in a step", ylabel="loss (nats a character)", title="Held-out text")
    right.set(xlim=(0, None), ylim=(0, None))
    right.legend()
    jobs.save(figure, path)


def train(arguments, comm):
    """Train on each wire; return the result's dictionary, and whether it is a success."""
    texts, initial, parameters = prepare(arguments, comm)
    jobs.say(
        comm,
        f"{comm.size} ranks, engine {comm.engine.name}, device {comm.device}: {len(texts.text):,} characters to train "
        f"on, {len(texts.held_out):,} held out, {parameters:,} parameters, {arguments.steps} steps of {comm.size} x "
        f"{arguments.batch_size} texts of {arguments.context} characters",
    )
    wires = list(dict.fromkeys(["fp32", *arguments.compare])) if arguments.compare else [arguments.wire]
    losses, results = {}, {}
    for wire in wires:
        losses[wire], results[wire], model = train_on(wire, initial, texts, arguments, comm)

    of_frequencies = texts.loss_of_frequencies()
    identical = all(found["identical"] for found in results.values())
    passed = identical and all(found["loss"] < of_frequencies for found in results.values())
    result = {
        "ranks": comm.size,
        "engine": comm.engine.name,
        "steps": arguments.steps,
        "parameters": parameters,
        "sharded": arguments.sharded,
        "error_feedback": arguments.error_feedback,
        "identical_parameters": identical,
        "loss_of_frequencies": round(of_frequencies, 4),
        "losses": {wire: round(found["loss"], 5) for wire, found in results.items()},
        "bytes_a_step": {wire: found["bytes_a_step"] for wire, found in results.items()},
        "seconds": {wire: found["seconds"] for wire, found in results.items()},
    }
    if arguments.compare:
        plain = results["fp32"]
        others = {wire: found for wire, found in results.items() if wire != "fp32"}
        loss_ratios = {wire: found["loss"] / plain["loss"] for wire, found in others.items()}
        result["loss_ratios"] = {wire: round(ratio, 5) for wire, ratio in loss_ratios.items()}
        passed = passed and max(loss_ratios.values(), default=1.0) <= 1 + arguments.tolerance
        if comm.size > 1:
            bytes_ratios = {wire: found["bytes_a_step"] / plain["bytes_a_step"] for wire, found in others.items()}
            result["bytes_ratios"] = {wire: round(ratio, 4) for wire, ratio in bytes_ratios.items()}
            passed = passed and all(ratio <= MOST_BYTES.get(wire, 1.0) for wire, ratio in bytes_ratios.items())
    if comm.rank == 0:
        if arguments.sample > 0:
            text = write(model, "def ", arguments.sample, arguments.seed)
            jobs.say(comm, "".join(f"\n| {line}" for line in text.splitlines()) + "\n")
        title = f"A GPT of {parameters:,} parameters on Python's standard library, {comm.size} ranks"
        save_plot(arguments.plot, losses, results, title)
    return result, passed


if __name__ == "__main__":
    sys.exit(jobs.run(train, parse_arguments()))

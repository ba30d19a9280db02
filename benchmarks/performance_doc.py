"""Write the tables of the README, docs/performance.md and docs/which-way.md from the committed results.

    python benchmarks/performance_doc.py

Writes the text between the marks ``<!-- NAME -->`` and ``<!-- end -->`` of these pages anew. All
figures come from benchmarks/results; of several rows of one measurement the last one counts.
docs/performance.md says how to measure them.
"""

import json
import re
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
RESULTS = ROOT / "benchmarks" / "results"
PAGES = (ROOT / "README.md", ROOT / "docs" / "performance.md", ROOT / "docs" / "which-way.md")
MARK = re.compile(r"(<!-- (\w+) -->\n).*?(<!-- end -->)", re.DOTALL)
KIB, MIB = 1 << 10, 1 << 20
MODELS = {
    "8xLinear1024": "8 x Linear(1024)", "8xLinear2048": "8 x Linear(2048)", "3xLinear128": "3 x Linear(128)",
    "gpt6x384": "char-GPT, 6 x 384", "161 tensors": "161 small tensors",
}  # fmt: skip
MPIS = {"mpi4py-openmpi": "Open MPI", "mpi4py-intelmpi": "Intel MPI"}
TITLES = {"c10d collectives": "our backend", "mpi4py": "best mpi4py", "gloo": "Gloo", "deepspeed": "DeepSpeed"}
# File of results: the front end, our step's key, the peer, its step's key.
STEPS = {
    "ddp_step_mapped": ("DDP with our hook, no optimizer", "ours_ms", "DDP, Gloo", "gloo_ms"),
    "ddp_step_backend": ("DDP on our backend, no optimizer", "backend_ms", "DDP, Gloo", "gloo_ms"),
    "horovod_step": ("`hvd.DistributedOptimizer`", "hvd_ms", "DDP, Gloo", "gloo_ms"),
    "sharded_step": ("`fully_shard`", "ours_ms", "FSDP2, Gloo", "fsdp2_ms"),
    "sharded_step_backend": ("FSDP2 on our backend", "fsdp2_backend_ms", "FSDP2, Gloo", "fsdp2_ms"),
}


def read_lines(name):
    return [json.loads(line) for line in (RESULTS / f"{name}.jsonl").read_text().splitlines()]


def read_bench():
    """Return {(op, ranks, nodes, name, bytes): row}; of an operation with both forms the rows in place."""
    found = {}
    for row in read_lines("bench"):
        key = row["op"], row["ranks"], row["nodes"], row["name"], row["bytes"]
        if row["in_place"] or key not in found or not found[key]["in_place"]:
            found[key] = row
    return found


def show_size(nbytes):
    return f"{nbytes // MIB} MiB" if nbytes >= MIB else f"{nbytes // KIB} KiB"


def show_time(us):
    """Return a time with three digits, in us or ms."""
    value, unit = (us / 1e3, "ms") if us >= 1e3 else (us, "us")
    return f"{value:,.{0 if value >= 100 else 1 if value >= 10 else 2}f} {unit}"


def table(header, body, rows):
    """Return a table without its empty columns, and below it what its rows were measured with."""
    kept = [at for at in range(len(header)) if any(row[at] != "-" for row in body)]
    header, *body = ([row[at] for at in kept] for row in (header, *body))
    lines = ["| " + " | ".join(cells) + " |" for cells in (header, *body)]
    versions = {name: text for row in rows for name, text in row.get("versions", {"torch": row.get("torch")}).items()}
    words = [*dict.fromkeys(f"{row['machine']}, {row['cores']} cores" for row in rows)]
    words += [f"{name} {text.partition('+')[0]}" for name, text in versions.items() if text and name != "host"]
    commits = ", ".join(dict.fromkeys(row["commit"] for row in rows))
    words += [f"commit {commits}", max(row["time"] for row in rows)[:10]]
    loads = [row["load"] for row in rows if "load" in row]
    words += [f"load {min(loads):.1f} to {max(loads):.1f}"] if loads else []
    return "\n".join([lines[0], "|---" * len(header) + "|", *lines[1:], "", f"Measured on: {'; '.join(words)}."])


def all_reduce(names=("c10d collectives", "mpi4py", "gloo", "deepspeed"), ranks=2, nodes=1, sizes=None, first=None):
    """Return the times of all-reduce: ours and those of the peers, of all sizes or of these.

    ``first``: a row that comes before, and the row of results that it is from.
    """
    rows = read_bench()
    sizes = sizes or sorted({key[-1] for key in rows if key[:3] == ("all_reduce", ranks, nodes)})
    host = "host" if nodes == 1 else f"host on {nodes} machines"
    body, used = ([first[0]], [first[1]]) if first else ([], [])
    for size in sizes:
        cells = []
        for name in (host, f"{host} zero-copy", *names):
            each = MPIS if name == "mpi4py" else [name]
            found = [rows.get(("all_reduce", ranks, nodes, who, size)) for who in each]
            best = min(filter(None, found), key=lambda row: row["time_us"], default=None)
            which = f" ({MPIS[best['name']]})" if best and name == "mpi4py" else ""
            cells.append(show_time(best["time_us"]) + which if best else "-")
            used += [best] if best else []
        body.append([f"all-reduce of {show_size(size)}" if first else show_size(size), *cells])
    title = f"{ranks} ranks, medians" if first else "all-reduce"
    return table([title, "ours", "ours, shared memory", *(TITLES[name] for name in names)], body, used)


def readme():
    """Return the README's table: all-reduce of three sizes, and the step of a model."""
    step = next(row for row in reversed(read_lines("ddp_step_mapped")) if row["model"] == "8xLinear1024")
    what = f"DDP, forward and backward, {MODELS[step['model']]}, {step['gradient_bytes'] / 1e6:.1f} MB of gradients"
    cells = [what, "-", show_time(step["ours_ms"] * 1e3), "-", show_time(step["gloo_ms"] * 1e3)]
    return all_reduce(("mpi4py", "gloo"), sizes=(KIB, MIB, 25 * MIB), first=(cells, step))


def operations():
    """Return for the other operations our time, and those of the best mpi4py and of Gloo as multiples of it."""
    rows = read_bench()
    sizes, body, used = (KIB, 8 * KIB, 64 * KIB, MIB, 16 * MIB), [], []
    for op in sorted({key[0] for key in rows} - {"all_reduce"}):
        cells = []
        for size in sizes:
            ours, *peers = (rows.get((op, 2, 1, name, size)) for name in ("host", *MPIS, "gloo"))
            best = min(filter(None, peers[:-1]), key=lambda row: row["time_us"], default=None)
            ratios = [f"{row['time_us'] / ours['time_us']:.3g}" if row else "-" for row in (best, peers[-1])]
            cells.append(f"{show_time(ours['time_us'])}; {'; '.join(ratios)}" if ours else "-")
            used += filter(None, (ours, best, peers[-1]))
        body.append([op.replace("_", "-"), *cells])
    return table(["operation", *map(show_size, sizes)], body, used)


def steps():
    """Return the times of training steps and of the peer's; the last row of each model and number of ranks."""
    body, used = [], []
    for name, (what, ours, peer, theirs) in STEPS.items():
        latest = {(row["model"], row.get("optimizer"), row["ranks"]): row for row in read_lines(name)}
        for (model, optimizer, ranks), row in latest.items():
            if name != "sharded_step" or optimizer == "torch":
                times = [row[key] for key in (ours, theirs)]
                cells = [show_time(times[0] * 1e3), peer, show_time(times[1] * 1e3), f"{times[1] / times[0]:.2f}"]
                body.append([f"{what}, {MODELS[model]}", str(ranks), *cells])
                used.append(row)
    return table(["step", "ranks", "ours", "peer", "peer's time", "peer's time divided by ours"], body, used)


def horovod():
    """Return the times of Horovod's operations beside torch.distributed's on Gloo."""
    rows = {(row["way"], row["nbytes"], row["tensors"]): row for row in read_lines("horovod_ops")}
    body = []
    for way, size, count in (*(("allreduce_", size, 1) for size in (KIB, MIB, 25 * MIB)), ("async", KIB, 100)):
        times = [rows[each, size, count]["us"] for each in (way, "gloo")]
        what = f"`hvd.allreduce_` of {show_size(size)}" if count == 1 else "100 x `hvd.allreduce_async` of 1 KiB"
        body.append([what, *map(show_time, times), f"{times[1] / times[0]:.1f}"])
    return table(["operation", "ours", "Gloo", "Gloo's time divided by ours"], body, rows.values())


def which_way():
    """Return the seconds of an epoch in each way, for each model the last row."""
    rows = {(row["way"], row["model"]): row for row in read_lines("which_way")}
    ways, models = ([*dict.fromkeys(key[at] for key in rows)] for at in (0, 1))
    cells = {key: f"{row['seconds']:.2f} s" for key, row in rows.items()}
    body = [[way, *(cells.get((way, model), "-") for model in models)] for way in ways]
    return table(["an epoch", *(f"{model} model" for model in models)], body, [*rows.values()])


TABLES = {
    "readme": readme,
    "all_reduce": all_reduce,
    "four_ranks": lambda: all_reduce(("c10d collectives", "mpi4py", "gloo"), 4),
    "hosts": lambda: all_reduce(("gloo",), 4, 2),
    "operations": operations,
    "steps": steps,
    "horovod": horovod,
    "which_way": which_way,
}


if __name__ == "__main__":
    for page in PAGES:
        page.write_text(MARK.sub(lambda mark: f"{mark[1]}{TABLES[mark[2]]()}\n{mark[3]}", page.read_text()))
        print(f"tables: {page}")

"""Write the tables and plots of docs/performance.md and the README from the committed results.

    python benchmarks/performance_doc.py             # needs matplotlib
    python benchmarks/performance_doc.py --tables    # no plots

Writes the text between the marks ``<!-- NAME -->`` and ``<!-- end -->`` of both pages anew, and
draws docs/performance_all_reduce.png and docs/performance_steps.png. All numbers come from
benchmarks/results.
"""

import argparse
import json
import re
import sys
from pathlib import Path

from collectives.bench.report import is_ours

HERE = Path(__file__).resolve().parent
ROOT = HERE.parent
RESULTS = HERE / "results"
PAGES = (ROOT / "README.md", ROOT / "docs" / "performance.md")
MARK = re.compile(r"(<!-- (\w+) -->\n).*?(<!-- end -->)", re.DOTALL)

KIB, MIB = 1 << 10, 1 << 20
SIZES = (KIB, 16 * KIB, 64 * KIB, 256 * KIB, MIB, 4 * MIB, 25 * MIB, 256 * MIB)
NAMES = {"openmpi": "Open MPI", "mpich": "MPICH", "intelmpi": "Intel MPI"}
MACHINES = {"xeon": "Intel Xeon", "epyc": "AMD EPYC"}
FILES = {"xeon": "bench_all_reduce_2_ranks_xeon", "epyc": "bench_all_reduce_2_ranks"}
MODELS = {
    "8xLinear1024": "8 x Linear(1024)", "8xLinear2048": "8 x Linear(2048)", "3xLinear128": "3 x Linear(128)",
    "gpt6x384": "char-GPT, 6 x 384", "resnet50": "ResNet-50", "bert": "BERT-base", "161 tensors": "161 small tensors",
}  # fmt: skip
CALLS = {
    "all_reduce": "`all_reduce`", "all_gather": "`all_gather_into_tensor`", "reduce_scatter": "`reduce_scatter_tensor`",
    "all_to_all": "`all_to_all_single`",
}  # fmt: skip
LISTS = ("resnet50", "gpt2_124m", "llama3_8b_layer")


def bench_rows(name):
    """Return {(op, implementation, bytes): row} of a file of the bench; where both were measured,
    the rows in place.
    """
    found = {}
    for row in sorted(json.loads((RESULTS / f"{name}.json").read_text())["rows"], key=lambda row: row["in_place"]):
        who = "ours" if is_ours(row) else row["engine"]
        found[row["op"], who + ("_shared" if row["zero_copy"] else ""), row["bytes"]] = row
    return found


def lines_of(name):
    return [json.loads(line) for line in (RESULTS / f"{name}.jsonl").read_text().splitlines()]


def show_size(nbytes):
    return f"{nbytes // MIB} MiB" if nbytes >= MIB else f"{nbytes // KIB} KiB"


def show_time(us):
    """Return a time with three digits, in us or ms."""
    value, unit = (us / 1e3, "ms") if us >= 1e3 else (us, "us")
    return f"{value:,.{0 if value >= 100 else 1 if value >= 10 else 2}f} {unit}"


def table(header, rows):
    lines = ["| " + " | ".join(cells) + " |" for cells in (header, *rows)]
    return "\n".join([lines[0], "|---" * len(header) + "|", *lines[1:]])


def best_mpi(rows, op, nbytes, binding=""):
    """Return the row of the fastest MPI that was measured, from C or by a Python binding."""
    found = [rows.get((op, binding + who, nbytes)) for who in NAMES]
    return min(filter(None, found), key=lambda row: row["time_us"])


def ways(rows, nbytes, op="all_reduce"):
    """Return the cells of a size: ours, ours in shared memory, Gloo, the best MPI."""
    mpi = best_mpi(rows, op, nbytes)
    times = [show_time(rows[op, who, nbytes]["time_us"]) for who in ("ours", "ours_shared", "gloo")]
    return [*times, f"{show_time(mpi['time_us'])} ({NAMES[mpi['engine']]})"]


def readme():
    """Return the README's table, all of one machine."""
    rows = bench_rows(FILES["xeon"])
    step = next(row for row in lines_of("ddp_step_mapped") if row["model"] == "8xLinear1024")
    one = rows["all_reduce", "ours", MIB]
    assert step["machine"] == one["machine"] and step["torch"] == one["versions"]["torch"]
    header = ["2 ranks, medians", "ours", "ours, shared memory", "Gloo", "best MPI"]
    megabytes = step["gradient_bytes"] / 1e6
    first = [f"DDP, forward and backward, {MODELS[step['model']]}, {megabytes:.1f} MB of gradients", "-",
             show_time(step["ours_ms"] * 1e3), show_time(step["gloo_ms"] * 1e3), "-"]  # fmt: skip
    sizes = [[f"all-reduce of {show_size(size)}", *ways(rows, size)] for size in (KIB, MIB, 25 * MIB)]
    torch = step["torch"].partition("+")[0]
    where = f"On {one['cores']} cores of an {MACHINES['xeon']} (AVX-512, a virtual machine), torch {torch}:"
    return f"{where}\n\n{table(header, [first, *sizes])}"


def all_reduce(machine):
    rows = bench_rows(FILES[machine])
    header = ["bytes", "ours", "ours, shared memory", "Gloo", "best MPI", "DeepSpeed"]
    deepspeed = [show_time(rows["all_reduce", "deepspeed", size]["time_us"]) for size in SIZES]
    return table(header, [[show_size(s), *ways(rows, s), d] for s, d in zip(SIZES, deepspeed, strict=True)])


def four_ranks():
    rows = bench_rows("bench_all_reduce_4_ranks_xeon")
    header = ["bytes", "ours", "Gloo", "Open MPI", "Intel MPI"]
    return table(
        header,
        [
            [show_size(size), *(show_time(rows["all_reduce", who, size]["time_us"]) for who in
                                ("ours", "gloo", "openmpi", "intelmpi"))]
            for size in (KIB, MIB, 25 * MIB, 64 * MIB)
        ],
    )  # fmt: skip


def operations():
    """Return the peers' times by ours for the other operations, on both machines."""
    header, body = ["bytes", "machine", "reduce-scatter", "all-gather", "broadcast", "all-to-all"], []
    for machine, name in (("xeon", "bench_other_operations_2_ranks_xeon"), ("epyc", "bench_other_operations_2_ranks")):
        rows = bench_rows(name)
        for size in (KIB, 64 * KIB, MIB, 16 * MIB, 64 * MIB):
            cells = []
            for op in ("reduce_scatter", "all_gather", "broadcast", "all_to_all"):
                ours = rows[op, "ours", size]["time_us"]
                peers = rows[op, "gloo", size]["time_us"], best_mpi(rows, op, size)["time_us"]
                cells.append("; ".join(f"{peer / ours:.3g}" for peer in peers))
            body.append([show_size(size), MACHINES[machine], *cells])
    return table(header, body)


def from_python():
    """Return the times of the best MPI by mpi4py by ours, in a loop over one array and with fresh data."""
    sizes, head = (64, KIB, 8 * KIB), ["operation", "ours, 1 KiB", "best mpi4py, 1 KiB"]
    looped, fresh = (bench_rows(f"bench_python{kind}_2_ranks_xeon") for kind in ("", "_fresh"))
    body = []
    for op in dict.fromkeys(op for op, _, _ in looped):
        peer = best_mpi(looped, op, KIB, "mpi4py-")
        named = f"{show_time(peer['time_us'])} ({NAMES[peer['engine'].removeprefix('mpi4py-')]})"
        cells = [show_time(looped[op, "ours", KIB]["time_us"]), named]
        for rows in (looped, fresh):
            for size in sizes:
                best = best_mpi(rows, op, size, "mpi4py-")["time_us"]
                cells.append(
                    "; ".join(f"{best / rows[op, who, size]['time_us']:.2f}" for who in ("ours", "ours_shared"))
                )
        body.append([op.replace("_", "-"), *cells])
    shown = [f"{size} B" if size < KIB else show_size(size) for size in sizes]
    return table([*head, *shown, *(f"fresh, {size}" for size in shown)], body)


def step_rows():
    """Return (what, peer, peer's ms, our ms, machine, load) of each step that was measured beside a
    peer.
    """
    found = []
    for row in lines_of("ddp_step_mapped"):
        what = f"DDP, {MODELS[row['model']]}, no optimizer"
        found.append((what, "DDP, Gloo", row["gloo_ms"], row["ours_ms"], row))
    for row in lines_of("ddp_models"):
        name = next(shown for key, shown in MODELS.items() if row["model"].startswith(key))
        what = f"DDP, {name}, batch {row['batch_size']}"
        found.append((what, "DDP, Gloo", row["step_ms"]["plain"], row["step_ms"]["hook"], row))
    for row in lines_of("horovod_step"):
        found.append((f"`hvd`, {MODELS[row['model']]}", "DDP, Gloo", row["gloo_ms"], row["hvd_ms"], row))
    for row in lines_of("sharded_step"):
        if row["optimizer"] == "ours":
            found.append((f"shards, {MODELS[row['model']]}", "FSDP2, Gloo", row["fsdp2_ms"], row["ours_ms"], row))
    return found


def steps():
    header = ["step", "ours", "peer", "the peer's", "times as fast", "machine", "load"]
    body = [
        [what, show_time(ours * 1e3), peer, show_time(theirs * 1e3), f"{theirs / ours:.2f}",
         MACHINES["xeon" if "Xeon" in row["machine"] else "epyc"], str(row.get("load", "not recorded"))]
        for what, peer, theirs, ours, row in step_rows()
    ]  # fmt: skip
    return table(header, body)


def memory():
    """Return the peak of a rank in shards beside FSDP2: the latest row of each."""
    latest = {(row["model"], row["optimizer"], row["way"]): row for row in lines_of("sharded_memory")}
    body = []
    for (model, optimizer, way), row in latest.items():
        if way == "fsdp2":
            ours = latest[model, optimizer, "ours"]["peak"]
            named = "`collectives.optim.AdamW`" if optimizer == "ours" else "torch's AdamW(foreach)"
            cells = [f"{value / MIB:.1f} MiB" for value in (ours, row["peak"])]
            body.append([f"{MODELS[model]}, {named}", *cells, f"{ours / row['peak']:.2f}"])
    return table(["model, optimizer", "`fully_shard`", "FSDP2, Gloo", "of FSDP2's"], body)


def horovod():
    rows = {(row["way"], row["nbytes"], row["tensors"]): row for row in lines_of("horovod_ops")}
    body = []
    for size in (KIB, MIB, 25 * MIB):
        cells = [rows[way, size, 1]["us"] for way in ("allreduce_", "gloo")]
        body.append([f"`hvd.allreduce_` of {show_size(size)}", *map(show_time, cells), f"{cells[1] / cells[0]:.1f}"])
    cells = [rows[way, KIB, 100]["us"] for way in ("async", "gloo")]
    body.append(["100 tensors of 1 KiB, `hvd.allreduce_async`", *map(show_time, cells), f"{cells[1] / cells[0]:.0f}"])
    return table(["operation", "ours", "Gloo", "times as fast"], body)


def kernels():
    pack = {(row["case"], row.get("list")): row for row in lines_of("kernels_pack")}
    adamw = {(row["case"], row.get("list")): row for row in lines_of("kernels_adamw")}
    kinds = (
        ("`pack` fp32 to fp32", "`torch.cat(..., out=)`", pack, "pack_fp32_fp32", "cat_out_ms"),
        ("`pack` fp32 to bf16, scale, norm", "`torch.cat`, `mul`, `to`, `norm`", pack, "pack_fp32_bf16_scale_norm",
         "chain_ms"),
        ("`unpack` bf16 to fp32, scale, add", "torch's chain", pack, "unpack_bf16_fp32_scale_add", "chain_ms"),
        ("`optim.AdamW`, clip factor, bf16 copy", "`_foreach_mul_`, `AdamW(fused=True)`, `_foreach_copy_`", adamw,
         "clip_copy", "torch_ms"),
        ("`optim.AdamW` alone", "`AdamW(fused=True)` alone", adamw, "optimizer", "torch_ms"),
        ("norm, clip, AdamW", "`clip_grad_norm_`, `AdamW(fused=True)`", adamw, "norm_clip", "torch_ms"),
    )  # fmt: skip
    body = [
        [shown, peer, *(f"{rows[case, each][key] / rows[case, each]['ours_ms']:.2f}" for each in LISTS)]
        for shown, peer, rows, case, key in kinds
    ]
    return table(["kernel", "peer", "ResNet-50", "GPT-2 124M", "one Llama-8B layer"], body)


def hosts():
    rows = bench_rows("bench_all_reduce_2_hosts_of_2_ranks")
    body = []
    for size in (4 * KIB, 256 * KIB, MIB, 25 * MIB):
        ours, shared, gloo = (rows["all_reduce", who, size]["time_us"] for who in ("ours", "ours_shared", "gloo"))
        body.append([show_size(size), *map(show_time, (ours, shared, gloo)), f"{gloo / ours:.2f}, {gloo / shared:.2f}"])
    return table(["bytes", "ours", "ours, shared memory", "Gloo", "times as fast"], body)


def backend():
    """Return the times of torch.distributed's calls on our backend and on Gloo, on 2 and 4 ranks."""
    two, four = bench_rows("bench_backend_2_ranks"), bench_rows("bench_backend_4_ranks")
    body = []
    for op in ("all_reduce", "all_gather", "reduce_scatter", "all_to_all"):
        for size in (KIB, MIB, 25 * MIB):
            ours, gloo = (two[op, who, size]["time_us"] for who in ("backend", "gloo"))
            wide = [four[op, who, size]["time_us"] for who in ("backend", "gloo")]
            body.append([CALLS[op], show_size(size), show_time(ours), show_time(gloo), f"{ours / gloo:.3f}",
                         f"{wide[0] / wide[1]:.3f}"])  # fmt: skip
    return table(["call", "bytes", "ours", "Gloo", "ours by Gloo's", "the same, 4 ranks"], body)


def backend_steps():
    """Return what DDP without a hook, and FSDP2, add to a step on our backend, by what they add on Gloo."""
    rows = [("DDP", row, "no_sync", "gloo", {"backend": "", "backend_view": ", gradients as bucket views"})
            for row in lines_of("ddp_step_backend")]  # fmt: skip
    rows += [("FSDP2", row, "alone", "fsdp2", {"fsdp2_backend": "", "fsdp2_backend_alloc": ", in the engine's memory"})
             for row in lines_of("sharded_step_backend")]  # fmt: skip
    body = []
    for front_end, row, base, peer, ways in rows:
        for way, what in ways.items():
            added = row["added"][way]
            times = [show_time(row[f"{name}_ms"] * 1e3) for name in (base, peer, way)]
            body.append([f"{front_end}, {MODELS[row['model']]}{what}", str(row["ranks"]), *times,
                         f"{added[0] if isinstance(added, list) else added:.2f}"])  # fmt: skip
    return table(["step", "ranks", "without communication", "Gloo", "ours", "added, by what Gloo adds"], body)


TABLES = {
    "backend": backend, "backend_steps": backend_steps,
    "readme": readme, "xeon": lambda: all_reduce("xeon"), "epyc": lambda: all_reduce("epyc"), "four_ranks": four_ranks,
    "operations": operations, "from_python": from_python, "steps": steps, "memory": memory, "horovod": horovod,
    "kernels": kernels, "hosts": hosts,
}  # fmt: skip


def written(text):
    """Return a page with its tables made anew. Raises KeyError for a mark that has none."""
    return MARK.sub(lambda mark: f"{mark[1]}{TABLES[mark[2]]()}\n{mark[3]}", text)


def draw_all_reduce(pyplot, path):
    styles = {
        "ours": ("ours", "#000000", "-", "o"),
        "ours_shared": ("ours, shared memory", "#b2182b", "-", "s"),
        "gloo": ("Gloo", "#2166ac", "--", "^"),
        "mpi": ("best of Open MPI, MPICH, Intel MPI", "#1b7837", "-.", "D"),
        "deepspeed": ("DeepSpeed", "#762a83", ":", "v"),
    }
    figure, panels = pyplot.subplots(1, 2, figsize=(11, 4.4), sharey=True, layout="constrained")
    for axes, (machine, name) in zip(panels, FILES.items(), strict=True):
        rows = bench_rows(name)
        sizes = sorted({size for _, _, size in rows})
        for who, (label, colour, dash, marker) in styles.items():
            times = [
                (best_mpi(rows, "all_reduce", size) if who == "mpi" else rows["all_reduce", who, size])["time_us"]
                for size in sizes
            ]
            axes.plot(sizes, times, dash, color=colour, marker=marker, markersize=4, label=label)
        axes.set(xscale="log", yscale="log", xlabel="bytes", title=f"all-reduce, 2 ranks, {MACHINES[machine]}")
        ticks = [size for size in sizes if size != 16 * MIB]  # too near to 25 MiB
        axes.set_xticks(ticks, [show_size(size).replace("iB", "").replace(" ", "") for size in ticks])
        axes.minorticks_off()
        axes.grid(True, color="#d0d0d0", linewidth=0.5)
    panels[0].set_ylabel("time (us), median")
    panels[0].legend(fontsize=8)
    figure.savefig(path, dpi=100)
    pyplot.close(figure)


def draw_steps(pyplot, path):
    rows = step_rows()[::-1]
    figure, axes = pyplot.subplots(figsize=(11, 4.4), layout="constrained")
    ratios = [ours / theirs for _, _, theirs, ours, _ in rows]
    axes.barh([f"{what.replace('`', '')}, by {peer}" for what, peer, *_ in rows], ratios, color="#2166ac")
    for place, ratio in enumerate(ratios):
        axes.text(ratio - 0.01, place, f"{ratio:.2f}", va="center", ha="right", color="#ffffff", fontsize=9)
    axes.axvline(1, color="#000000", linewidth=1)
    axes.set(xlim=(0, 1.05), xlabel="time of our step by the peer's (less is faster)", title="a training step, 2 ranks")
    figure.savefig(path, dpi=100)
    pyplot.close(figure)


def main(argv=None):
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--tables", action="store_true", help="write the tables alone")
    options = parser.parse_args(argv)
    for page in PAGES:
        page.write_text(written(page.read_text()))
        print(f"tables: {page}")
    if not options.tables:
        import matplotlib

        matplotlib.use("Agg")
        from matplotlib import pyplot

        for draw, name in ((draw_all_reduce, "performance_all_reduce.png"), (draw_steps, "performance_steps.png")):
            draw(pyplot, ROOT / "docs" / name)
            print(f"plot: {ROOT / 'docs' / name}")
    return 0


if __name__ == "__main__":
    sys.exit(main())

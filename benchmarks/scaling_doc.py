"""Fit the cost model to the rows of growth.py, and put plots and tables into docs/scaling.md.

    python benchmarks/scaling_doc.py            # needs matplotlib
    python benchmarks/scaling_doc.py --steps    # the predicted steps alone

Draws docs/scaling_fit.png (measured points and the fit) and docs/scaling_predicted.png (what the
model gives for NVLink and InfiniBand), and writes the text between the marks ``<!-- NAME -->`` and
``<!-- end -->`` of docs/scaling.md anew.
"""

import argparse
import itertools
import json
import sys
from pathlib import Path

from performance_doc import MARK, table
from scaling.measurements import cores_of, fits_of, points_of, read_rows
from scaling.model import Point
from scaling.optimizer_in_hook import DERIVED, derivation, times
from scaling.optimizer_in_hook import steps as steps_of_derivation
from scaling.predictions import NETWORKS, best, crossovers, predictions
from scaling.step import RATES, WAYS, predict_step
from scaling.transformer import LLAMA_1B, LLAMA_7B
from scaling.units import show_size, show_time

from collectives.bench.rotation import last_level_cache

HERE = Path(__file__).resolve().parent
RANKS = (8, 64, 1024, 16384)
STEP_RANKS = (1, 8, 64, 1024)
PREDICTIONS = HERE / "results" / "predictions.json"
SIZES = (1 << 10, 64 << 10, 1 << 20, 16 << 20, 256 << 20, 1 << 30)
ALGORITHMS = ("ring", "direct", "tree", "hierarchical", "hierarchical_tree")
STYLES = (
    ("#000000", "-", "o"),
    ("#b2182b", "--", "s"),
    ("#2166ac", "-.", "^"),
    ("#1b7837", ":", "D"),
    ("#762a83", "--", "v"),
)


def shown(algorithm):
    return algorithm.replace("_tree", " (tree)")


def errors_of(fitted, points):
    """Return the rms of a fit's relative errors over some points, as text; "-" without points."""
    found = [fitted.predict(p.op, p.algorithm, p.ranks, p.nbytes) / p.seconds - 1 for p in points]
    return f"{(sum(e * e for e in found) / len(found)) ** 0.5:.0%}" if found else "-"


def fit_table(fits, points, cores):
    """Return the fits' costs and errors; every error is that of the row's own points."""
    header = [
        "engine, algorithm", "points", "start (us)", "alpha (us)", "beta (ns/byte)", "gamma (ns/byte)", "rms error",
        "largest", "all-reduce", "reduce-scatter", "all-gather", f"<= {cores} ranks", "more",
    ]  # fmt: skip
    rows = []
    for (engine, algorithm, part), one in fits.items():
        own = [p for p in points[engine, algorithm] if belongs_to(p, part)]
        cost = one.network.intra
        rows.append([
            f"{engine}, {algorithm}, {part}", str(one.points), f"{one.network.start_s * 1e6:.3g}",
            f"{cost.alpha_s * 1e6:.3g}", f"{cost.beta_s_per_byte * 1e9:.3g}", f"{cost.gamma_s_per_byte * 1e9:.3g}",
            f"{one.rms:.0%}", f"{one.largest:.0%}",
            *(errors_of(one, [p for p in own if p.op == op]) for op in ("all_reduce", "reduce_scatter", "all_gather")),
            errors_of(one, [p for p in own if p.ranks <= cores]), errors_of(one, [p for p in own if p.ranks > cores]),
        ])  # fmt: skip
    return table(header, rows)


def belongs_to(point: Point, part: str) -> bool:
    inside = 2 * point.ranks * point.nbytes <= last_level_cache()
    return part == "all sizes" or inside == (part == "in cache")


def predicted_table(networks):
    """Return the predicted times of all-reduce; the fastest of a line in bold, and its busbw."""
    lines = []
    for ranks, size in itertools.product(RANKS, SIZES):
        rows = predictions("all_reduce", ranks, size, networks, ALGORITHMS)
        times = [show_time(row["time_us"] / 1e6) for row in rows]
        cells = [f"**{text}**" if row["wins"] else text for text, row in zip(times, rows, strict=True)]
        busbw = max(row["busbw_gbs"] for row in rows)
        lines.append([f"{ranks:,}", show_size(size), *cells, f"{busbw:.3g} GB/s"])
    return table(["ranks", "size", *map(shown, ALGORITHMS), "busbw of the fastest"], lines)


def crossover_table(networks):
    lines = []
    for ranks in RANKS:
        parts = [
            f"{shown(name)} from {show_size(size)}"
            for size, name in crossovers("all_reduce", ranks, networks, ALGORITHMS)
        ]
        lines.append([f"{ranks:,}", "; ".join(parts)])
    return table(["ranks", "fastest all-reduce"], lines)


def step_cell(found) -> str:
    return f"{found.seconds * 1e3:.0f} ms" + ("" if 80e9 in found.fits else "*" if found.fits else "**")


def step_table(model) -> str:
    """Return the predicted steps of a model; what fits into no GPU's memory is said."""
    header = ["step", *(f"{ranks:,} GPU{'s' if ranks > 1 else ''}" for ranks in STEP_RANKS),
              "at 8: network", "of it the GPU waits", "copies, AdamW", "memory"]  # fmt: skip
    rows = []
    for way in WAYS:
        found = {ranks: predict_step(way, model, ranks) for ranks in STEP_RANKS}
        at = found[8]
        fits = "" if 80e9 in at.fits else ": does not fit into 80 GB"
        rows.append([way.name, *map(step_cell, found.values()), f"{at.network_seconds * 1e3:.0f} ms",
                     f"{at.exposed * 1e3:.0f} ms", f"{at.memory_seconds * 1e3:.0f} ms",
                     f"{at.bytes_needed / 1e9:.0f} GB{fits}"])  # fmt: skip
    return table(header, rows)


def steps_text() -> str:
    parts = []
    for model in (LLAMA_7B, LLAMA_1B):
        arithmetic = 3 * sum(model.forward_flops()) / (RATES.flops * RATES.mfu)
        what = f"{model.name} model, {model.parameters:,} parameters, {model.tokens:,} tokens a GPU"
        parts.append(f"{what}: {arithmetic * 1e3:.0f} ms of arithmetic.\n\n{step_table(model)}")
    return "\n\n".join(parts)


def optimizer_text() -> str:
    """Return the derivation of the optimizer inside of the hook, for 8 GPUs, and what follows from it."""
    rows = [[way, what, *((f"{n:.2f}", "") if where == "wire" else ("", f"{n:.2f}"))]
            for way, what, n, where in derivation(8)]  # fmt: skip
    for way in DERIVED:
        own = [(n, where) for name, _, n, where in derivation(8) if name == way]
        wire, memory = (sum(n for n, where in own if where == on) for on in ("wire", "memory"))
        rows.append([way, "**together**", f"**{wire:.2f}**", f"**{memory:.2f}**"])
    parts = table(["step", "part", "wire, bytes a parameter", "memory, bytes a parameter"], rows)
    body = []
    for model in (LLAMA_1B, LLAMA_7B):
        for way, found in steps_of_derivation(model, 8).items():
            wire, memory = times(way, model.parameters, 8)
            fits = "" if 80e9 in found.fits else " (does not fit into 80 GB)"
            body.append([model.name, way, f"{wire * 1e3:.1f} ms", f"{memory * 1e3:.1f} ms",
                         f"{found.seconds * 1e3:.1f} ms{fits}"])  # fmt: skip
    return f"{parts}\n\n{table(['model', 'step', 'wire', 'memory', 'predicted step'], body)}"


def write_predictions(path: Path) -> None:
    """Write the predictions that `make gpu` prints beside its measurements."""
    from scaling.one_gpu import predicted_on_one_gpu

    steps = [
        {"model": model.name, "way": found.way, "ranks": ranks, "ms": round(found.seconds * 1e3, 2),
         "network_ms": round(found.network_seconds * 1e3, 2), "exposed_ms": round(found.exposed * 1e3, 2),
         "gb": round(found.bytes_needed / 1e9, 1), "fits_80_gb": 80e9 in found.fits}
        for model in (LLAMA_7B, LLAMA_1B) for way in WAYS for ranks in STEP_RANKS
        for found in [predict_step(way, model, ranks)]
    ]  # fmt: skip
    path.write_text(json.dumps({"one_gpu": predicted_on_one_gpu(), "steps": steps}, indent=1) + "\n")
    print(f"predictions: {path}")


def write_page(page: Path, texts: dict[str, str]) -> None:
    """Put texts into their places of the page; those of others stay."""
    text = page.read_text()
    places = [name for _, name, _ in MARK.findall(text)]
    if lost := sorted(set(texts) - set(places)):
        raise SystemExit(f"{page} has no place for {', '.join(lost)}")
    def made(mark) -> str:
        return f"{mark[1]}{texts[mark[2]]}\n{mark[3]}" if mark[2] in texts else mark[0]

    page.write_text(MARK.sub(made, text))


def draw(points, fits, where, folder):
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    def finish(figure, name):
        figure.savefig(folder / name, dpi=100)
        pyplot.close(figure)
        print(f"plot: {folder / name}")

    key = next(key for key in points if key[1] == "native")
    fitted = fits[(*key, "all sizes")]
    figure, panels = pyplot.subplots(1, 3, figsize=(11, 4), sharey=True)
    for axes, op in zip(panels, ("all_reduce", "reduce_scatter", "all_gather"), strict=True):
        counts = sorted({p.ranks for p in points[key]})
        chosen = [n for n in counts if n in (2, 4, 8, 16)] or counts
        for n, (ink, line, mark) in zip(chosen, STYLES, strict=False):
            mine = sorted((p.nbytes, p.seconds) for p in points[key] if (p.op, p.ranks) == (op, n))
            xs = [x for x, _ in mine]
            axes.plot(xs, [s * 1e6 for _, s in mine], mark, color=ink, label=f"{n} ranks", markersize=4)
            axes.plot(xs, [fitted.predict(op, key[1], n, x) * 1e6 for x in xs], line, color=ink, linewidth=1)
        axes.set(xscale="log", yscale="log", xlabel="bytes", title=f"{op.replace('_', '-')}: points, and the fit")
        axes.grid(True, color="#cccccc", linewidth=0.6)
    panels[0].set_ylabel("time (us)")
    panels[0].legend(fontsize=8)
    figure.text(0.005, 0.01, where, fontsize=6, color="#444444")
    figure.tight_layout()
    finish(figure, "scaling_fit.png")

    figure, panels = pyplot.subplots(2, 2, figsize=(10, 7), sharex=True)
    sizes = [1 << bits for bits in range(8, 33)]
    for axes, ranks in zip(panels.flat, RANKS, strict=True):
        for name, (ink, line, _) in zip(ALGORITHMS, STYLES, strict=True):
            times = [best("all_reduce", name, ranks, s, NETWORKS["dgx-h100"])[0] * 1e6 for s in sizes]
            axes.plot(sizes, times, line, color=ink, label=shown(name), linewidth=1.6)
        axes.set(xscale="log", yscale="log", title=f"{ranks:,} ranks, predicted", ylabel="time (us)")
        axes.grid(True, color="#cccccc", linewidth=0.6)
    for axes in panels[1]:
        axes.set_xlabel("bytes")
    panels[0][0].legend(fontsize=8)
    figure.tight_layout()
    finish(figure, "scaling_predicted.png")


def main():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--measured", type=Path, default=HERE / "results" / "growth.jsonl")
    parser.add_argument("--docs", type=Path, default=HERE.parent / "docs")
    parser.add_argument("--predictions", type=Path, default=PREDICTIONS)
    parser.add_argument("--steps", action="store_true", help="the predicted steps alone, without the fit and plots")
    arguments = parser.parse_args()
    page = arguments.docs / "scaling.md"
    write_page(page, {"steps": steps_text(), "optimizer": optimizer_text()})
    write_predictions(arguments.predictions)
    if arguments.steps:
        return 0
    rows, container = read_rows(arguments.measured)
    cores = cores_of(rows, container)
    points, fits = points_of(rows), fits_of(rows, cores, last_level_cache())
    first = rows[0]
    where = f"{first['machine']}, {cores} cores, commit {first['commit']}, {first['time'][:10]}"
    if "load" in first:
        where += f", load of other programs {first['load']}"
    networks = NETWORKS["dgx-h100"]
    texts = {
        "fit": f"Measured on {where}.\n\n{fit_table(fits, points, cores)}",
        "predicted": predicted_table(networks),
        "crossovers": crossover_table(networks),
    }
    write_page(page, texts)
    draw(points, fits, where, arguments.docs)
    return 0


if __name__ == "__main__":
    sys.exit(main())

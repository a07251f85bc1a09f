"""The long tail: responses of very unequal length, on one device and simulated on many.

Lengths are forced from those of a production reasoning model (DeepSeek-R1 traffic, ServeGen,
Apache-2.0), scaled so that the longest has --longest tokens. A picture beside the result shows
live rows and strategy over time.

The simulation lets each of several devices answer --rows rows of its own and waits for the last:
the time of a device is the sum over its live counts of rounds times the cost table's seconds.
"""

import itertools
import pathlib

import numpy as np
from matplotlib.backends import backend_agg
from matplotlib.figure import Figure

from fastgrpo_jax import base
from fastgrpo_jax.bench import common, players, rollout
from fastgrpo_jax.rollout import buckets, costs, record

# Tokens at these shares of the responses; straight in the logarithm between them.
SHARES = (
    *np.linspace(0, 0.95, 20).tolist(), 0.975, 0.99, 0.995, 0.999, 1.0,
)  # fmt: skip
TOKENS = (
    78, 225, 288, 340, 386, 428, 470, 520, 582, 668, 792, 943, 1103, 1244, 1367, 1498, 1679, 2196,
    3433, 5701, 8368, 12627, 15747, 21150, 22539,
)  # fmt: skip
DEVICES = (8, 64)
_COLORS = (  # of strategies; plain decoding is grey
    "#2563eb", "#ea580c", "#059669", "#7c3aed", "#db2777", "#ca8a04", "#0891b2", "#65a30d",
)  # fmt: skip


def add_arguments(parser) -> None:
    """Add this suite's options: those of `rollout`, and how long the longest response is."""
    rollout.add_arguments(parser)
    parser.add_argument("--longest", type=int, default=384, help="tokens of the longest response")
    parser.set_defaults(
        rows="128", methods="plain_nodrop,plain,goodput", drafter="oracle:0.8", repeats=3
    )


def lengths(rows: int, longest: int, seed: int, spread: bool = True) -> np.ndarray:
    """Draw response lengths [rows]: evenly over the distribution, or (not `spread`) at random."""
    rng = np.random.Generator(np.random.Philox(seed))
    shares = (np.arange(rows) + 0.5) / rows if spread else rng.random(rows)
    found = np.exp(np.interp(shares, SHARES, np.log(TOKENS)))
    scaled = np.maximum(np.rint(found * longest / TOKENS[-1]), 1)
    scaled[np.argmax(scaled)] = longest if spread else scaled.max()
    return rng.permutation(scaled.astype(np.int64))


def run(args) -> int:
    """Run the suite."""
    if args.quick:
        args.longest, args.rows, args.group = 16, "8", 4
    if args.longest < 1:
        raise base.UserError(f"--longest is {args.longest}; allowed: 1 or more")
    args.tokens, args.lengths = args.longest, "forced"
    sizes, methods = common.integers(args.rows), args.methods.split(",")
    bench = players.prepare(args)
    rows, summary, timelines = [], {"drafter": args.drafter, "longest": args.longest}, {}
    for size in sizes:
        caps = lengths(size, args.longest, args.seed)
        table, last = rollout.measure(bench, size, methods, tuple(caps.tolist()))
        rows += table
        timelines[size] = {name: timeline(done) for name, done in last.items()}
    adaptive = [row for row in rows if row["method"] not in players.PLAIN]
    if adaptive:
        best = max(adaptive, key=lambda row: row["ratio_vs_plain"] or 0)
        summary["ratio_vs_plain"] = best["ratio_vs_plain"]
        summary["ratio_vs_nodrop"] = best["ratio_vs_nodrop"]
    if bench.table is not None and bench.accept is not None:
        for devices in DEVICES:
            found = simulate(bench.table, sizes[-1], args.longest, devices, bench.accept, args.seed)
            summary |= {f"simulated_{k}@{devices}": round(v, 3) for k, v in found.items()}
    common.write(args.out, "tail", args, bench.model, rows, summary)
    picture = draw(pathlib.Path(args.out).with_suffix(".png"), timelines[sizes[-1]])
    common.say(f"timeline: {picture}")
    return 0


def timeline(done: record.Rollout) -> list[tuple[float, int, str]]:
    """List (seconds at its start, live rows, strategy) of each block."""
    clock, found = done.prefill_seconds, []
    for block in done.blocks:
        found.append((clock, block.live, str(block.strategy)))
        clock += block.seconds
    return [*found, (clock, 0, "")]


def simulate(
    table: costs.Table, rows: int, longest: int, devices: int, accept: float, seed: int
) -> dict[str, float]:
    """Compute what many devices would gain: the slowest device of each kind decides.

    Returns the ratios of the plain time to the adaptive one, and of the time without dropping.
    """
    ladder = buckets.row_ladder(rows)
    plans = {size: (base.PLAIN, *costs.arms(table, size, ("oracle",))) for size in ladder}

    def rate(size: int, choices) -> float:
        """Tokens of a row per second, by the best of some choices."""
        bucket = base.Bucket(size, 0)
        return max(costs.tokens_at(s, accept) / costs.seconds(table, bucket, s) for s in choices)

    plain = {size: rate(size, (base.PLAIN,)) for size in ladder}
    fast = {size: rate(size, plans[size]) for size in ladder}
    times = {"plain": 0.0, "fast": 0.0, "nodrop": 0.0}
    for device in range(devices):
        ends = np.sort(lengths(rows, longest, seed + 1000 + device, spread=False))
        steps = np.diff(ends, prepend=0)
        live = [buckets.at_least(ladder, rows - i) for i in range(rows)]
        found = {
            "plain": sum(n / plain[b] for n, b in zip(steps, live)),
            "fast": sum(n / fast[b] for n, b in zip(steps, live)),
            "nodrop": float(ends[-1]) / plain[ladder[-1]],
        }
        times = {name: max(times[name], float(t)) for name, t in found.items()}
    return {
        "ratio_vs_plain": times["plain"] / times["fast"],
        "ratio_vs_nodrop": times["nodrop"] / times["fast"],
    }


def draw(path: pathlib.Path, timelines: dict[str, list]) -> pathlib.Path:
    """Draw live rows over time for each method, and below the strategies that it used."""
    figure = Figure(figsize=(10, 3 + 0.5 * len(timelines)), dpi=110, layout="constrained")
    backend_agg.FigureCanvasAgg(figure)
    rows, used = figure.subplots(
        2, 1, sharex=True, height_ratios=(3, max(0.4 * len(timelines), 0.8))
    )
    names = list(dict.fromkeys(s for line in timelines.values() for _, _, s in line if s))
    drafting = [name for name in names if name != "off"]
    shades = {name: _COLORS[i % len(_COLORS)] for i, name in enumerate(drafting)}
    shades["off"] = "#cbd5e1"
    for i, (method, line) in enumerate(timelines.items()):
        clock = [t for t, _, _ in line]
        live = [n for _, n, _ in line]
        rows.step(clock, live, where="post", label=f"{method}, {clock[-1]:.3g} s")
        for (start, _, name), (end, _, _) in itertools.pairwise(line):
            used.barh(i, end - start, left=start, color=shades[name], height=0.7)
    rows.set_ylabel("live rows")
    rows.set_ylim(bottom=0)
    rows.legend(frameon=False, fontsize=8)
    used.set_yticks(range(len(timelines)), list(timelines), fontsize=8)
    used.set_xlabel("seconds")
    for name in names:
        used.barh(0, 0, color=shades[name], label=name)
    used.legend(frameon=False, fontsize=7, ncols=6, loc="upper center", bbox_to_anchor=(0.5, -0.5))
    for axes in (rows, used):
        axes.spines[["top", "right"]].set_visible(False)
        axes.tick_params(labelsize=8)
    figure.savefig(path)
    return path

"""Does each loss of the policy train? Runs of GRPO on `arithmetic`, each loss over some seeds.

With --model=tiny a small policy first reads worked solutions, not all of them right; other models
start as they are. A run answers the same few prompts in every step, other ones for each seed, so
that no step is easier than another. All losses begin with the same rollout, for it is made before
the first update. A run is that of `fastgrpo_jax.main` with these keys and no speculation, which
would change no token. `rise` is the mean reward of the last fifth of
the steps over that of the first fifth; the suite fails where a loss's median rise is not above 0 (not with --quick).
"""

import contextlib
import json
import pathlib
import statistics
import tempfile

from ml_collections import config_dict

from fastgrpo_jax import base
from fastgrpo_jax.bench import common, worked
from fastgrpo_jax.configs import default
from fastgrpo_jax.models import export
from fastgrpo_jax.train import grpo, loop, metrics


def add_arguments(parser) -> None:
    """Add this suite's options."""
    parser.add_argument("--losses", default=",".join(grpo.LOSSES), help="comma-separated")
    parser.add_argument("--seeds", type=int, default=3, help="runs of each loss")
    parser.add_argument("--steps", type=int, default=40, help="of a run")
    parser.add_argument("--prompts", type=int, default=16, help="of each step")
    parser.add_argument("--group", type=int, default=8, help="answers to a prompt")
    parser.add_argument("--tokens", type=int, default=worked.RESPONSE, help="of an answer, at most")
    parser.add_argument("--max_prompt", type=int, default=worked.PROMPT)
    parser.add_argument("--learning_rate", type=float, default=1e-4)
    parser.add_argument("--temperature", type=float, default=1.0)
    parser.add_argument(
        "--lessons", type=int, default=600, help="batches of solutions, with --model=tiny"
    )


def run(args) -> int:
    """Run the suite; returns 1 if a loss does not train."""
    if args.quick:
        args.seeds, args.steps, args.lessons = 1, min(args.steps, 5), min(args.lessons, 4)
        args.prompts, args.group = min(args.prompts, 2), min(args.group, 4)
    for name in ("seeds", "steps", "lessons"):
        if getattr(args, name) < 1:
            raise base.UserError(f"--{name} is {getattr(args, name)}; allowed: 1 or more")
    losses = args.losses.split(",")
    for loss in losses:
        if loss not in grpo.LOSSES:
            raise base.UserError(f"--losses holds {loss!r}; allowed: {', '.join(grpo.LOSSES)}")
    with tempfile.TemporaryDirectory() as folder:
        folder = pathlib.Path(folder)
        if args.model == "tiny":
            model, name = worked.train(args.seed, args.lessons), str(folder / "policy")
            export.save(name, model.config, model.params, model.tokenizer, model.stop_tokens)
        else:
            model, name = common.load(args, "float32"), args.model
        rows = []
        for seed in range(args.seed, args.seed + args.seeds):
            task = str(folder / f"prompts_{seed}.jsonl")
            _write_prompts(task, args, seed)
            for loss in losses:
                workdir = folder / f"{loss}_{seed}"
                rows.append(_train(configure(args, name, task, loss, seed), workdir))
                said = (f"{k} {v}" for k, v in rows[-1].items() if k != "rewards")
                common.say("  ".join(said))
    summary = {}
    for loss in losses:
        rises = [row["rise"] for row in rows if row["loss"] == loss]
        summary |= {
            f"rise/{loss}": round(statistics.median(rises), 4),
            f"least/{loss}": min(rises),
            f"most/{loss}": max(rises),
        }
    common.write(args.out, "losses", args, model, rows, summary)
    if args.quick:  # too short to judge by
        return 0
    failed = [loss for loss in losses if summary[f"rise/{loss}"] <= 0]
    if failed:
        common.say(f"the reward does not rise with {', '.join(failed)}")
    return int(bool(failed))


def _write_prompts(path: str, args, seed: int) -> None:
    small = args.model == "tiny"
    task = worked.task(seed) if small else common.open_task("arithmetic", seed)
    rows = [json.dumps(task.row(place)) for place in range(args.prompts)]
    pathlib.Path(path).write_text("\n".join(rows) + "\n")


def configure(args, model: str, task: str, loss: str, seed: int) -> config_dict.ConfigDict:
    """Configure one run."""
    c = default.get_config()
    c.seed, c.steps = seed, args.steps
    c.compilation_cache = args.compilation_cache
    c.model.name = model
    c.task.name = task
    c.task.prompts_per_step, c.task.group = args.prompts, args.group
    c.task.max_prompt_length = args.max_prompt
    c.sampling.temperature = args.temperature
    c.sampling.max_response_length = args.tokens
    c.rollout.controller = "off"
    c.rollout.prefill_chunk = args.max_prompt
    c.rollout.slot_step = args.max_prompt + args.tokens
    c.drafter.kind = "none"
    c.loss.name = loss
    c.optim.learning_rate = args.learning_rate
    c.checkpoint.every = args.steps
    c.log.completions_per_step = 0
    return c


def _train(c: config_dict.ConfigDict, workdir: pathlib.Path) -> dict[str, object]:
    """Run it, and read its rewards."""
    workdir.mkdir()
    with open(workdir / "log.txt", "w") as log, contextlib.redirect_stderr(log):
        loop.train(c, workdir)
    found = metrics.read(workdir)
    rewards = [round(row["reward"], 4) for row in found]
    few = max(len(rewards) // 5, 1)
    first, last = statistics.fmean(rewards[:few]), statistics.fmean(rewards[-few:])
    return {
        "loss": c.loss.name,
        "seed": c.seed,
        "first": round(first, 4),
        "last": round(last, 4),
        "rise": round(last - first, 4),
        "seconds": round(sum(row["step_time"] for row in found), 1),
        "rewards": rewards,
    }

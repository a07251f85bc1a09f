"""Train a drafter on its policy's own rollouts, to bench with and to start runs from.

Rollouts of a task are made once by plain decoding, at each of some temperatures, and read
several times. The file that --save names is what `bench rollout --drafter=FILE` and
`--config.drafter.init=FILE` take.
"""

import jax

from fastgrpo_jax import base
from fastgrpo_jax.bench import common
from fastgrpo_jax.models import eagle, eagle_file, load
from fastgrpo_jax.rollout import buckets, decode, draft_vocab, generate
from fastgrpo_jax.train import distill


def add_arguments(parser) -> None:
    """Add this suite's options."""
    parser.add_argument("--save", required=True, help="FILE.safetensors to write")
    parser.add_argument("--kind", default="fastgrpo", choices=eagle.KINDS)
    parser.add_argument(
        "--tasks", default="arithmetic", help="arithmetic, addition or FILE.jsonl, comma-separated"
    )
    parser.add_argument("--temperatures", default="0.7,1.0", help="comma-separated")
    parser.add_argument("--prompts", type=int, default=64, help="of each task and temperature")
    parser.add_argument("--tokens", type=int, default=64, help="response tokens, at most")
    parser.add_argument(
        "--max_prompt", type=int, default=96, help="tokens; longer ones are skipped"
    )
    parser.add_argument("--steps", type=int, default=400, help="updates, on 8 rollouts each")
    parser.add_argument("--learning_rate", type=float, default=1e-3)
    parser.add_argument("--feature_weight", type=float, default=2.0)
    parser.add_argument("--token_weight", type=float, default=0.1)


GROUP = 8


def run(args) -> int:
    """Run the suite."""
    if args.quick:
        args.prompts, args.tokens, args.steps = 2, 16, min(args.steps, 8)
    if args.steps < 1 or args.prompts < 1 or args.tokens < 1:
        raise base.UserError("--steps, --prompts and --tokens must be 1 or more")
    model = load.load(args.model, "float32", args.seed)
    batches = []
    for task in args.tasks.split(","):
        for temperature in _temperatures(args.temperatures):
            batches += _rollouts(args, model, task, temperature)
    order = jax.random.permutation(jax.random.key(args.seed), len(batches))
    batches = [batches[int(i)] for i in order]
    rows = []

    def heard(step: int, loss: float) -> None:
        rows.append({"step": step, "loss": round(loss, 4)})
        common.say(f"step {step}  loss {loss:.4f}")

    weights = distill.DistillConfig(args.feature_weight, args.token_weight)
    config, params, loss = common.train_drafter(
        model,
        args.kind,
        batches,
        args.steps,
        1.0,
        args.seed,
        GROUP,
        learning_rate=args.learning_rate,
        weights=weights,
        heard=heard,
    )
    counts = draft_vocab.count(row for batch in batches for row in base.responses(batch))
    eagle_file.save(args.save, config, jax.device_get(params), counts)
    summary = {"loss": round(loss, 4), "rollouts": len(batches) * GROUP, "file": args.save}
    common.write(args.out, "drafter", args, model, rows, summary)
    return 0


def _temperatures(text: str) -> list[float]:
    try:
        found = [float(x) for x in text.split(",")]
    except ValueError:
        found = [-1.0]
    if not all(0 <= x < float("inf") for x in found):
        raise base.UserError(f"--temperatures is {text!r}; allowed: 0.7,1.0 and the like")
    return found


def _rollouts(args, model, name: str, temperature: float) -> list[base.RolloutBatch]:
    """Answer prompts of a task, up to eight at a time, eight answers each."""
    at_once = min(8, args.prompts)
    prompts = common.chat_prompts(
        model, common.open_task(name, args.seed + 1), args.prompts, args.max_prompt
    )
    limits = generate.Limits(args.max_prompt, args.tokens, args.max_prompt + args.tokens)
    engine = common.engine_for(
        decode.Spec(model.config, None, GROUP),
        buckets.row_ladder(at_once * GROUP),
        limits,
        model.stop_tokens,
        [common.plain()],
        64,
    )
    weights = decode.Weights(jax.tree.map(jax.numpy.asarray, model.params))
    found = []
    for at in range(0, len(prompts) - at_once + 1, at_once):
        some = prompts[at : at + at_once]
        request = generate.Request(some, tuple(range(at, at + at_once)), args.seed + 1, 0)
        done = generate.rollout(
            engine, weights, request, generate.Settings(temperature), limits, common.plain()
        )
        found += common.groups(done.batch, GROUP)
        common.say(f"{name} at T {temperature}: {len(found)} of {len(prompts)} prompts answered")
    return found

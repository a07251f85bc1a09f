"""A small policy that has read worked solutions: for benches that need one which knows something.

GRPO teaches nothing to a policy that is never right, nor to one that always is. So a policy of
less than a million parameters learns `arithmetic` from worked solutions in which now and then a
line is wrong. It becomes as careless as they are, and can be taught to take care.
"""

import dataclasses
from collections.abc import Callable

import jax
import jax.numpy as jnp
import numpy as np

from fastgrpo_jax import base
from fastgrpo_jax.bench import common
from fastgrpo_jax.models import load, tiny
from fastgrpo_jax.train import data, distill, grpo, optim
from fastgrpo_jax.train import step as step_lib
from fastgrpo_jax.train.layout import StepBatch

OPERAND, TERMS = 9, 3  # sizes of the task
PROMPT, RESPONSE = 64, 40  # most tokens, template and stop token included
BATCH = 64
SLIP = 0.3  # chance that a line of a solution is wrong


def shape() -> base.PolicyConfig:
    """Describe the policy: three layers over the characters of `tiny`."""
    return dataclasses.replace(
        tiny.config("float32"), hidden=128, layers=3, heads=4, kv_heads=2, head_dim=32, ffn=384
    )


def task(seed: int) -> data.Task:
    """Open `arithmetic` in the policy's sizes."""
    return data.open_task(
        "arithmetic", seed=seed, shuffle=False, max_operand=OPERAND, max_terms=TERMS
    )


def solve(prompt: str, slip: Callable[[], int] = lambda: 0) -> str:
    """Work out a prompt of `arithmetic`: products first, then from the left.

    "Compute 3 + 4 * 2 step by step." gives "4 * 2 = 8. 3 + 8 = 11. #### 11". What `slip` gives is
    added to each line's result, and the next line goes on from there.
    """
    words = prompt.split()[1:-3]
    lines = []
    for signs in ("*", "+-"):
        i = 1
        while i < len(words):
            if words[i] not in signs:
                i += 2
                continue
            a, b = int(words[i - 1]), int(words[i + 1])
            value = a * b if words[i] == "*" else a + b if words[i] == "+" else a - b
            value += slip()
            lines.append(f"{' '.join(words[i - 1 : i + 2])} = {value}.")
            words[i - 1 : i + 2] = [str(value)]
    return f"{' '.join(lines)} #### {words[0]}"


def train(seed: int, steps: int, learning_rate: float = 3e-3) -> load.LoadedModel:
    """Train the policy on `steps` batches of solutions; its weights depend on the seed alone.

    It is the GRPO step with every advantage 1 and every ratio 1, whose gradient is that of the mean
    log-prob of the solutions' tokens.
    """
    config, tokenizer, source = shape(), tiny.tokenizer(), task(seed)
    schedule = dict(schedule="cosine", warmup_steps=min(50, steps // 2), decay_steps=steps)
    rates = optim.OptimConfig(learning_rate=learning_rate, **schedule)
    step_config = step_lib.StepConfig(
        policy=config,
        eagle=None,
        loss=grpo.LossConfig(name="dapo"),
        optim=rates,
        drafter_optim=rates,
        distill=distill.DistillConfig(),
        max_response=RESPONSE,
        max_prompt=PROMPT,
    )
    state = step_lib.init_state(step_config, tiny.params(config, seed))
    update, rng = step_lib.make_train_step(step_config), np.random.default_rng(seed)

    def slip() -> int:
        return int(rng.choice([-2, -1, 1, 2])) if rng.random() < SLIP else 0

    stops = load.stop_tokens(tokenizer, [])
    rendering = data.Rendering(tokenizer, "", True, PROMPT, "error")
    for step in range(steps):
        prompts, _, _ = data.take(source, step * BATCH, BATCH, rendering)
        said = [solve(prompt.prompt, slip) for prompt in prompts]
        state, found = update(state, batch(prompts, said, tokenizer, stops[0]))
        if (step + 1) % 100 == 0 or step + 1 == steps:
            loss = float(found["sampling/sampling_logp_difference/mean"])  # of log-probs to 0
            common.say(f"reading worked solutions: step {step + 1}, loss {loss:.3f}")
    name = f"{steps} batches of worked solutions, seed {seed}"
    return load.LoadedModel(config, jax.device_get(state.params), tokenizer, stops, name)


def batch(prompts: list[data.Prompt], said: list[str], tokenizer, stop: int) -> StepBatch:
    """Write prompts and what was said to them, each ended by a stop token."""
    tokens = np.zeros((len(prompts), PROMPT + RESPONSE), np.int32)
    prompt_length, length = np.zeros((2, len(prompts)), np.int32)
    for row, (prompt, text) in enumerate(zip(prompts, said)):
        ids = [*prompt.ids, *tokenizer(text, add_special_tokens=False)["input_ids"], stop]
        tokens[row, : len(ids)] = ids
        prompt_length[row], length[row] = len(prompt.ids), len(ids)
    ones = jnp.ones(len(prompts), jnp.float32)
    return StepBatch(
        tokens=jnp.asarray(tokens),
        prompt_length=jnp.asarray(prompt_length),
        length=jnp.asarray(length),
        logps=jnp.zeros(tokens.shape, jnp.float32),
        advantages=ones,
        temperature=ones,
    )

"""A small policy that has read worked solutions: for benches that need one which knows something.

GRPO teaches nothing to a policy that is never right, nor to one that always is. So a policy of
less than a million parameters learns `arithmetic` from worked solutions, by plain next-token
training, and is stopped early.
"""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import optax

from fastgrpo_jax import base
from fastgrpo_jax.bench import common
from fastgrpo_jax.models import load, policy, tiny
from fastgrpo_jax.train import data

OPERAND, TERMS = 9, 3  # sizes of the task
PROMPT, RESPONSE = 64, 40  # most tokens, template and stop token included
BATCH = 64


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


def solve(prompt: str) -> str:
    """Work out a prompt of `arithmetic`: products first, then from the left.

    "Compute 3 + 4 * 2 step by step." gives "4 * 2 = 8. 3 + 8 = 11. #### 11".
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
            lines.append(f"{' '.join(words[i - 1 : i + 2])} = {value}.")
            words[i - 1 : i + 2] = [str(value)]
    return f"{' '.join(lines)} #### {words[0]}"


def train(seed: int, steps: int, learning_rate: float = 3e-3) -> load.LoadedModel:
    """Train the policy on `steps` batches of solutions; its weights depend on the seed alone."""
    config, tokenizer = shape(), tiny.tokenizer()
    params = jax.tree.map(jnp.asarray, tiny.params(config, seed))
    schedule = optax.warmup_cosine_decay_schedule(0.0, learning_rate, min(50, steps // 2), steps)
    optimizer = optax.chain(optax.clip_by_global_norm(1.0), optax.adamw(schedule))
    moments, source = optimizer.init(params), task(seed)
    stops = load.stop_tokens(tokenizer, [])
    rendering = data.Rendering(tokenizer, "", True, PROMPT, "error")

    @jax.jit
    def update(params, moments, tokens, weights):
        loss, grads = jax.value_and_grad(_loss)(params, config, tokens, weights)
        changes, moments = optimizer.update(grads, moments, params)
        return optax.apply_updates(params, changes), moments, loss

    for step in range(steps):
        prompts, _, _ = data.take(source, step * BATCH, BATCH, rendering)
        params, moments, loss = update(params, moments, *_batch(prompts, tokenizer, stops))
        if (step + 1) % 100 == 0 or step + 1 == steps:
            common.say(f"reading worked solutions: step {step + 1}, loss {float(loss):.3f}")
    name = f"{steps} batches of worked solutions, seed {seed}"
    return load.LoadedModel(config, jax.device_get(params), tokenizer, stops, name)


def _batch(prompts, tokenizer, stops) -> tuple[np.ndarray, np.ndarray]:
    """Write prompts and solutions side by side; the solutions' tokens weigh 1, the others 0."""
    tokens = np.zeros((len(prompts), PROMPT + RESPONSE), np.int32)
    weights = np.zeros(tokens.shape, np.float32)
    for row, prompt in enumerate(prompts):
        said = tokenizer(solve(prompt.prompt), add_special_tokens=False)["input_ids"]
        ids = [*prompt.ids, *said, stops[0]]
        tokens[row, : len(ids)] = ids
        weights[row, len(prompt.ids) : len(ids)] = 1
    return tokens, weights


def _loss(params, config, tokens, weights):
    length = tokens.shape[1]
    positions = jnp.broadcast_to(jnp.arange(length), tokens.shape)
    mask = jnp.broadcast_to(jnp.tril(jnp.ones((length, length), bool)), (*tokens.shape, length))
    read = policy.Policy(config).apply({"params": params}, tokens, positions, mask)
    logits = policy.logits(read.features[:, :-1], policy.head_table(params))
    losses = optax.softmax_cross_entropy_with_integer_labels(logits, tokens[:, 1:])
    return jnp.sum(losses * weights[:, 1:]) / jnp.sum(weights[:, 1:])

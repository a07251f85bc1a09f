"""A drafter for a policy before GRPO begins: it learns from the policy's own samples, nothing else moves.

python -m fastgrpo_jax.main --config=warmup --config.model.name=M --config.task.name=T --workdir=runs/warmup
python -m fastgrpo_jax.main ... --config.drafter.init=runs/warmup

No run needs this: a drafter learns during GRPO too. It saves the steps in which drafts do not pay yet.
"""

from fastgrpo_jax.configs import default


def get_config():
    c = default.get_config()
    c.steps = 30
    c.model.name = "smollm2-135m"
    c.task.name = "arithmetic"
    c.task.prompts_per_step = 16
    c.task.group = 2  # nothing is compared within a group: other prompts teach more
    c.task.max_prompt_length = 96
    c.optim.freeze = True
    c.drafter.learning_rate = 3e-3
    c.drafter.max_grad_norm = 1.0
    c.drafter.replay_updates = 16
    return c

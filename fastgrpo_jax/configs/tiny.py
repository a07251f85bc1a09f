"""A random two-layer model on `addition`: seconds on any machine; learns nothing useful.

python -m fastgrpo_jax.main --config=tiny --workdir=runs/tiny
"""

from fastgrpo_jax.configs import default


def get_config():
    c = default.get_config()
    c.steps = 4
    c.model.name = "tiny"
    c.task.prompts_per_step = 2
    c.task.group = 4
    c.task.max_prompt_length = 64
    c.sampling.max_response_length = 16
    c.rollout.controller = "fastgrpo"  # so small a model would never pay for drafts
    c.rollout.c_peak = 16
    c.rollout.slot_step = 64
    c.loss.head_chunk = 64
    c.optim.learning_rate = 1e-3
    return c

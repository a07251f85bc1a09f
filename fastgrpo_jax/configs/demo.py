"""GRPO on SmolLM2-135M-Instruct: learning to answer "What is a + b?", on a CPU.

make demo                 (or: make demo STEPS=2 for a quick look)
python -m fastgrpo_jax.main --config=demo --workdir=runs/demo
"""

from fastgrpo_jax.configs import default


def get_config():
    c = default.get_config()
    c.steps = 30
    c.model.name = "smollm2-135m"
    c.task.name = "addition"
    c.task.prompts_per_step = 8
    c.task.group = 6
    c.task.max_prompt_length = 40  # the template and the question
    c.sampling.temperature = 0.7  # at 1.0 this model is right 3 times in 100, at 0.7 33
    c.sampling.max_response_length = 20
    c.rollout.controller = "fastgrpo"
    c.rollout.c_peak = 96  # two tokens for each of 48 rows; a CPU has no sharp knee to measure
    c.rollout.n_max = 8
    c.rollout.depth_max = 3
    c.rollout.width_max = 4
    c.rollout.row_buckets = "4,8,16,32"
    c.rollout.prefill_chunk = 40  # one chunk a prompt
    c.rollout.slot_step = 72  # holds prompt, response and tree: one cache size
    c.rollout.block_rounds = 8
    c.optim.learning_rate = 1e-5
    return c

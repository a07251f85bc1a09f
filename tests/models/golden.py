"""Facts: what SmolLM2-135M-Instruct (4-bit weights, dequantised) gives in float32 on a CPU.

`ids` is the text as tokens; `top_ids` and `top_logits` (within 1e-2) are of the last position,
as is `logsumexp`; `greedy_ids` is the greedy continuation.
"""

from typing import NamedTuple


class Case(NamedTuple):
    text: str
    ids: list[int]
    top_ids: list[int]
    top_logits: list[float]
    logsumexp: float
    greedy_ids: list[int]
    greedy_text: str


BEFORE = (
    "<|im_start|>system\nYou are a helpful AI assistant named SmolLM, "
    "trained by Hugging Face<|im_end|>\n<|im_start|>user\n"
)
AFTER = "<|im_end|>\n<|im_start|>assistant\n"
# fmt: off
SMOLLM2 = (
    Case(
        text="Gravity is",
        ids=[22007, 6463, 314],
        top_ids=[253, 260, 441, 1129, 4959],
        top_logits=[23.975, 22.9869, 21.7511, 21.6587, 21.4869],
        logsumexp=25.3366,
        greedy_ids=[253, 4959, 1909, 281, 6944, 338, 6601, 260, 26589, 282, 42548, 2952,
                    411, 260, 4313, 282, 2631, 284, 1439, 30, 657, 506, 253, 3953],
        greedy_text=" a fundamental concept in physics that describes the curvature of spacetime"
        " caused by the presence of matter and energy. It's a beautiful",
    ),
    Case(
        text=BEFORE + "What is the capital of France?" + AFTER,
        ids=[1, 9690, 198, 2683, 359, 253, 5356, 5646, 11173, 3365, 3511, 308, 34519, 28,
             7018, 411, 407, 19712, 8182, 2, 198, 1, 4093, 198, 1780, 314, 260, 3575,
             282, 4649, 47, 2, 198, 1, 520, 9531, 198],
        top_ids=[504, 60, 15319, 2219, 7026],
        top_logits=[25.3254, 25.2433, 24.9424, 24.4017, 24.3146],
        logsumexp=27.2081,
        greedy_ids=[504, 3575, 282, 4649, 314, 7042, 30],
        greedy_text="The capital of France is Paris.",
    ),
    Case(
        text=BEFORE + "What is 2 + 3?" + AFTER,
        ids=[1, 9690, 198, 2683, 359, 253, 5356, 5646, 11173, 3365, 3511, 308, 34519, 28,
             7018, 411, 407, 19712, 8182, 2, 198, 1, 4093, 198, 1780, 314, 216, 34, 1232,
             216, 35, 47, 2, 198, 1, 520, 9531, 198],
        top_ids=[34, 504, 10345, 2068, 49],
        top_logits=[32.5112, 32.18, 32.1101, 31.9703, 31.6626],
        logsumexp=34.4238,
        greedy_ids=[34, 1232, 216, 35, 446, 216, 37],
        greedy_text="2 + 3 = 5",
    ),
)
# fmt: on

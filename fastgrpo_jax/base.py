"""The nouns: every type that crosses a border of the package.

Traced state is a `NamedTuple` of arrays, static description a frozen dataclass. One legend
of dimension letters holds everywhere:

    N  rows of a rollout (prompts x group)      B  rows that are live in a bucket
    P  prompts                                  G  completions per prompt (the group)
    L  longest sequence, prompt included        S  cache slots per row
    T  tokens of one forward                    M  nodes of a draft tree, root included
    D  depth of a draft tree                    E  model dimension                          F  what a drafter reads of the target: E, or 3 E
    Q  query heads                              K  key/value heads
    H  head dimension                           V  vocabulary
"""

import dataclasses
import zlib
from collections.abc import Sequence
from typing import Any, NamedTuple

import jax
import numpy as np
from jaxtyping import Array, Bool, Float, Int, UInt

Params = Any  # a nested dict of arrays, as Flax makes it


class UserError(Exception):
    """Something the user can mend: one message that names the field, the value and the choices."""


@dataclasses.dataclass(frozen=True)
class RopeScaling:
    """Llama-3 frequency scaling of rotary embeddings."""

    factor: float
    low_freq_factor: float
    high_freq_factor: float
    original_max_positions: int


@dataclasses.dataclass(frozen=True)
class PolicyConfig:
    """Shape of a decoder of the Llama, Qwen2/2.5 or Qwen3 family."""

    vocab: int
    hidden: int
    layers: int
    heads: int
    kv_heads: int
    head_dim: int
    ffn: int
    max_positions: int
    rope_theta: float = 10000.0
    rope_scaling: RopeScaling | None = None
    norm_eps: float = 1e-6
    tied: bool = True
    qkv_bias: bool = False
    o_bias: bool = False
    qk_norm: bool = False
    dtype: str = "float32"  # compute dtype; parameters may be kept wider
    attention: str = "xla"  # xla | tpu | gpu | interpret: the kernel, see models/attention.py
    mesh: Any = None  # devices that programs with it are spread over, see sharding.py; None: one


@dataclasses.dataclass(frozen=True)
class EagleConfig:
    """Shape of a learned drafter: `fastgrpo` (gated fusion, two outputs) or `eagle` (fc, one).

    taps: layers of the target whose inputs it reads (EAGLE-3, arXiv 2503.01840); empty: it reads
      the target's last feature alone.
    """

    kind: str
    hidden: int
    heads: int
    kv_heads: int
    head_dim: int
    ffn: int
    rope_theta: float = 10000.0
    norm_eps: float = 1e-6
    dtype: str = "float32"
    taps: tuple[int, ...] = ()
    fc_bias: bool = False  # of `eagle`; published ones may have it

    @property
    def reads(self) -> int:
        """Count the numbers of the target that it reads at each position."""
        return self.hidden * max(len(self.taps), 1)


@dataclasses.dataclass(frozen=True, order=True)
class DraftStrategy:
    """How one round drafts. `depth` 0 is plain decoding.

    Attributes:
      drafter: `off`, `learned`, `ngram`, or a name given by a test.
      depth: levels drafted below the root.
      width: children per expanded node; 1 makes a chain.
      nodes: tokens verified per row, root included.
      share: 0, or how many nodes of a row are verified on average over a bucket's rows: the
        likeliest of all rows' nodes, so that a sure row gets more than a doubtful one and a
        finished one none. Chains only.
    """

    drafter: str = "off"
    depth: int = 0
    width: int = 1
    nodes: int = 1
    share: float = 0.0

    def __post_init__(self):
        pool = self.width + self.width**2 * (self.depth - 1) if self.depth else 0
        if not self.depth + 1 <= self.nodes <= pool + 1:
            raise UserError(
                f"strategy {self}: nodes must lie in [depth + 1, {pool + 1}] (root included)"
            )

        if self.share and not (self.chain and 1 < self.share < self.nodes):
            raise UserError(f"strategy {self}: a share must lie between 1 and the nodes of a chain")

    @property
    def chain(self) -> bool:
        return self.width == 1

    @property
    def drawn(self) -> bool:
        """Whether its drafts are what a drafter drew, and none is left out for what it is: only
        these can be verified by rejection."""
        return self.chain and not self.share

    def total(self, rows: int) -> int:
        """Count the tokens that a bucket of so many rows verifies in a round."""
        if not self.share:
            return rows * self.nodes
        return min(max(round(rows * self.share), rows + 1), rows * self.nodes)

    def __str__(self) -> str:
        if not self.depth:
            return "off"
        share = f"@{self.share:g}" if self.share else ""
        return f"{self.drafter}:{self.depth}:{self.width}:{self.nodes}{share}"

    @property
    def span(self) -> int:
        """Slots that a round may write from the root's own on, drafter scratch included."""
        return max(self.nodes, self.depth + 1, self.width * (self.depth - 1))


PLAIN = DraftStrategy()


@dataclasses.dataclass(frozen=True, order=True)
class Bucket:
    """A compiled concurrency: rows decoded together and cache slots per row."""

    rows: int
    slots: int


class Packing(NamedTuple):
    """Which of B x M tokens a forward runs on, as one line of N.

    row, node: of each token of the line. place: where in the line a row's node stands; of one
    that is left out any number.
    """

    row: Int[Array, " N"]
    node: Int[Array, " N"]
    place: Int[Array, "B M"]


class KVCache(NamedTuple):
    """Keys and values, one array per layer; slot i of a row holds its position i.

    Heads come before slots: on CPU the batched matmuls of attention then need no transposed
    copy (2 to 6 times faster at 32 rows), and on accelerators the layout is the usual one.
    """

    k: tuple[Float[Array, "B K S H"], ...]
    v: tuple[Float[Array, "B K S H"], ...]


class DraftTree(NamedTuple):
    """Draft nodes in topological order; node 0 is the root, the row's last emitted token.

    tokens: token ids; -1 is a node that can never be accepted.
    parent: index of each node's parent, smaller than its own; the root's is -1.
    """

    tokens: Int[Array, "B M"]
    parent: Int[Array, "B M"]


class Verdict(NamedTuple):
    """What a round emits, per row: the first `count` entries are valid.

    tokens: the target's own draws along the accepted path.
    nodes: the node each was drawn at (the root first).
    logps: log softmax(logits / T) of each token, unfiltered.
    masses: log of the mass that top-k and top-p kept (0 without filters).
    count: 1 + number of accepted nodes.
    """

    tokens: Int[Array, "B D1"]
    nodes: Int[Array, "B D1"]
    logps: Float[Array, "B D1"]
    masses: Float[Array, "B D1"]
    count: Int[Array, " B"]


class Sampling(NamedTuple):
    """Sampling settings and noise addresses of each row."""

    key: UInt[Array, "N 2"]
    temperature: Float[Array, " N"]
    top_k: Int[Array, " N"]  # 0: off
    top_p: Float[Array, " N"]  # 1: off


class Sequences(NamedTuple):
    """Every row of a rollout, live or not, in the order of the batch (row = prompt * G + sample)."""

    tokens: Int[Array, "N L"]  # prompt then response, unpadded from 0; the rest is -1
    logps: Float[Array, "N L"]  # behaviour log-probs, 0 on prompts
    masses: Float[Array, "N L"]
    prompt_length: Int[Array, " N"]
    length: Int[Array, " N"]
    limit: Int[Array, " N"]  # length at which the row is cut
    done: Bool[Array, " N"]
    stopped: Bool[Array, " N"]  # ended by a stop token, not by the limit


class BlockReport(NamedTuple):
    """What the host reads after a decode block; counts are over its live rows.

    accepted[i] counts drafts at depth i + 1 that were accepted and emitted; tried[i] those
    that were judged, because their parent was accepted and the row went on.
    """

    rounds: Int[Array, ""]
    row_rounds: Int[Array, ""]
    emitted: Int[Array, ""]
    accepted: Int[Array, " D"]
    tried: Int[Array, " D"]
    length: Int[Array, " N"]
    done: Bool[Array, " N"]


class RolloutState(NamedTuple):
    """All that a decode block reads and writes; donated to it.

    rows[b] is the line of `sequences` that slot b works on, or N for an empty slot.
    `draft` is the learned drafter's own state, None without one.
    """

    sequences: Sequences
    rows: Int[Array, " B"]
    cache: KVCache
    draft: Any


class RolloutBatch(NamedTuple):
    """What training learns of a rollout (host arrays).

    tokens are right-padded with 0 beyond `length`; response tokens are those in
    [prompt_length, length), the final stop token included.
    """

    tokens: Int[Any, "N L"]
    logps: Float[Any, "N L"]
    masses: Float[Any, "N L"]
    prompt_length: Int[Any, " N"]
    length: Int[Any, " N"]
    stopped: Bool[Any, " N"]


def responses(batch: RolloutBatch) -> list[list[int]]:
    """List each row's response tokens."""
    ends = zip(batch.tokens, batch.prompt_length, batch.length)
    return [row[start:end].tolist() for row, start, end in ends]


class TrainState(NamedTuple):
    """Everything a step updates; donated to it. `drafter` parts are None without a drafter.

    adapters: with LoRA they are trained, and `params` stand still; else None.
    reference: a frozen policy; None when beta is 0, and with LoRA, whose `params` are it.
    """

    step: Int[Array, ""]
    params: Params
    opt_state: Any
    drafter: Params
    drafter_opt_state: Any
    drafter_steps: Int[Array, ""]
    reference: Params
    adapters: Params = None

    @property
    def trained(self) -> Params:
        """Return what the policy's optimiser updates."""
        return self.params if self.adapters is None else self.adapters


def prompt_key(ids: Sequence[int]) -> str:
    """Tell prompts apart by their token ids, in what is remembered of them from step to step."""
    return f"{zlib.crc32(np.asarray(ids, np.int64).tobytes()):08x}"


def tree_bytes(tree: Any) -> int:
    """Count the bytes of all arrays in a tree."""
    return sum(x.size * x.dtype.itemsize for x in jax.tree.leaves(tree))

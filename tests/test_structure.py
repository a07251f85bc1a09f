"""The borders of the package: parsed from the imports, so that a back arrow cannot slip in."""

import ast
import graphlib
import pathlib

import pytest

import fastgrpo_jax

ROOT = pathlib.Path(fastgrpo_jax.__file__).parent
NAME = "fastgrpo_jax"

# What each part may import of the package besides itself; main, bench and the like are the rim.
ALLOWED = {
    "base": set(),
    "configs": {"base"},
    "hosts": {"base"},
    "sharding": {"base"},
    "spmd": {"base", "sharding"},
    "models": {"base", "sharding", "spmd"},
    "rollout": {"base", "models", "sharding", "spmd"},
    "train": {"base", "hosts", "models", "sharding", "spmd"},
}
DRIVERS = {
    f"train.{name}": {"rollout", "configs"}
    for name in ("loop", "play", "setup", "check", "rollouts")
}
JIT_FILES = {"rollout.decode", "train.step", "train.drafter"}
JIT_NAMES = {"jit", "pjit", "pmap"}
SHARDING_FILES = {"sharding", "spmd"}
SHARDING_NAMES = {"NamedSharding", "PartitionSpec", "with_sharding_constraint", "make_mesh", "Mesh"}
NEVER_IN_CORE = {"torch", "vllm", "ray", "tensorflow"}


def module_name(path: pathlib.Path) -> str:
    parts = path.relative_to(ROOT).with_suffix("").parts
    return ".".join(parts[:-1] if parts[-1] == "__init__" else parts)


def parse_package() -> dict[str, ast.Module]:
    return {module_name(p): ast.parse(p.read_text()) for p in sorted(ROOT.rglob("*.py"))}


MODULES = parse_package()


def imports(tree: ast.Module) -> set[str]:
    """List every absolute dotted name that is imported anywhere in a file, functions included."""
    found = set()
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            found |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom):
            assert not node.level, "imports are absolute"
            found |= {f"{node.module}.{alias.name}" for alias in node.names}
    return found


def names(tree: ast.Module) -> set[str]:
    """List every identifier, attribute and imported leaf of a file."""
    found = {leaf.rpartition(".")[2] for leaf in imports(tree)}
    for node in ast.walk(tree):
        if isinstance(node, ast.Name):
            found.add(node.id)
        elif isinstance(node, ast.Attribute):
            found.add(node.attr)
    return found


def back_arrows(module: str, tree: ast.Module) -> set[str]:
    """List the parts of the package that a module imports and may not."""
    part = module.partition(".")[0]
    if part not in ALLOWED:
        return set()
    own = [name.split(".")[1:] for name in imports(tree) if name.split(".")[0] == NAME]
    parts = {path[0] if path else "" for path in own}
    return parts - ALLOWED[part] - {part} - DRIVERS.get(module, set())


@pytest.mark.parametrize("module", MODULES)
def test_no_back_arrow_in(module):
    """rollout and train meet only where a run is set up and driven; models knows neither; base knows nothing."""
    assert back_arrows(module, MODULES[module]) == set()


def test_the_parts_are_all_there_and_the_rim_is_only_the_rim():
    parts = {name.partition(".")[0] for name in MODULES} - {""}
    assert {"base", "configs", "models", "rollout", "train"} <= parts
    assert parts - set(ALLOWED) <= {"main", "supervise", "bench", "plan", "export"}


@pytest.mark.parametrize(
    "module, source, expected",
    [
        ("models.policy", "from fastgrpo_jax.rollout import tree", {"rollout"}),
        ("models.policy", "import fastgrpo_jax.train.step as s", {"train"}),
        ("rollout.accept", "def f():\n    from fastgrpo_jax import base, train", {"train"}),
        ("rollout.decode", "from fastgrpo_jax.train.step import train_step", {"train"}),
        ("train.step", "from fastgrpo_jax.rollout import decode", {"rollout"}),
        ("train.loop", "from fastgrpo_jax.rollout import decode", set()),
        ("train.loop", "from fastgrpo_jax.bench import common", {"bench"}),
        ("base", "from fastgrpo_jax import models", {"models"}),
        ("base", "import jax", set()),
        ("configs.tiny", "from fastgrpo_jax.train import data", {"train"}),
        ("train.data", "from fastgrpo_jax.models import load\nimport fastgrpo_jax_tools", set()),
    ],
)
def test_a_back_arrow_would_be_seen(module, source, expected):
    assert back_arrows(module, ast.parse(source)) == expected


def test_no_module_imports_itself_through_others():
    graph = {}
    for module, tree in MODULES.items():
        inside = {name.removeprefix(f"{NAME}.") for name in imports(tree)}
        inside |= {name.rpartition(".")[0] for name in inside}
        graph[module] = {name for name in inside if name in MODULES} - {module, ""}
    graphlib.TopologicalSorter(graph).prepare()  # raises CycleError


@pytest.mark.parametrize("module", MODULES)
def test_jit_and_sharding_stay_in_their_files(module):
    used = names(MODULES[module])
    assert module in JIT_FILES or not used & JIT_NAMES
    assert module in SHARDING_FILES or not used & SHARDING_NAMES


def test_a_jit_or_a_sharding_would_be_seen():
    for source in (
        "jax.jit(f)",
        "from jax import jit",
        "@jax.jit\ndef f(): pass",
        "@nn.jit\nclass A: pass",
    ):
        assert names(ast.parse(source)) & JIT_NAMES
    for source in (
        "jax.lax.with_sharding_constraint(x, s)",
        "from jax.sharding import NamedSharding",
        "jax.sharding.PartitionSpec()",
    ):
        assert names(ast.parse(source)) & SHARDING_NAMES
    assert JIT_FILES <= set(MODULES)


@pytest.mark.parametrize("module", MODULES)
def test_no_other_framework_is_needed(module):
    """A bench may compare with one; the core never imports one."""
    tops = {name.partition(".")[0] for name in imports(MODULES[module])}
    assert module.startswith("bench") or not tops & NEVER_IN_CORE

"""Several processes: what each of them does alone, and whole runs of two and four."""

import json
import os
import pathlib
import re
import signal
import socket
import subprocess
import sys
import textwrap
import time

import numpy as np
import pytest

from fastgrpo_jax import base, hosts, main, supervise
from fastgrpo_jax.train import signals

ROOT = pathlib.Path(__file__).parent.parent
VARIABLES = ("JAX_COORDINATOR_ADDRESS", "JAX_NUM_PROCESSES", "JAX_PROCESS_ID")


@pytest.fixture(autouse=True)
def bare(monkeypatch):
    for name in VARIABLES:
        monkeypatch.delenv(name, raising=False)


# Where they meet.


def test_a_run_is_alone_unless_told_otherwise(monkeypatch):
    assert hosts.address("", 0, -1) is None
    assert hosts.address("", 1, 0) is None
    assert hosts.address("here:1", 1, 0) is None
    assert hosts.address("auto", 0, -1) == ("auto", 0, -1)
    assert hosts.address("here:1234", 3, 2) == ("here:1234", 3, 2)
    for name, value in zip(VARIABLES, ("there:99", "4", "3")):
        monkeypatch.setenv(name, value)
    assert hosts.address("", 0, -1) == ("there:99", 4, 3)
    assert hosts.address("here:1", 2, 1) == ("here:1", 2, 1)  # the config goes first
    assert str(hosts.address("", 0, -1)) == "process 3 of 4"


@pytest.mark.parametrize(
    ("given", "environment", "message"),
    [
        (("", 2, 0), {}, "hosts.count is 2, but hosts.coordinator is empty"),
        (("here", 2, 0), {}, "hosts.coordinator is 'here'; allowed: HOST:PORT"),
        ((":1", 2, 0), {}, "hosts.coordinator is ':1'"),
        (("here:0", 2, 0), {}, "hosts.coordinator is 'here:0'"),
        (("here:65536", 2, 0), {}, "hosts.coordinator is 'here:65536'"),
        (("here:1", 0, 0), {}, "hosts.count is 0; allowed"),
        (("here:1", 2, -1), {}, "hosts.index is -1; allowed: 0 to 1"),
        (("here:1", 2, 2), {}, "hosts.index is 2; allowed: 0 to 1"),
        (("here:1", 0, 0), {"JAX_NUM_PROCESSES": "two"}, "JAX_NUM_PROCESSES is 'two'"),
        (("here:1", 2, -1), {"JAX_PROCESS_ID": "-1"}, "JAX_PROCESS_ID is '-1'"),
    ],
)
def test_an_address_that_leads_nowhere_is_refused(given, environment, message, monkeypatch, capsys):
    for name, value in environment.items():
        monkeypatch.setenv(name, value)
    with pytest.raises(base.UserError, match=re.escape(message)):
        hosts.address(*given)
    keys = [f"--config.hosts.{k}={v}" for k, v in zip(("coordinator", "count", "index"), given)]
    assert main.main(["--config=tiny", "--workdir=unused", *keys]) == 2
    assert message in capsys.readouterr().err


def test_auto_without_a_cluster_says_what_to_give_instead(monkeypatch):
    def initialize(**_):
        raise ValueError("coordinator_address should be defined.")

    monkeypatch.setattr(hosts.jax.distributed, "initialize", initialize)
    with pytest.raises(base.UserError, match="no cluster that JAX knows was found here; allowed"):
        hosts.join(hosts.address("auto", 0, -1), 5)


def test_a_timeout_below_a_second_is_refused():
    with pytest.raises(base.UserError, match=r"hosts.timeout_s is 0; allowed: 1 or more"):
        hosts.join(hosts.Address("here:1", 2, 0), 0)
    hosts.join(None, 0)


# What they agree on, as far as one process shows it.


def test_one_process_agrees_with_itself():
    value = {"a": [1.5, None]}
    assert hosts.exchange(value)[0] is value
    assert hosts.from_first(lambda: 3) == 3
    assert hosts.together(lambda: "done") == "done"
    hosts.same("anything", value)
    assert hosts.first() and hosts.count() == 1
    with pytest.raises(base.UserError, match=r"^no$"):
        hosts.together(lambda: (_ for _ in ()).throw(base.UserError("no")))


@pytest.fixture
def crowd(monkeypatch):
    """Play process 1 of 3: what the others say is given, by turns."""
    said = []
    monkeypatch.setattr(hosts, "count", lambda: 3)
    monkeypatch.setattr(hosts.jax, "process_index", lambda: 1)

    def exchange(value):
        first, third = said.pop(0)
        return [first, value, third]

    monkeypatch.setattr(hosts, "exchange", exchange)
    return said


def test_what_one_process_refuses_all_refuse(crowd):
    def fail():
        raise base.UserError("no such file")

    crowd += [(None, None), (None, "mine"), (None, None), ("no such file", "no such file")]
    assert hosts.together(lambda: 7) == 7
    with pytest.raises(base.UserError, match=r"^process 2 of 3: mine$"):
        hosts.together(lambda: 7)
    with pytest.raises(base.UserError, match=r"^process 1 of 3: no such file$"):
        hosts.together(fail)
    with pytest.raises(base.UserError, match=r"^no such file$"):  # all: no need to say which
        hosts.together(fail)


def test_the_first_process_decides(crowd):
    crowd += [(None, None), ("first's", None)]
    assert hosts.from_first(lambda: pytest.fail("is not asked")) == "first's"
    crowd += [("x", "x")]
    with pytest.raises(base.UserError, match=r"the data differs between .*: 1 from 0"):
        hosts.same("the data", [1])


@pytest.mark.parametrize(("items", "count"), [(7, 3), (2, 4), (8, 4), (1, 1), (0, 2)])
def test_shares_follow_one_another_and_miss_nothing(items, count, monkeypatch):
    shares = []
    monkeypatch.setattr(hosts, "count", lambda: count)
    for i in range(count):
        monkeypatch.setattr(hosts.jax, "process_index", lambda i=i: i)
        shares.append(hosts.share(range(items)))
    assert [x for share in shares for x in share] == list(range(items))
    assert max(map(len, shares)) - min(map(len, shares)) <= 1


def test_a_signal_to_another_process_stops_this_one_at_the_same_call(crowd):
    crowd += [(None, None), (None, "SIGTERM")]
    heard = signals.Signals()
    for _ in range(31):
        heard.check()
    with pytest.raises(signals.Interrupted, match="SIGTERM"):
        heard.check()
    heard.caught = signal.SIGINT  # ours is told at the next turn, not at once
    heard.check()
    crowd += [(None, None)]
    with pytest.raises(signals.Interrupted, match="SIGINT"):
        heard.check(now=True)


# The supervisor.


def supervise_child(source: str) -> subprocess.Popen:
    """Start a supervisor of a Python program, which says "up" first."""
    child = "import os, sys, time; from fastgrpo_jax import supervise; supervise.follow()\n"
    child += f"print('up', os.getpid(), flush=True)\n{source}"
    parent = (
        "import sys; from fastgrpo_jax import supervise\n"
        f"sys.exit(supervise.supervise([sys.executable, '-c', {child!r}], 'process 1 of 2', 9))"
    )
    command = [sys.executable, "-c", parent]
    pipe = subprocess.PIPE
    return subprocess.Popen(command, stdout=pipe, stderr=pipe, text=True, cwd=ROOT)


@pytest.mark.parametrize(
    ("source", "code", "message"),
    [
        ("sys.exit(0)", 0, ""),
        ("sys.exit(2)", 2, ""),
        ("sys.exit(75)", 75, "process 1 of 2 has ended: another process of the run was lost"),
        ("os.abort()", 75, "another process of the run was lost, or one did not come or answer"),
        ("os.kill(os.getpid(), 9)", 75, "it was killed"),
        ("os.kill(os.getpid(), 15)", 143, ""),  # before it had a handler
    ],
)
def test_an_end_is_explained(source, code, message):
    run = supervise_child(source)
    err = run.communicate(timeout=60)[1]
    assert run.returncode == code
    assert (message in err) and bool(message) == ("start all processes again" in err)


def test_a_signal_is_passed_on():
    run = supervise_child(
        "import signal; signal.signal(15, lambda *_: sys.exit(143)); time.sleep(60)"
    )
    run.stdout.readline()
    time.sleep(0.5)  # the handler follows what is printed
    run.send_signal(signal.SIGTERM)
    assert run.wait(30) == 143


def test_no_process_is_left_behind():
    run = supervise_child("time.sleep(600)")
    child = int(run.stdout.readline().split()[1])
    run.kill()
    run.wait()
    for _ in range(300):
        try:
            state = pathlib.Path(f"/proc/{child}/stat").read_text().rpartition(")")[2].split()[0]
        except OSError:
            return
        if state == "Z":
            return
        time.sleep(0.1)
    os.kill(child, signal.SIGKILL)
    pytest.fail("the child lives on without its supervisor")


# Whole runs.

STEPS = 8


def make_config(folder: pathlib.Path) -> pathlib.Path:
    """Write a config whose rewards differ, and whose controller goes by clocks."""
    (folder / "rewards.py").write_text(
        "def spread(completion_ids, **_):\n"
        "    return [sum(ids) % 7 / 7 for ids in completion_ids]\n"
    )
    path = folder / "config.py"
    path.write_text(
        textwrap.dedent(f"""
            from fastgrpo_jax.configs import tiny

            def get_config():
                c = tiny.get_config()
                c.steps = {STEPS}
                c.compilation_cache = {str(folder / "programs")!r}
                c.model.dtype = "float64"
                c.task.prompts_per_step = 3  # some of four processes have none to score
                c.reward.functions = {str(folder / "rewards.py") + ":spread"!r}
                c.sampling.max_response_length = 12
                c.rollout.controller = "goodput"
                c.rollout.strategies = "learned:2:1:3,ngram:3:1:4"
                c.rollout.measure_seconds = 0.0
                c.rollout.row_buckets = "4,12"
                c.loss.kl_beta = 0.01
                c.drafter.replay_updates = 1
                c.checkpoint.every = 1
                c.checkpoint.keep = 9
                c.hosts.timeout_s = 30
                return c
            """)
    )
    return path


class Run:
    """Processes of one run, and what they say."""

    def __init__(self, config, workdir: pathlib.Path, count: int, *keys: str, devices=1, last=()):
        flags = (
            f"--xla_force_host_platform_device_count={devices} --xla_backend_optimization_level=0"
        )
        env = {**os.environ, "JAX_PLATFORMS": "cpu", "XLA_FLAGS": flags}
        with socket.socket() as free:
            free.bind(("localhost", 0))
            port = free.getsockname()[1]
        self.logs = [workdir.with_suffix(f".{i}.log") for i in range(count)]
        command = [sys.executable, "-m", "fastgrpo_jax.main"]
        command += [f"--config={config}", f"--workdir={workdir}", *keys]
        if count > 1:
            command += [f"--config.hosts.coordinator=localhost:{port}"]
            command += [f"--config.hosts.count={count}"]
        self.processes = []
        for i, log in enumerate(self.logs):
            own = [f"--config.hosts.index={i}"] if count > 1 else []
            own += last if i == count - 1 else []
            with log.open("w") as file:
                started = subprocess.Popen([*command, *own], env=env, stderr=file, stdout=file)
            self.processes.append(started)

    def child(self, index: int) -> int:
        """Find the process that a supervisor started."""
        pid = self.processes[index].pid
        return int(pathlib.Path(f"/proc/{pid}/task/{pid}/children").read_text().split()[0])

    def wait_for(self, workdir: pathlib.Path, steps: int) -> None:
        """Wait until the checkpoint of a step is there."""
        for _ in range(3000):
            if (workdir / "checkpoints" / str(steps)).is_dir():
                return
            if self.processes[0].poll() is not None:
                break
            time.sleep(0.1)
        pytest.fail(f"step {steps} was not reached:\n{self.said(0)}")

    def codes(self) -> list[int]:
        return [process.wait(300) for process in self.processes]

    def said(self, index: int) -> str:
        return self.logs[index].read_text()


def rows(workdir: pathlib.Path, name: str) -> list[dict]:
    return [json.loads(line) for line in (workdir / name).read_text().splitlines()]


CLOSE = ("loss", "entropy", "kl", "grad_norm", "drafter/loss", "drafter/replay_loss", "reward")


def check_same(workdir: pathlib.Path, expected: pathlib.Path) -> None:
    """Tokens, rewards and order are equal; losses within rounding."""
    told = (workdir / "completions.jsonl").read_text()
    assert told == (expected / "completions.jsonl").read_text()
    found, wanted = rows(workdir, "metrics.jsonl"), rows(expected, "metrics.jsonl")
    assert [row["step"] for row in found] == list(range(STEPS))
    for a, b in zip(found, wanted):
        for name in CLOSE:
            np.testing.assert_allclose(a[name], b[name], rtol=1e-5, atol=1e-6, err_msg=name)


@pytest.fixture(scope="module")
def alone(tmp_path_factory):
    """One process with one device, and the config."""
    folder = tmp_path_factory.mktemp("hosts")
    config = make_config(folder)
    run = Run(config, folder / "alone", 1)
    assert run.codes() == [0], run.said(0)
    assert any(row["grad_norm"] > 0 for row in rows(folder / "alone", "metrics.jsonl"))
    return folder, config


def test_a_run_that_loses_a_process_goes_on_with_two_or_four(alone):
    """Killed, told to stop, begun again with other numbers of processes and another mesh: one
    run's tokens, rewards and losses come of it all."""
    folder, config = alone
    workdir = folder / "several"
    run = Run(config, workdir, 2)
    run.wait_for(workdir, 1)
    os.kill(run.child(1), signal.SIGKILL)
    assert run.codes() == [supervise.LOST] * 2, run.said(0)
    assert "process 0 of 2 has ended: another process of the run was lost" in run.said(0)
    assert "process 1 of 2 has ended: it was killed" in run.said(1)
    assert "2 devices of 2 processes" in run.said(0) and "devices" not in run.said(1)

    run = Run(config, workdir, 4, "--config.mesh.fsdp=2")
    run.wait_for(workdir, 3)
    run.processes[2].send_signal(signal.SIGTERM)
    codes = run.codes()
    assert codes == [128 + signal.SIGTERM] * 4 or codes == [0] * 4, run.said(2)  # it was the last
    assert "resuming after step" in run.said(0)

    run = Run(config, workdir, 2, "--config.mesh.tensor=2", devices=2)
    assert run.codes() == [0, 0], run.said(0)
    check_same(workdir, folder / "alone")


@pytest.mark.parametrize(
    ("keys", "message"),
    [
        (["--config.seed=1"], "process 1 has seed 1, process 0 0; all processes must be started"),
        (
            ["--workdir=elsewhere"],
            "process 1 of 2: --workdir is 'elsewhere', which is not the folder",
        ),
    ],
    ids=["config", "workdir"],
)
def test_processes_that_are_not_started_alike_are_refused(keys, message, alone):
    folder, config = alone
    run = Run(config, folder / "refused", 2, last=keys)
    assert run.codes() == [2, 2]
    for i in (0, 1):
        assert message in run.said(i)
    assert not (folder / "refused" / "config.json").exists()


def test_a_reward_that_fails_in_one_process_ends_all_of_them(alone):
    """Each scores its own groups; those of the second process fail in the second step."""
    folder, config = alone
    (folder / "fails.py").write_text(
        "import jax\ncalls = []\n\n"
        "def fails(completions, **_):\n"
        "    calls.append(len(completions))\n"
        "    assert len(calls) < 2 or jax.process_index() == 0, 'as planned'\n"
        "    return [0.0] * len(completions)\n"
    )
    key, workdir = f"--config.reward.functions={folder / 'fails.py'}:fails", folder / "failed"
    run = Run(config, workdir, 2, key)
    assert run.codes() == [2, 2]
    for i in (0, 1):
        assert "error: process 1 of 2: reward function fails failed on 8 rows" in run.said(i)
    assert (workdir / "checkpoints" / "1").is_dir()
    assert len(rows(workdir, "metrics.jsonl")) == 1

"""Workers and command lines that die, stop or are interrupted: a reason within seconds, and nothing left."""

from __future__ import annotations

import os
import signal
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from longprefill.comms.transport.holder import sweep_stale
from longprefill.orchestrator import LocalCluster
from longprefill.orchestrator.errors import RunFailed
from longprefill.orchestrator.ray_runtime import sweep_stale_directories

from .support.clusters import assert_cluster_left_nothing
from .support.command import Command, running
from .support.models import make_model, random_tokens
from .support.processes import marked, marking, pid_running, pool_files, wait_for

pytestmark = [pytest.mark.ray, pytest.mark.timeout(300)]

PROMPT = random_tokens(60_000, seed=3)
STEP_TOKENS = 512


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_model(tmp_path_factory.mktemp("models") / "hybrid", "longprefill_hybrid", index_kpool=4)


@pytest.fixture(scope="module")
def long_run(model: Path, tmp_path_factory: pytest.TempPathFactory) -> list[object]:
    """A prefill of many steps."""
    prompt = tmp_path_factory.mktemp("prompts") / "long.npy"
    np.save(prompt, PROMPT)
    return ["run", "--model", model, "--prompt", prompt, "--cp", 2, "--step-tokens", STEP_TOKENS]


@pytest.fixture(scope="module")
def long_generation(model: Path, tmp_path_factory: pytest.TempPathFactory) -> list[object]:
    """A generation of many tokens."""
    prompt = tmp_path_factory.mktemp("prompts") / "short.npy"
    np.save(prompt, PROMPT[:100])
    return ["run", "--model", model, "--prompt", prompt, "--max-new-tokens", 20_000]


# ---- workers ---------------------------------------------------------------------------------------------------------


def line_of_run_with(model: Path, fault: Callable[[str], None], **settings: Any) -> str:
    """Why a run failed in whose second step `fault(mark)` happened."""
    cluster = LocalCluster(model, step_tokens=STEP_TOKENS, max_tokens=61_000, **settings)
    with marking() as mark:
        with pytest.raises(RunFailed) as failure, cluster:
            cluster.prefill(PROMPT, on_step=lambda step: fault(mark) if step.number == 1 else None)
        assert_cluster_left_nothing(mark)
    line = str(failure.value)
    assert "\n" not in line
    return line


def test_a_stopped_rank_is_ended_by_the_heartbeat(model: Path) -> None:
    def stop(mark: str) -> None:
        os.kill(pid_running(mark, "ray::PrefillWorker"), signal.SIGSTOP)

    line = line_of_run_with(model, stop, cp=2, heartbeat_timeout_s=3.0)
    assert "prefill rank" in line
    assert "stopped answering for 3 s" in line


def test_a_dead_decode_worker_ends_the_prefill(model: Path) -> None:
    def kill(mark: str) -> None:
        os.kill(pid_running(mark, "ray::DecodeWorker"), signal.SIGKILL)

    line = line_of_run_with(model, kill, cp=1)
    assert "decode worker (pid " in line
    assert "died" in line


def test_a_dead_rank_ends_the_command(long_run: list[object]) -> None:
    with running(long_run) as command:
        pid = pid_running(command.mark, "ray::PrefillWorker.run_step")
        os.kill(pid, signal.SIGKILL)
        finished = command.finish()
        assert finished.code == 1
        assert f"(pid {pid}) died" in finished.last_line
        assert "prefill rank" in finished.last_line
        assert finished.out == ""
        command.assert_nothing_left()


# ---- the command itself ----------------------------------------------------------------------------------------------


def to_command(command: Command, number: int) -> None:
    os.kill(command.process.pid, number)


def to_terminal(command: Command, number: int) -> None:
    """As Ctrl-C does: to every process of the session's group."""
    os.killpg(command.process.pid, number)


@pytest.mark.parametrize(
    ("title", "number", "send"),
    [
        pytest.param("gcs_server", signal.SIGINT, to_command, marks=pytest.mark.extended),
        ("raylet/raylet", signal.SIGTERM, to_command),
        pytest.param("ray::PrefillWorker", signal.SIGINT, to_terminal, marks=pytest.mark.extended),
        pytest.param("ray::PrefillWorker.run_step", signal.SIGTERM, to_command, marks=pytest.mark.extended),
        ("ray::PrefillWorker.run_step", signal.SIGINT, to_terminal),
    ],
)
def test_interrupts(
    long_run: list[object], title: str, number: signal.Signals, send: Callable[[Command, int], None]
) -> None:
    """While Ray starts, while models load, in the middle of a step."""
    with running(long_run) as command:
        pid_running(command.mark, title)
        send(command, number)
        finished = command.finish()
        assert finished.code == 130, finished.err
        assert finished.last_line == "interrupted"
        command.assert_nothing_left()


def test_interrupt_of_a_generation(long_generation: list[object]) -> None:
    with running(long_generation) as command:
        assert command.process.stdout is not None
        assert command.process.stdout.read(1)
        to_terminal(command, signal.SIGINT)
        finished = command.finish()
        assert finished.code == 130, finished.err
        assert finished.last_line == "interrupted"
        command.assert_nothing_left()


def test_a_reader_that_leaves(long_generation: list[object]) -> None:
    """`longprefill run ... | head -c 1` ends, without a word."""
    with running(long_generation) as command:
        assert command.process.stdout is not None
        assert command.process.stdout.read(1)
        command.process.stdout.close()
        assert command.process.wait(timeout=100) == 141
        err = command.error_text()
        assert "Traceback" not in err
        assert "BrokenPipe" not in err
        command.assert_nothing_left()


def test_a_killed_command(long_run: list[object], monkeypatch: pytest.MonkeyPatch) -> None:
    """Nobody could clean up: its processes end by themselves, its files with the next start."""
    with running(long_run) as command:
        pid_running(command.mark, "ray::PrefillWorker.run_step")
        assert len(pool_files(command.process.pid)) == 3
        to_command(command, signal.SIGKILL)
        command.process.wait()
        # Ray's agents look for their raylet once a minute; everything else ends within seconds
        wait_for(lambda: not marked(command.mark), lambda: f"processes left: {marked(command.mark)}", deadline_s=90)
        assert len(list(command.directory.iterdir())) == 1
        sweep_stale()
        monkeypatch.setattr(tempfile, "tempdir", str(command.directory))
        sweep_stale_directories()
        command.assert_nothing_left()

"""The one place that knows devices: names, refusals, backends."""

from __future__ import annotations

import builtins
import importlib
import multiprocessing
import pickle
from typing import Any

import pytest
import torch

from longprefill.partition.errors import UserError
from longprefill.workers import device
from longprefill.workers.device import DeviceError


def test_the_cpu_is_always_there() -> None:
    found = device.resolve_device("cpu")
    assert found == torch.device("cpu")
    assert device.resolve_device("cpu:0") == found
    device.set_current(found)
    device.synchronize(found)
    memory = device.memory(found)
    assert 0 < memory.free_bytes <= memory.total_bytes


def test_without_a_name_the_best_kind_that_is_here_is_taken(monkeypatch: pytest.MonkeyPatch) -> None:
    here = {"cuda", "cpu"}
    monkeypatch.setattr(device, "refusal", lambda kind: None if kind in here else "not here")
    assert device.resolve_device() == torch.device("cuda", 0)
    here.discard("cuda")
    assert device.resolve_device() == torch.device("cpu")


@pytest.mark.parametrize(
    ("name", "expected"),
    [
        ("tpu", "allowed are cpu, cuda, npu"),
        ("", "allowed are"),
        ("cpu:1", "there are 1 of kind cpu"),
        ("cpu:x", "no device number"),
        ("cpu:-1", "no device number"),
        ("cpu:٣", "no device number"),
    ],
)
def test_a_wrong_name_is_refused_with_what_is_allowed(name: str, expected: str) -> None:
    with pytest.raises(DeviceError, match=expected):
        device.resolve_device(name)


def test_a_refusal_is_a_user_error_that_pickles() -> None:
    with pytest.raises(UserError) as caught:
        device.resolve_device("tpu")
    assert str(pickle.loads(pickle.dumps(caught.value))) == str(caught.value)


@pytest.mark.skipif(torch.version.cuda is not None, reason="this torch has CUDA")
def test_a_torch_without_cuda_says_what_to_install() -> None:
    with pytest.raises(DeviceError, match="built without CUDA: install"):
        device.resolve_device("cuda:0")


@pytest.mark.parametrize(
    ("error", "expected"),
    [
        (ModuleNotFoundError("No module named 'torch_npu'", name="torch_npu"), "torch_npu is not installed"),
        (ModuleNotFoundError("No module named 'yaml'", name="yaml"), "its dependency 'yaml' is not"),
        (ImportError("libhccl.so: cannot open shared object file"), r"does not load \(libhccl.so.*install CANN"),
    ],
)
def test_an_absent_npu_stack_is_refused_with_its_reason(
    error: ImportError, expected: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    def import_module(name: str) -> Any:
        assert name == "torch_npu"
        raise error

    monkeypatch.setattr(importlib, "import_module", import_module)
    with pytest.raises(DeviceError, match=expected):
        device.resolve_device("npu:0")


def test_a_broken_stack_that_is_not_an_import_error_keeps_its_traceback(monkeypatch: pytest.MonkeyPatch) -> None:
    def import_module(name: str) -> Any:
        raise builtins.SyntaxError("broken")

    monkeypatch.setattr(importlib, "import_module", import_module)
    with pytest.raises(SyntaxError):
        device.resolve_device("npu")


@pytest.mark.parametrize(("name", "backend"), [("cpu", "gloo"), ("cuda:1", "nccl"), ("npu:0", "hccl")])
def test_each_kind_has_its_backend(name: str, backend: str) -> None:
    assert device.backend_for(name) == backend


def test_a_torch_device_has_the_backend_of_its_kind() -> None:
    assert device.backend_for(torch.device("cuda", 1)) == "nccl"
    with pytest.raises(DeviceError, match="device kind 'meta'"):
        device.backend_for(torch.device("meta"))


def test_threads_are_set_and_more_than_the_cores_are_refused() -> None:
    device.configure_threads(1)
    assert torch.get_num_threads() == 1
    for num_threads in (0, 100_000):
        with pytest.raises(DeviceError, match=f"num_threads={num_threads}: needs 1 to"):
            device.configure_threads(num_threads)


def test_the_doctor_gets_a_row_for_every_kind() -> None:
    rows = {row.kind: row for row in device.describe_devices()}
    assert {kind: row.backend for kind, row in rows.items()} == device.BACKENDS
    assert rows["cpu"].count == 1
    assert rows["cpu"].refusal is None
    assert rows["cpu"].name
    assert all((row.count == 0) == (row.refusal is not None) for row in rows.values())


def test_freed_memory_is_kept_on_glibc() -> None:
    context = multiprocessing.get_context("fork")
    here, there = context.Pipe()
    process = context.Process(target=lambda: there.send(device.keep_freed_memory()))
    process.start()
    assert here.poll(30)
    assert here.recv() is True
    process.join(30)
    here.close()
    there.close()

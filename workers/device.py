"""The one place that knows the kinds of device: cpu, cuda, npu, and the backend that moves bytes between each.

Everything else takes a `torch.device` and works on whatever it is.
"""

from __future__ import annotations

import contextlib
import ctypes
import importlib
import os
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import torch

from longprefill.partition.errors import UserError

BACKENDS = {"cpu": "gloo", "cuda": "nccl", "npu": "hccl"}
"""torch.distributed backend by kind of device."""


class DeviceError(UserError):
    """The device that was asked for is not here, and why."""


@dataclass(frozen=True, slots=True, kw_only=True)
class DeviceRow:
    """One line of `longprefill doctor`."""

    kind: str
    backend: str
    count: int
    """Usable devices of this kind; 0 when `refusal` says why not."""
    name: str
    refusal: str | None


@dataclass(frozen=True, slots=True, kw_only=True)
class Memory:
    """Memory of one device."""

    free_bytes: int
    total_bytes: int


def resolve_device(name: str | None = None) -> torch.device:
    """The device of that name, as `cpu`, `cuda`, `cuda:1`, `npu:0`; None takes the first kind here of npu, cuda, cpu.

    Raises:
        DeviceError: unknown kind, not available here, or an index beyond the devices: which, and what to do.
    """
    if name is None:
        kind = next(kind for kind in ("npu", "cuda", "cpu") if refusal(kind) is None)
        return torch.device(kind) if kind == "cpu" else torch.device(kind, 0)
    kind, _, index_text = name.partition(":")
    if kind not in BACKENDS:
        raise DeviceError(f"device '{name}': allowed are {', '.join(BACKENDS)}, with an index as in cuda:0")
    if index_text and not (index_text.isascii() and index_text.isdigit()):
        raise DeviceError(f"device '{name}': '{index_text}' is no device number: write it as in {kind}:0")
    reason = refusal(kind)
    if reason is not None:
        raise DeviceError(f"device '{name}' cannot be used: {reason}")
    index = int(index_text or 0)
    count = device_count(kind)
    if index >= count:
        raise DeviceError(f"device '{name}': there are {count} of kind {kind}: use an index from 0 to {count - 1}")
    return torch.device(kind) if kind == "cpu" else torch.device(kind, index)


def refusal(kind: str) -> str | None:
    """Why devices of this kind cannot be used here; None when they can."""
    if kind == "cpu":
        return None
    if kind == "cuda":
        if torch.version.cuda is None:
            return f"torch {torch.__version__} was built without CUDA: install a CUDA build of torch, or use cpu"
        if not torch.cuda.is_available():
            return "no CUDA device is visible: check nvidia-smi and CUDA_VISIBLE_DEVICES, or use cpu"
        return None
    if kind == "npu":
        return npu_refusal()
    raise DeviceError(f"device kind '{kind}': allowed are {', '.join(BACKENDS)}")


def npu_refusal() -> str | None:
    """Why Ascend NPUs cannot be used here; None when they can."""
    try:
        importlib.import_module("torch_npu")
    except ModuleNotFoundError as error:
        if error.name != "torch_npu":
            return f"torch_npu is installed but its dependency '{error.name}' is not: install that, or use cpu"
        return "torch_npu is not installed: install longprefill[npu] on a machine with CANN, or use cpu"
    except ImportError as error:
        return f"torch_npu is installed but does not load ({error}): install CANN and source its set_env.sh, or use cpu"
    if not namespace("npu").is_available():
        return "no NPU is visible: check npu-smi info and ASCEND_RT_VISIBLE_DEVICES, or use cpu"
    return None


def device_count(kind: str) -> int:
    """Devices of this kind that this process may use; the CPU counts as one."""
    return 1 if kind == "cpu" else int(namespace(kind).device_count())


def backend_for(device: torch.device | str) -> str:
    """The torch.distributed backend of a device: gloo, nccl or hccl.

    Raises:
        DeviceError: a kind of device that is none of ours.
    """
    kind = torch.device(device).type if isinstance(device, torch.device) else device.partition(":")[0]
    if kind not in BACKENDS:
        raise DeviceError(f"device kind '{kind}': allowed are {', '.join(BACKENDS)}")
    return BACKENDS[kind]


def set_current(device: torch.device) -> None:
    """Makes `device` the one that this process allocates and launches on; nothing to do for the CPU."""
    if device.type != "cpu":
        namespace(device.type).set_device(device)


def synchronize(device: torch.device) -> None:
    """Waits until everything launched on `device` is done; the CPU is always done."""
    if device.type != "cpu":
        namespace(device.type).synchronize(device)


def memory(device: torch.device) -> Memory:
    """Free and total memory of the device; for the CPU what the kernel says is available to new programs."""
    if device.type != "cpu":
        free_bytes, total_bytes = namespace(device.type).mem_get_info(device)
        return Memory(free_bytes=free_bytes, total_bytes=total_bytes)
    found: dict[str, int] = {}
    with open("/proc/meminfo", encoding="ascii") as file:
        for line in file:
            name, _, rest = line.partition(":")
            if name in ("MemTotal", "MemAvailable"):
                found[name] = int(rest.split()[0]) * 1024
    return Memory(free_bytes=found["MemAvailable"], total_bytes=found["MemTotal"])


@contextlib.contextmanager
def flushed_denormals() -> Iterator[None]:
    """Denormals are zeros in this thread while the block runs: decays underflow through them, and they are slow.

    Afterwards the thread's floats are what they were: the mode is the caller's, and he may be in a process not his own.
    """
    was_flushing = sys.float_info.min / 2 == 0.0
    torch.set_flush_denormal(True)
    try:
        yield
    finally:
        torch.set_flush_denormal(was_flushing)


def configure_threads(num_threads: int) -> None:
    """Threads of one rank's CPU kernels. How they idle (OMP_WAIT_POLICY) only the launcher's environment can say.

    Raises:
        DeviceError: less than one, or more than the cores that this process may use.
    """
    num_cores = len(os.sched_getaffinity(0))
    if not 1 <= num_threads <= num_cores:
        raise DeviceError(f"num_threads={num_threads}: needs 1 to {num_cores}, the cores this process may use")
    torch.set_num_threads(num_threads)


def describe_devices() -> list[DeviceRow]:
    """A row for each kind of device, usable or not."""
    rows = []
    for kind, backend in BACKENDS.items():
        reason = refusal(kind)
        count = 0 if reason is not None else device_count(kind)
        rows.append(DeviceRow(kind=kind, backend=backend, count=count, name=model_name(kind, count), refusal=reason))
    return rows


def model_name(kind: str, count: int) -> str:
    """What the maker calls the first device of this kind; empty without one."""
    if count == 0:
        return ""
    if kind != "cpu":
        return str(namespace(kind).get_device_name(0))
    with open("/proc/cpuinfo", encoding="utf-8", errors="replace") as file:
        for line in file:
            if line.lower().startswith(("model name", "cpu model")):
                return line.partition(":")[2].strip()
    return "unknown"


def namespace(kind: str) -> Any:
    """torch.cuda or torch.npu: the two modules have the same functions."""
    if kind == "cuda":
        return torch.cuda
    importlib.import_module("torch_npu")  # brings torch.npu
    return torch.npu  # pyright: ignore[reportAttributeAccessIssue]


def keep_freed_memory() -> bool:
    """Makes malloc keep what is freed instead of giving it back to the kernel, process-wide; False without glibc.

    The buffers of one layer then reuse the warm pages of the last. A 16 MiB gather takes 3 to 5 times as long into
    pages that the kernel must first zero. Call it once, before the first large allocation; the price is a resident
    size that stays at its peak.
    """
    libc = ctypes.CDLL(None)
    try:
        mallopt = libc.mallopt
    except AttributeError:
        return False
    # <malloc.h>: M_MMAP_MAX = -4 and M_TRIM_THRESHOLD = -1; both return 1 on success.
    return bool(mallopt(-4, 0) == 1 and mallopt(-1, 2**31 - 1) == 1)

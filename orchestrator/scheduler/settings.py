"""Settings of a scheduler and of the fleet it decides for."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

from longprefill.orchestrator.scheduler.jobs import Mesh, SchedulerError
from longprefill.partition.layout import PAGE_TOKENS
from longprefill.partition.steps import DEFAULT_MAX_STEP_TOKENS, check_step_tokens


@dataclass(frozen=True, slots=True, kw_only=True)
class FleetSettings:
    """Units: the smallest groups of devices that hold the model. A job runs on a power of two of them."""

    num_units: int = 1
    devices_per_unit: int = 1
    tp: int = 1
    """Tensor-parallel ranks inside a unit; the others are context-parallel."""
    cache_bytes: int | None = None
    """What a device gives to the caches of jobs; None: no limit."""
    token_bytes: int = 0
    """Cache of one token on every device, all layers."""
    state_bytes: int = 0
    """A job's boundary state, all layers."""
    step_bytes: int = 0
    """Activations and gather buffers of a step's token on the fullest device."""
    move_bytes_per_s: float = float("inf")
    """Bringing pages and states from where they are to another unit."""
    is_recoverable: bool = True
    """Finished steps survive the loss of a unit (a second failure domain holds them: the job's other units, or another
    one of the same machine)."""
    can_move: bool = True
    """A started job may go on elsewhere while its own units are busy."""

    def __post_init__(self) -> None:
        for name in ("num_units", "devices_per_unit", "tp"):
            if getattr(self, name) < 1:
                raise SchedulerError(f"{name}={getattr(self, name)}: need 1 or more")
        if self.devices_per_unit % self.tp:
            raise SchedulerError(f"tp={self.tp} does not divide devices_per_unit={self.devices_per_unit}")
        if self.move_bytes_per_s <= 0:
            raise SchedulerError(f"move_bytes_per_s={self.move_bytes_per_s}: use a positive number")
        for name in ("token_bytes", "state_bytes", "step_bytes"):
            if getattr(self, name) < 0:
                raise SchedulerError(f"{name}={getattr(self, name)}: need 0 or more")

    def mesh(self, num_units: int) -> Mesh:
        """The mesh of a block of units."""
        return Mesh(cp=num_units * self.devices_per_unit // self.tp, tp=self.tp)

    def job_bytes(self, num_tokens: int) -> int:
        """What a job holds on every device of its block: whole pages and its state."""
        return -(-num_tokens // PAGE_TOKENS) * PAGE_TOKENS * self.token_bytes + self.state_bytes


@dataclass(frozen=True, slots=True, kw_only=True)
class SchedulerSettings:
    """How decisions are made."""

    policy: str = "guarded"
    step_tokens: int | None = None
    """Steps end on multiples of this, whatever they cost; None: steps are sized by time."""
    step_target_s: float = 1.0
    """A step takes at most this long, but for one grain (`sizing.GRAIN_TOKENS`): nothing waits longer for a border."""
    max_step_tokens: int = DEFAULT_MAX_STEP_TOKENS
    max_degree: int = 1
    """Units that one job may use at once, a power of two."""
    widen_efficiency: float = 0.7
    """A job takes twice the units only if they do at least this share of twice the work."""
    pack_tokens: int = 0
    """Jobs with at most this much left share a step; 0: never."""
    max_queued: int = 100_000
    tenant_weights: Mapping[str, float] = field(default_factory=dict)

    def __post_init__(self) -> None:
        if self.step_tokens is not None:
            check_step_tokens(self.step_tokens)
        check_step_tokens(self.max_step_tokens)
        if self.step_target_s <= 0:
            raise SchedulerError(f"step_target_s={self.step_target_s}: use a positive number")
        if self.max_degree < 1 or self.max_degree & (self.max_degree - 1):
            raise SchedulerError(f"max_degree={self.max_degree}: use a power of two")
        if not 0 < self.widen_efficiency <= 1:
            raise SchedulerError(f"widen_efficiency={self.widen_efficiency}: use a number in (0, 1]")
        if self.max_queued < 1:
            raise SchedulerError(f"max_queued={self.max_queued}: need 1 or more")
        if self.pack_tokens < 0:
            raise SchedulerError(f"pack_tokens={self.pack_tokens}: need 0 or more")

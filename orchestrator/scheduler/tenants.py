"""Tenants share the fleet by weight: who has had more than his share lately has a smaller claim on what comes next."""

from __future__ import annotations

from collections.abc import Mapping

from longprefill.orchestrator.scheduler.jobs import SchedulerError

LIMIT = 4.0
"""A claim stays within [1 / LIMIT, LIMIT], so that no tenant is shut out and the guard stays what bounds waiting."""
HALF_LIFE_S = 600.0


class TenantShares:
    """Served seconds by tenant, halved every HALF_LIFE_S. Unknown tenants have weight 1."""

    def __init__(self, weights: Mapping[str, float]) -> None:
        for tenant, weight in weights.items():
            if weight <= 0:
                raise SchedulerError(f"weight of tenant {tenant!r} is {weight}: use a positive number")
        self._weights = dict(weights)
        self._served_s: dict[str, float] = {}
        self._at_s = 0.0

    def claim(self, tenant: str, now: float) -> float:
        """Entitled share over used share among the tenants seen so far; 1 while there is only one."""
        self._decay(now)
        self._served_s.setdefault(tenant, 0.0)
        used = sum(self._served_s.values())
        if len(self._served_s) < 2 or used <= 0:
            return 1.0
        entitled = self._weight(tenant) / sum(self._weight(name) for name in self._served_s)
        share = self._served_s[tenant] / used
        return LIMIT if share * LIMIT <= entitled else max(entitled / share, 1 / LIMIT)

    def serve(self, tenant: str, seconds: float, now: float) -> None:
        """Unit-seconds given to a tenant."""
        self._decay(now)
        self._served_s[tenant] = self._served_s.get(tenant, 0.0) + seconds

    def _weight(self, tenant: str) -> float:
        return self._weights.get(tenant, 1.0)

    def _decay(self, now: float) -> None:
        # in whole steps of a tenth of the half-life: the cost is then nothing, and equal calls give equal sums
        ticks = int((now - self._at_s) / (HALF_LIFE_S / 10))
        if ticks <= 0:
            return
        factor = 0.5 ** (ticks / 10)
        self._served_s = {tenant: served * factor for tenant, served in self._served_s.items()}
        self._at_s += ticks * (HALF_LIFE_S / 10)

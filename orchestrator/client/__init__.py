"""The client of a service: submit, follow, cancel."""

from longprefill.orchestrator.client.client import Client
from longprefill.orchestrator.client.errors import JobNotFound, ServiceRefused, ServiceUnreachable

__all__ = ["Client", "JobNotFound", "ServiceRefused", "ServiceUnreachable"]

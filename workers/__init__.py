"""Holds state: devices, models, caches, the prefill and decode workers. Importing this package imports no torch."""

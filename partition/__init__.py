"""Indices only: how a step's tokens are cut over ranks, restored, counted and sized. Imports neither torch nor ray."""

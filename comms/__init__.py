"""Moves bytes: process groups, collectives with a byte ledger, an in-process fake, page transports."""

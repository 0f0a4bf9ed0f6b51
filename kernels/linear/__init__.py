"""See README.md beside this file for the derivation."""

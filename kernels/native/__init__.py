"""Compiled CPU kernels: which instruction set, how the library is built, and how it is loaded. See README.md."""

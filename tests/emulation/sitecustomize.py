"""Python imports this when it starts with this folder on PYTHONPATH: the processor passes for one with every set.

With CXX set to the compiler beside this file, libraries of those that the processor lacks are made of loops, and every
process that a test starts takes them. `scripts/test --all-isas --emulate` sets both.
"""

from longprefill.kernels.native import isa

isa.supported_isas = lambda: isa.ISAS

"""A cluster that exists only in numbers: the real scheduler over virtual units, links, decode workers and caches.

`engine` is the clock; `cluster` is the file that describes the machine; `trace` the jobs; `costs` how long a step
takes; `prefix_cache` what is kept; `world` what changes, `steps`, `handing` and `failures` the events that change it;
`replay` one run; `metrics` its figures; `sweep` scaling.
"""

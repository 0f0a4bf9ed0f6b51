"""From a model, a prompt's length and a cluster to a plan: mesh, steps, layout, exchange, caches, and why not another.

`models` finds configs; `machines` is the cluster as devices and links; `candidate` is one way to run, `evaluate` what
it costs and whether it fits; `search` chooses; `crossovers` says where the choice would change; `report` is the answer
as JSON, `tables` as text.
"""

"""Which job runs next, where, and for how long: pure decisions over estimates, the same code in service and simulator.

`jobs` and `decisions` are data; `base` is what a policy is; `fcfs`, `edf`, `srpt` and `guarded` are policies; `sizing`
chooses steps and degrees; `admission` and `fleet` keep memory and places; `scheduler` puts them together.
"""

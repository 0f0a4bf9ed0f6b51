"""`longprefill bench --calibrate FILE`: measures this machine and writes a device profile.

`command` drives two worker processes (`worker`), each with an engine of its own (`engine`): a prefill rank that runs
alone in a mesh of any size (`lone_group`) over one layer of every kind of a model (`reduced`), timed in place
(`stopwatch`). `links` times what crosses ranks, `tables` turns samples into a profile.
"""

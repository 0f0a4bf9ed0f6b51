"""Services that the dashboard can be looked at with: made-up jobs on made-up groups behind the real HTTP side.

`controller` keeps the contract in memory and does what it is told, `scenes` are states of it, `server` serves one on a
free port, `browser` starts Chromium. What is seen in them was never measured.
"""

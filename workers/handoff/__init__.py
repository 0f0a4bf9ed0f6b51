"""Handing a job to a decode worker: pages stream as steps finish, state and logits follow, checksums prove arrival.

A pool file holds a worker's cache pages and behind them slots, one a job under way, each with a packed boundary state
and
fp32 logits. Prefill ranks write one-sided from their pool into the decode worker's; new pages are dealt over the ranks
in runs. A slot is a transport channel: a new attempt raises its generation, and no write of an older attempt arrives.

    sender (every prefill rank)     open - send_pages after each step - finish (or cancel)
    receiver (the decode worker)    reserve - commit - release

The controller turns the ranks' parts into one `Manifest` and a `Commit`; the receiver answers `Ack` or `Nack`.
"""

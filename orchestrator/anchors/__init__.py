"""Published figures as facts, and what the cost model makes of them from published inputs and one calibration point."""

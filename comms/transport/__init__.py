"""Moving cache pages between the pools of two processes."""

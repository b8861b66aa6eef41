"""Who computes each step of an op: torch or our kernels, and with which tile."""

"""The gate for kernels that are not ours: named in a gate.toml, or registered in Python."""

"""Our kernels, registered with the gate as anybody registers theirs."""

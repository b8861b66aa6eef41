"""What is timed: ours and the other ways to do the same, side by side. `pytest bench/` times them."""

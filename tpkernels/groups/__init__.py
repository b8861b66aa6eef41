"""Groups of ranks: arithmetic, process groups, the current state, random streams."""

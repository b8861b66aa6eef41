"""Charts and pages of runs and benchmarks; matplotlib draws the charts, where it is installed."""

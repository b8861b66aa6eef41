"""Process groups, the one parallel state of this process, and random streams."""

"""Pictures of runs and measurements: as SVG, and where Pillow is installed as PNG."""

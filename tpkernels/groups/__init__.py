"""Rank arithmetic and drawing. The standard library only."""

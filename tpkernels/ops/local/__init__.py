"""Ops on tensors of one rank."""

"""Calls of a group, agreement of its ranks, and the transports that move rows between them."""

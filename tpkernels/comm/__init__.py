"""Collectives in flight, transports and buckets, over torch.distributed and the C++ extension."""

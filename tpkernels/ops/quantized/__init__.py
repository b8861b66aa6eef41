"""Linear layers whose products are computed in fp8: what ops do with `quantize`. See `kernels.recipe`."""

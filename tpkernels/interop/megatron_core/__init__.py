"""Megatron-Core's names over tpkernels. Modules are imported when they are asked for; none needs Megatron."""

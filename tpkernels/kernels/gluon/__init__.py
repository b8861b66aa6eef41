"""Products for Hopper whose loads have warps of their own, in Gluon: Triton 3.7 or later."""

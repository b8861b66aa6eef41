"""What a compiled sm_90 kernel costs in cycles, without a GPU: a model, which measures nothing."""

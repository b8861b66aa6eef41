"""Local ops as a package for Hugging Face's `kernels`, copied out of tpkernels."""

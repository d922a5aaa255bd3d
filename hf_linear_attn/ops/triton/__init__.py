"""What all kernels share: plans, tiles, primitives and how a plan is run; importing this package imports no Triton."""

// The kernels for many rows of head_dim 64, for the host.
#include "kernels/cuda/prefill_d64.cu"

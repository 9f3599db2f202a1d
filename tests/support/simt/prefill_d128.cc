// The kernels for many rows of head_dim 128, for the host.
#include "kernels/cuda/prefill_d128.cu"

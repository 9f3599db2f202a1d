// The kernels of head_dim 64, for the host.
#include "kernels/cuda/attend_d64.cu"

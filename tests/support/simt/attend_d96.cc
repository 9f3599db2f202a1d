// The kernels of head_dim 96, for the host.
#include "kernels/cuda/attend_d96.cu"

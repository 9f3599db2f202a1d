// The kernels of head_dim 256, for the host.
#include "kernels/cuda/attend_d256.cu"

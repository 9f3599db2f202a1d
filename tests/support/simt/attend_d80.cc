// The kernels of head_dim 80, for the host.
#include "kernels/cuda/attend_d80.cu"

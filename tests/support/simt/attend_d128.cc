// The kernels of head_dim 128, for the host.
#include "kernels/cuda/attend_d128.cu"

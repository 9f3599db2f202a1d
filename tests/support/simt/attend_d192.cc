// The kernels of head_dim 192, for the host.
#include "kernels/cuda/attend_d192.cu"

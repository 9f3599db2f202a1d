#include "kernels/cuda/attend_d256.cu"

#include "kernels/cuda/attend_d64.cu"

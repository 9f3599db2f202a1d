#include "kernels/cuda/attend_d96.cu"

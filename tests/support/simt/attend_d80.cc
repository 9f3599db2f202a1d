#include "kernels/cuda/attend_d80.cu"

#include "kernels/cuda/attend.cu"

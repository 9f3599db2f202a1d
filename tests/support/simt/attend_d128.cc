#include "kernels/cuda/attend_d128.cu"

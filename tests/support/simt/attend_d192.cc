#include "kernels/cuda/attend_d192.cu"

// The front of attention, for the host.
#include "kernels/cuda/attend.cu"

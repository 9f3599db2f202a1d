// The attention kernels for head_dim 96.
#include "kernels/cuda/attend_list.cuh"

namespace kvq::cuda {

AttendKernel attend_d96(Variant variant) { return kernel_of<96, false>(variant); }

}  // namespace kvq::cuda

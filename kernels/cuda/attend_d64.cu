// The attention kernels for head_dim 64.
#include "kernels/cuda/attend_list.cuh"

namespace kvq::cuda {

AttendKernel attend_d64(Variant variant) { return kernel_of<64, true>(variant); }

}  // namespace kvq::cuda

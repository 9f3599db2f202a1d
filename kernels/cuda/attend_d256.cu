// The attention kernels for head_dim 256.
#include "kernels/cuda/attend_list.cuh"

namespace kvq::cuda {

AttendKernel attend_d256(Variant variant) { return kernel_of<256, false>(variant); }

}  // namespace kvq::cuda

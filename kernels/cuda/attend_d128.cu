// The attention kernels for head_dim 128.
#include "kernels/cuda/attend_list.cuh"

namespace kvq::cuda {

AttendKernel attend_d128(Variant variant) { return kernel_of<128, true>(variant); }

}  // namespace kvq::cuda

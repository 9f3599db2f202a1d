// The attention kernels for head_dim 80.
#include "kernels/cuda/attend_list.cuh"

namespace kvq::cuda {

AttendKernel attend_d80(Variant variant) { return kernel_of<80, false>(variant); }

}  // namespace kvq::cuda

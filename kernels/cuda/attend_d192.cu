// The attention kernels for head_dim 192.
#include "kernels/cuda/attend_list.cuh"

namespace kvq::cuda {

AttendKernel attend_d192(Variant variant) { return kernel_of<192, false>(variant); }

}  // namespace kvq::cuda

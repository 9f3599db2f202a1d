// The transcode kernels from dense pages to int4.
#include "kernels/cuda/transcode_list.cuh"

namespace kvq::cuda {

TranscodeKernel int4_kernel(const Rewritten& all) { return kernel_of<Target::int4, 64, 80, 96, 128, 192, 256>(all); }

}  // namespace kvq::cuda

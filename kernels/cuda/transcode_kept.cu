// The transcode kernels from dense pages to int4 with kept channels.
#include "kernels/cuda/transcode_list.cuh"

namespace kvq::cuda {

TranscodeKernel kept_kernel(const Rewritten& all) { return kernel_of<Target::kept, 128>(all); }

}  // namespace kvq::cuda

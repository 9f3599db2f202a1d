// The transcode kernels from dense pages to k8v4, for the way back, and for copies.
#include "kernels/cuda/transcode_list.cuh"

namespace kvq::cuda {

TranscodeKernel wide_kernel(const Rewritten& all) { return kernel_of<Target::wide, 128>(all); }

TranscodeKernel dense_kernel() { return rewrite_pages<RewriteToDense>; }

TranscodeKernel copy_kernel() { return rewrite_pages<RewriteNothing>; }

}  // namespace kvq::cuda

// The kernels for many query rows, head_dim 64.
#include "kernels/cuda/prefill_list.cuh"

namespace kvq::cuda {

PrefillKernel prefill_d64(const PrefillVariant& variant) { return prefill_of<64>(variant); }

}  // namespace kvq::cuda

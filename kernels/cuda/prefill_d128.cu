// The kernels for many query rows, head_dim 128.
#include "kernels/cuda/prefill_list.cuh"

namespace kvq::cuda {

PrefillKernel prefill_d128(const PrefillVariant& variant) { return prefill_of<128>(variant); }

}  // namespace kvq::cuda

// The front of attention, for the host.
#include "kernels/cuda/attend.cu"

namespace kvq::cuda {

// What only warpgroups compute is left to the other kernels.
PrefillKernel prefill_d64(const PrefillVariant&) { return nullptr; }
PrefillKernel prefill_d128(const PrefillVariant&) { return nullptr; }

}  // namespace kvq::cuda

// Which kind of memory a GPU gets.
#include "daemon/gpu/slab_memory.h"

#include <sys/random.h>

#include <cerrno>

namespace kvq::gpu {

Result<std::unique_ptr<SlabMemory>> choose_slab_memory(const CudaContext& context, std::optional<Exporter> exporter) {
  const Result<bool> exports = cuda::exports_descriptors(context.gpu().device);
  if (!exports) return exports.error();
  if (!exporter) exporter = *exports ? Exporter::vmm : Exporter::legacy;
  if (*exporter == Exporter::legacy) return make_legacy_slabs(context);
  if (*exports) return make_vmm_slabs(context);
  return Error{Errc::system, CUDA_ERROR_NOT_SUPPORTED,
               "this GPU's memory cannot be passed on as descriptors; set gpu_export to auto or legacy"};
}

Result<std::uint64_t> new_serial() {
  std::uint64_t serial = 0;
  while (serial == 0) {
    if (::getrandom(&serial, sizeof serial, 0) != sizeof serial) return Error{Errc::system, errno, "getrandom"};
  }
  return serial;
}

}  // namespace kvq::gpu

// In place of the CUDA side, in a build without nvcc.
//
// Invariant: a session whose pages are on a GPU is refused, by name and with the fix, before anything is mapped.
#include "client/device.h"
#include "client/last_error.h"

namespace kvq::client {
namespace {

class NoCudaSide final : public DeviceSide {
 public:
  explicit NoCudaSide(const std::string& uuid) : uuid_(uuid) {}
  kvq_status open() override {
    return fail(
        KVQ_ERR_SYSTEM,
        "kvqd keeps its pages on GPU %s, and this libkvq was built without CUDA; install a libkvq with CUDA, or "
        "start kvqd with device = \"host\"",
        uuid_.c_str());
  }
  kvq_status map(std::uint32_t, int, bool) override { return open(); }
  void unmap(std::uint32_t) override {}
  kvq_status map_mirror(int, std::uint64_t) override { return open(); }
  std::byte* arena() const override { return nullptr; }
  const DirectoryEntry* mirror() const override { return nullptr; }
  kvq_status make_model_side(Segment&, std::unique_ptr<ModelSide>&) override { return open(); }

 private:
  const std::string uuid_;
};

}  // namespace

std::unique_ptr<DeviceSide> make_cuda_side(std::uint64_t, std::uint64_t, const std::string& uuid) {
  return std::make_unique<NoCudaSide>(uuid);
}

kvq_status find_visible_gpus(VisibleGpus&) {
  return fail(KVQ_ERR_SYSTEM,
              "kvqd serves several GPUs, and this libkvq was built without CUDA; install a libkvq with CUDA, or name a "
              "GPU in kvq_model_desc.device for a session that only schedules");
}

}  // namespace kvq::client

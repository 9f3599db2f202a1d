// Invariant: a GPU is named by its UUID alone, since ordinals differ between processes; an error lists what the process
// sees, so that one look tells a hidden GPU from a missing one.
#include <algorithm>
#include <string>

#include "client/device.h"
#include "client/last_error.h"

namespace kvq::client {

namespace {

std::string listed(std::span<const std::string> uuids) {
  std::string out;
  for (const std::string& uuid : uuids) out += (out.empty() ? "" : ", ") + uuid;
  return out.empty() ? "none" : out;
}

std::string setting_text(const char* visible_devices) {
  if (visible_devices == nullptr) return "CUDA_VISIBLE_DEVICES is not set";
  return "CUDA_VISIBLE_DEVICES is \"" + std::string(visible_devices) + "\"";
}

}  // namespace

kvq_status choose_device(const std::string& wanted, std::span<const std::string> visible, const char* visible_devices,
                         std::size_t& index) {
  const auto found = std::find(visible.begin(), visible.end(), wanted);
  if (found != visible.end()) {
    index = static_cast<std::size_t>(found - visible.begin());
    return KVQ_OK;
  }
  return fail(KVQ_ERR_INVALID_ARGUMENT,
              "kvqd keeps its pages on GPU %s, which this process does not see (visible: %s; %s); make it visible, or "
              "use the kvqd of another GPU",
              wanted.c_str(), listed(visible).c_str(), setting_text(visible_devices).c_str());
}

kvq_status choose_served(std::span<const std::string> served, const VisibleGpus& visible, std::string& uuid) {
  const auto serves = [&](const std::string& gpu) {
    return std::find(served.begin(), served.end(), gpu) != served.end();
  };
  auto first = std::find_if(visible.uuids.begin(), visible.uuids.end(), serves);
  if (visible.current && serves(visible.uuids.at(*visible.current))) {
    first = visible.uuids.begin() + static_cast<std::ptrdiff_t>(*visible.current);
  }
  if (first != visible.uuids.end()) {
    uuid = *first;
    return KVQ_OK;
  }
  return fail(KVQ_ERR_INVALID_ARGUMENT,
              "kvqd serves GPUs %s, of which this process sees none (visible: %s; %s); make one visible, or name one "
              "in kvq_model_desc.device",
              listed(served).c_str(), listed(visible.uuids).c_str(), setting_text(visible.setting).c_str());
}

}  // namespace kvq::client

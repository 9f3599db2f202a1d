// Checks of a registration, each with a message that names the value.
#include "daemon/rpc/registration.h"

#include <algorithm>

#include "daemon/rpc/wire.h"
#include "kvq/segment.h"

namespace kvq {
namespace {

constexpr std::size_t kLabelBytes = 64;
constexpr std::uint16_t kMaxKvHeads = 1024;

std::optional<Refusal> wrong_layout(std::string message) { return Refusal{Errc::wrong_layout, std::move(message)}; }

std::optional<Refusal> invalid(std::string message) { return Refusal{Errc::invalid_argument, std::move(message)}; }

std::optional<Refusal> check_layers(capnp::List<wire::Layer>::Reader layers, ModelGeometry& geometry) {
  if (layers.size() == 0 || layers.size() > kMaxLayers) {
    return wrong_layout("a model has 1 to " + std::to_string(kMaxLayers) + " layers, not " +
                        std::to_string(layers.size()));
  }
  geometry.layers = layers.size();
  for (std::uint32_t i = 0; i < layers.size(); ++i) {
    const auto layer = layers[i];
    const std::string name = "layer " + std::to_string(i) + ": ";
    if (!head_dim_supported(layer.getHeadDim())) {
      return wrong_layout(name + "head_dim " + std::to_string(layer.getHeadDim()) +
                          " is not supported; use 64, 80, 96, 128, 192 or 256");
    }
    if (layer.getKvHeads() == 0 || layer.getKvHeads() > kMaxKvHeads) {
      return wrong_layout(name + "kv_heads is 1 to " + std::to_string(kMaxKvHeads) + ", not " +
                          std::to_string(layer.getKvHeads()));
    }
    if (layer.getDtype() > static_cast<std::uint8_t>(Dtype::bf16)) {
      return wrong_layout(name + "dtype " + std::to_string(layer.getDtype()) + " is neither fp16 (0) nor bf16 (1)");
    }
    geometry.layer[i] = {layer.getKvHeads(), layer.getHeadDim(), static_cast<Dtype>(layer.getDtype()),
                         static_cast<std::uint8_t>(layer.getKeepDense() ? 1 : 0)};
  }
  return std::nullopt;
}

std::optional<Refusal> check_device(wire::Registration::Reader registration, const std::vector<std::string>& devices) {
  const std::string wanted = registration.getDevice().cStr();
  const bool may_be_empty = devices.size() == 1 || registration.getResumeSession() != 0;  // a session has its device
  if (wanted.empty() ? may_be_empty : std::find(devices.begin(), devices.end(), wanted) != devices.end()) {
    return std::nullopt;
  }
  std::string served;
  for (const std::string& device : devices) served += (served.empty() ? "\"" : ", \"") + device + "\"";
  if (wanted.empty()) return invalid("this kvqd has several devices (" + served + "); name one of them as device");
  return invalid("device \"" + printable(wanted, kLabelBytes) + "\" is not served here; this kvqd has " + served);
}

}  // namespace

std::optional<Refusal> check_registration(wire::Registration::Reader registration,
                                          const std::vector<std::string>& devices, SessionRequest& request) {
  if (registration.getContractVersion() != kContractVersion) {
    return Refusal{Errc::version_mismatch, "this kvqd speaks contract version " + std::to_string(kContractVersion) +
                                               ", the client " + std::to_string(registration.getContractVersion()) +
                                               "; install libkvq and kvqd of one release"};
  }
  if (registration.getPageTokens() != kPageTokens) {
    return wrong_layout("a page holds " + std::to_string(kPageTokens) + " tokens, not " +
                        std::to_string(registration.getPageTokens()));
  }
  if (auto refusal = check_device(registration, devices)) return refusal;
  if (auto refusal = check_layers(registration.getLayers(), request.geometry)) return refusal;
  const auto fingerprint = registration.getFingerprint();
  if (fingerprint.size() != request.fingerprint.size()) {
    return invalid("a fingerprint has 32 bytes, not " + std::to_string(fingerprint.size()));
  }
  std::copy(fingerprint.begin(), fingerprint.end(), request.fingerprint.begin());
  if (registration.getCredits() > kMagazineSlots) {
    return invalid("a session has at most " + std::to_string(kMagazineSlots) + " credits, not " +
                   std::to_string(registration.getCredits()));
  }
  if (registration.getRole() > wire::Role::DATA) return invalid("the role is not known");
  request.maps_slabs = registration.getRole() != wire::Role::CONTROL;
  if (request.maps_slabs && !registration.hasSlabs()) {
    return invalid("a session that computes must bring a SlabSink; only the control role maps no slab");
  }
  const auto label = registration.getLabel();
  request.label = printable({label.cStr(), label.size()}, kLabelBytes);
  request.floor_dense = registration.getFormatFloorDense();
  request.credits = registration.getCredits();
  return std::nullopt;
}

}  // namespace kvq

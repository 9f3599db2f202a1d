// Names looked up, documents put together.
#include "daemon/rpc/reply.h"

#include "daemon/rpc/setting.h"
#include "daemon/rpc/wire.h"

namespace kvq {

using Json = nlohmann::ordered_json;

bool find_where(const Devices& devices, const std::string& tenant, const std::string& device, Where& where,
                wire::Status::Builder status) {
  set_ok(status);
  if (!device.empty() && devices.find(device) == nullptr) {
    set_status(status, Errc::invalid_argument,
               "no device is called \"" + printable(device, 80) + "\"; kvqctl status names them");
    return false;
  }
  bool known = tenant.empty();
  for (const auto& served : devices) {
    const auto id = served->sessions.store().find_tenant(tenant);
    if (!tenant.empty() && !id) continue;
    known = true;
    if (device.empty() || served->name() == device)
      where.emplace_back(served.get(), tenant.empty() ? std::nullopt : id);
  }
  if (known) return true;
  std::vector<const Store*> stores;
  for (const auto& served : devices) stores.push_back(&served->sessions.store());
  set_status(status, Errc::invalid_argument, unknown_tenant(stores, tenant));
  return false;
}

kj::String json_text(const Json& json) {
  return kj::heapString(json.dump(-1, ' ', false, Json::error_handler_t::replace).c_str());
}

void append(Json& list, const Json& more, const ServedDevice& device) {
  for (const Json& entry : more) {
    list.push_back(entry);
    list.back()["device"] = device.name();
  }
}

}  // namespace kvq

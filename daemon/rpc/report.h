// The JSON documents of kvqctl (docs/kvqctl.md lists the fields).
//
// Invariant: pure functions from the store's snapshots; every size is in bytes, every time in milliseconds, every
// series is present from the first document on, and the parts of a tenant sum to its slab_bytes.
#pragma once

#include <nlohmann/json.hpp>

#include "daemon/store.h"

namespace kvq {

const char* format_name(Format format);       // "int4"

nlohmann::ordered_json report_status(const StoreStatus& status);
nlohmann::ordered_json report_tenants(const StoreStatus& status);
// A session is `hung` when a step of it has been open for longer than `step_deadline_ms`.
nlohmann::ordered_json report_sessions(const std::vector<SessionStatus>& sessions, const StoreStatus& status,
                                       std::uint64_t step_deadline_ms);
nlohmann::ordered_json report_pages(const std::vector<PageStatus>& pages, const StoreStatus& status);
nlohmann::ordered_json report_quantize(const QuantizeReport& report, bool dry_run);
nlohmann::ordered_json report_verify(const VerifyStatus& verify, const std::string& tenant);
nlohmann::ordered_json report_watermarks(const Watermarks& watermarks);

}  // namespace kvq

// A document's values as cells of a table.
//
// Invariant: pure text from JSON.
#pragma once

#include <nlohmann/json.hpp>
#include <string>
#include <vector>

#include "tools/kvqctl/text.h"

namespace kvqctl {

using Json = nlohmann::ordered_json;

inline std::string number(const Json& value) { return value.dump(); }
inline std::string bytes_of(const Json& bytes) { return bytes_text(bytes.get<double>()); }
std::string part_of(const Json& part, const Json& whole);  // "43 %", or "-" of nothing
// What `formats` sums to: of dense pages, and of all others; `what` is "pages" or "bytes".
struct DenseAndCold {
  std::uint64_t dense = 0, cold = 0;
};
DenseAndCold dense_and_cold(const Json& formats, const char* what);
// Puts column DEVICE behind column `at` where the rows are of more than one device. Row 0 has the heads.
void add_devices(std::vector<Row>& rows, const Json& entries, std::size_t at, std::vector<std::size_t>& left);

}  // namespace kvqctl

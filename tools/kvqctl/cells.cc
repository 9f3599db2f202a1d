// Cells, and the column that tells devices apart.
#include "tools/kvqctl/cells.h"

#include <algorithm>

namespace kvqctl {

std::string part_of(const Json& part, const Json& whole) {
  const double all = whole.get<double>();
  return all > 0 ? percent(part.get<double>() / all) : "-";
}

DenseAndCold dense_and_cold(const Json& formats, const char* what) {
  DenseAndCold out;
  for (const auto& [name, use] : formats.items()) {
    (name == "dense" ? out.dense : out.cold) += use.at(what).get<std::uint64_t>();
  }
  return out;
}

void add_devices(std::vector<Row>& rows, const Json& entries, std::size_t at, std::vector<std::size_t>& left) {
  const auto device = [](const Json& entry) { return entry.value("device", ""); };
  const auto is_other = [&](const Json& entry) { return device(entry) != device(entries.front()); };
  if (entries.empty() || std::none_of(entries.begin(), entries.end(), is_other)) return;
  for (std::size_t i = 0; i < rows.size(); ++i) {
    rows[i].insert(rows[i].begin() + static_cast<std::ptrdiff_t>(at), i == 0 ? "DEVICE" : device(entries[i - 1]));
  }
  for (std::size_t& column : left) column += column >= at ? 1 : 0;
  left.push_back(at);
}

}  // namespace kvqctl

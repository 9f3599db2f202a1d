// The list below the bars: tenants or sessions, sorted and filtered.
//
// Invariant: a row that the filter leaves out is in no line; equal rows keep kvqd's order, so that nothing jumps.
#pragma once

#include "tools/kvqctl/top_frame.h"
#include "tools/kvqctl/top_sample.h"

namespace kvqctl {

enum class View { tenants, sessions };

struct Columns {
  std::vector<std::string> names;
  std::vector<bool> left;  // aligned
};
Columns columns_of(View view);

struct TableWish {
  View view = View::tenants;
  std::size_t sort_by = 0;  // a column
  bool reverse = false;
  std::string filter;  // a part of any of a row's words, whatever its case; empty: all
  std::string device;  // empty: all
  std::size_t first = 0;
};

struct Table {
  std::size_t rows = 0;  // that there are, shown or not
  Frame lines;           // heads, then at most `height` - 1 rows from `wish.first`
};
// `hit_rates`: pages a second, by device and tenant.
Table table_of(const Sample& sample, const std::map<std::string, double>& hit_rates, const TableWish& wish,
               std::size_t height);
std::string tenant_key(const std::string& device, const std::string& tenant);

}  // namespace kvqctl

// Rows of cells, each with what it is sorted by.
#include "tools/kvqctl/top_table.h"

#include <algorithm>
#include <cctype>

#include "tools/kvqctl/text.h"

namespace kvqctl {
namespace {

struct Cell {
  std::string text;
  double number = 0;  // most first; texts, which have 0, by the alphabet
};
struct Entry {
  std::vector<Cell> cells;
  std::string device;
  Style style = Style::plain;
};

Cell count(double value) { return {format_double("%.0f", value), value}; }
Cell bytes(double value) { return {bytes_text(value), value}; }

std::vector<Entry> tenant_entries(const Sample& sample, const std::map<std::string, double>& hit_rates) {
  std::vector<Entry> out;
  for (const TenantSample& t : sample.tenants) {
    const auto rate = hit_rates.find(tenant_key(t.device, t.name));
    const double hits = rate == hit_rates.end() ? 0 : rate->second;
    const double used = t.quota == 0 ? 0 : t.holds / t.quota;
    Entry entry{{{t.name},
                 {t.level},
                 bytes(t.holds),
                 {t.quota == 0 ? "-" : percent(used), used},
                 bytes(t.dense),
                 bytes(t.quantized),
                 bytes(t.limbo),
                 count(t.cached_pages),
                 {rate_text(hits), hits},
                 count(t.sessions)},
                t.device};
    entry.style = t.level == "refuse" ? Style::alarm : t.level == "calm" ? Style::plain : Style::warn;
    out.push_back(std::move(entry));
  }
  return out;
}

std::vector<Entry> session_entries(const Sample& sample) {
  std::vector<Entry> out;
  for (const SessionSample& s : sample.sessions) {
    Entry entry{{{std::string(s.hung ? "!" : "") + format_double("%.0f", s.id), -s.id},
                 {s.tenant},
                 count(s.pid),
                 {s.state},
                 {s.open_steps == 0 ? "-" : duration(static_cast<std::uint64_t>(s.oldest_step_ms)), s.oldest_step_ms},
                 bytes(s.limbo),
                 count(s.pages),
                 {format_double("%.0f/", s.running) + format_double("%.0f", s.sequences), s.running},
                 count(s.lost_pages),
                 {s.label}},
                s.device};
    entry.style = s.hung || s.lost_pages > 0 ? Style::alarm : s.state == "connected" ? Style::plain : Style::warn;
    out.push_back(std::move(entry));
  }
  return out;
}

std::string lower(std::string text) {
  for (char& c : text) c = static_cast<char>(std::tolower(static_cast<unsigned char>(c)));
  return text;
}

bool wanted(const Entry& entry, const TableWish& wish) {
  if (!wish.device.empty() && entry.device != wish.device) return false;
  const std::string part = lower(wish.filter);
  const auto has = [&](const std::string& text) { return lower(text).find(part) != std::string::npos; };
  return has(entry.device) ||
         std::any_of(entry.cells.begin(), entry.cells.end(), [&](const Cell& c) { return has(c.text); });
}

Line line_of(const std::vector<std::string>& cells, const std::vector<bool>& left,
             const std::vector<std::size_t>& width, Style style) {
  Line line;
  for (std::size_t i = 0; i < cells.size(); ++i) {
    const std::string pad(width[i] - cells[i].size(), ' ');
    line.push_back({(i == 0 ? "" : " ") + (left[i] ? cells[i] + pad : pad + cells[i]), style});
  }
  return line;
}

}  // namespace

std::string tenant_key(const std::string& device, const std::string& tenant) { return device + " " + tenant; }

Columns columns_of(View view) {
  if (view == View::tenants) {
    return {{"TENANT", "LEVEL", "HOLDS", "USED", "DENSE", "QUANTIZED", "LIMBO", "CACHED", "HITS/s", "SESS"},
            {true, true, false, false, false, false, false, false, false, false}};
  }
  return {{"SESSION", "TENANT", "PID", "STATE", "STEP", "HELD BACK", "PAGES", "RUNNING", "LOST", "LABEL"},
          {false, true, false, true, false, false, false, false, false, true}};
}

Table table_of(const Sample& sample, const std::map<std::string, double>& hit_rates, const TableWish& wish,
               std::size_t height) {
  std::vector<Entry> entries = wish.view == View::tenants ? tenant_entries(sample, hit_rates) : session_entries(sample);
  entries.erase(std::remove_if(entries.begin(), entries.end(), [&](const Entry& e) { return !wanted(e, wish); }),
                entries.end());
  std::stable_sort(entries.begin(), entries.end(), [&](const Entry& a, const Entry& b) {
    const Cell& first = wish.reverse ? b.cells[wish.sort_by] : a.cells[wish.sort_by];
    const Cell& second = wish.reverse ? a.cells[wish.sort_by] : b.cells[wish.sort_by];
    return first.number != second.number ? first.number > second.number : first.text < second.text;
  });
  Columns columns = columns_of(wish.view);
  columns.names[wish.sort_by] += wish.reverse ? "^" : "*";
  const bool devices = wish.device.empty() && sample.devices.size() > 1;
  if (devices) {
    columns.names.emplace_back("DEVICE");
    columns.left.push_back(true);
  }
  std::vector<std::vector<std::string>> rows = {columns.names};
  for (const Entry& entry : entries) {
    rows.emplace_back();
    for (const Cell& cell : entry.cells) rows.back().push_back(cell.text);
    if (devices) rows.back().push_back(entry.device);
  }
  std::vector<std::size_t> width(columns.names.size());
  for (const auto& row : rows) {
    for (std::size_t i = 0; i < row.size(); ++i) width[i] = std::max(width[i], row[i].size());
  }
  Table out;
  out.rows = entries.size();
  if (height == 0) return out;
  out.lines.push_back(line_of(rows[0], columns.left, width, Style::title));
  for (std::size_t i = wish.first; i < entries.size() && out.lines.size() < height; ++i) {
    out.lines.push_back(line_of(rows[i + 1], columns.left, width, entries[i].style));
  }
  return out;
}

}  // namespace kvqctl

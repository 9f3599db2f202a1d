// Frames: title, news, a bar and marks for each device, bars over time, rates, the list, keys.
#include <algorithm>
#include <cmath>

#include "tools/kvqctl/text.h"
#include "tools/kvqctl/top_model.h"

namespace kvqctl {
namespace {

constexpr std::size_t kLeastWidth = 40, kLeastHeight = 10;
constexpr std::size_t kMostChartRows = 12, kMostBars = 8;
constexpr std::size_t kGutter = 6;  // left of the bars over time

struct Part {
  double Use::*bytes;
  char letter;
  Style style;
  const char* name;
};
constexpr Part kParts[] = {{&Use::dense, '#', Style::dense, "dense"},
                           {&Use::quantized, '+', Style::quantized, "quantized"},
                           {&Use::limbo, '~', Style::limbo, "limbo"},
                           {&Use::slack, '.', Style::slack, "slack"}};

// What lies at `share` of the arena, counted from the beginning.
Span at(const Use& use, double share) {
  double end = 0;
  for (const Part& part : kParts) {
    end += use.*part.bytes;
    if (share * use.arena() < end) return {std::string(1, part.letter), part.style};
  }
  return {" ", Style::plain};
}

void put(Line& line, const Span& span) {
  if (!line.empty() && line.back().style == span.style) {
    line.back().text += span.text;
  } else {
    line.push_back(span);
  }
}

Style style_of_level(const std::string& level) {
  return level == "calm" ? Style::good : level == "refuse" ? Style::alarm : Style::warn;
}

std::string upper(std::string text) {
  for (char& c : text) c = static_cast<char>(c >= 'a' && c <= 'z' ? c - 'a' + 'A' : c);
  return text;
}

std::string several(std::size_t n, const char* what) { return std::to_string(n) + " " + what + (n == 1 ? "" : "s"); }

// The marks stand in the bar where they lie: q(uantize), e(vict), r(efuse).
Line bar(const DeviceSample& d, std::size_t width) {
  Line line = {{"["}};
  const auto column = [&](double share) {
    return static_cast<std::size_t>(std::floor(share * static_cast<double>(width)));
  };
  for (std::size_t i = 0; i < width; ++i) {
    Span span = at(d.use, (static_cast<double>(i) + 0.5) / static_cast<double>(width));
    if (i == column(d.quantize_at)) span = {"q", Style::bold};
    if (i == column(d.evict_at)) span = {"e", Style::bold};
    if (i == column(d.refuse_at)) span = {"r", Style::bold};
    put(line, span);
  }
  line.push_back({"]"});
  return line;
}

}  // namespace

Line TopModel::title() const {
  Line line = {{"kvqctl top", Style::bold}};
  if (now_) {
    line.push_back({"  kvqd " + now_->version + ", pid " + std::to_string(now_->pid) + ", up " +
                    duration(now_->uptime_ms) + "; " + several(now_->tenants.size(), "tenant") + ", " +
                    several(now_->sessions.size(), "session")});
  }
  line.push_back({"  every " + duration(interval_ms_)});
  return line;
}

// The one line that tells what is not as usual.
Line TopModel::news(std::uint64_t now_ms) const {
  if (lost_) {
    const std::uint64_t waited = now_ms - std::min(now_ms, lost_since_ms_);
    return {{"waiting for kvqd, " + duration(waited) + ": " + why_lost_, Style::alarm}};
  }
  if (paused_) return {{"paused; p goes on", Style::warn}};
  if (!now_) return {{"asking kvqd at " + socket_}};
  for (const DeviceSample& d : now_->devices) {
    if (!d.unwell.empty()) return {{"DEGRADED " + d.name + ": " + d.unwell, Style::alarm}};
  }
  for (const DeviceSample& d : now_->devices) {
    if (d.draining) return {{"draining: nothing new is admitted", Style::warn}};
  }
  for (const SessionSample& s : now_->sessions) {
    if (s.hung) {
      return {{format_double("session %.0f hangs", s.id) + format_double(" (pid %.0f): ", s.pid) +
                   format_double("kvqctl evict-session %.0f ends it", s.id),
               Style::alarm}};
    }
  }
  if (restarted_) return {{"kvqd was restarted " + duration(now_->uptime_ms) + " ago", Style::dim}};
  return {};
}

Frame TopModel::bars(std::size_t width, std::size_t most) const {
  Frame out;
  std::size_t name_width = 0;
  for (const DeviceSample& d : now_->devices)
    name_width = std::max(name_width, std::min<std::size_t>(d.name.size(), 12));
  for (const DeviceSample& d : now_->devices) {
    if (!wish_.device.empty() && d.name != wish_.device) continue;
    if (out.size() == most) break;
    const double used = d.use.arena() - d.use.unused;
    Line line = {
        {kvqctl::fit(d.name, name_width) + " ", Style::bold},
        {kvqctl::fit(upper(d.level), 9), style_of_level(d.level)},
        {kvqctl::fit(percent(d.use.arena() > 0 ? used / d.use.arena() : 0) + " of " + bytes_text(d.use.arena()), 19)}};
    const std::size_t left = width - std::min(width, width_of(line) + 2);
    for (Span& span : bar(d, left)) line.push_back(std::move(span));
    out.push_back(std::move(line));
  }
  return out;
}

Line TopModel::legend() const {
  Use use;
  std::map<std::string, double> formats;
  for (const DeviceSample& d : now_->devices) {
    if (!wish_.device.empty() && d.name != wish_.device) continue;
    use += d.use;
    for (const auto& [format, bytes] : d.formats) formats[format] += bytes;
  }
  std::string cold;  // each quantized format that there is
  for (const auto& [format, bytes] : formats) {
    if (format != "dense" && bytes > 0) cold += (cold.empty() ? "" : ", ") + format + " " + bytes_text(bytes);
  }
  Line line;
  for (const Part& part : kParts) {
    line.push_back({std::string(1, part.letter), part.style});
    const bool named = part.bytes == &Use::quantized && !cold.empty();
    line.push_back({" " + (named ? cold : part.name + (" " + bytes_text(use.*part.bytes))) + "  "});
  }
  line.push_back({"unused " + bytes_text(use.unused)});
  return line;
}

// A column is a look, the newest at the right; the height is the arena.
Frame TopModel::chart(std::size_t width, std::size_t height) const {
  Frame out;
  const std::size_t columns = width - std::min(width, kGutter + 1);
  const std::size_t looks = std::min(columns, past_.size());
  for (std::size_t row = 0; row < height; ++row) {
    const std::string mark = row == 0 ? "100 %" : row + 1 == height ? "0 %" : "";
    Line line = {{std::string(kGutter - 1 - mark.size(), ' ') + mark + "|", Style::dim}};
    line.push_back({std::string(columns - looks, ' ')});
    for (std::size_t i = past_.size() - looks; i < past_.size(); ++i) {
      Use use;
      for (const auto& [name, of] : past_[i].devices) use += wish_.device.empty() || name == wish_.device ? of : Use{};
      const double share = (static_cast<double>(height - row) - 0.5) / static_cast<double>(height);
      put(line, at(use, share));
    }
    out.push_back(std::move(line));
  }
  return out;
}

Frame TopModel::figures() const {
  const Rates rates = rates_of_device();
  const auto rate = [&](double value) { return rates.seconds == 0 ? std::string("-") : rate_text(value) + "/s"; };
  double in_flight = 0;
  for (const DeviceSample& d : now_->devices)
    in_flight += wish_.device.empty() || d.name == wish_.device ? d.in_flight : 0;
  const Counters& c = rates.counters;
  Frame out;
  out.push_back(
      {{"quantized " + rate(c.transcodes) + (rates.seconds > 0 ? " (" + bytes_text(c.transcode_bytes) + "/s)" : "") +
        ", failed " + rate(c.failed) + format_double(", in flight %.0f", in_flight) + "   dropped " +
        rate(c.dropped_pages)}});
  const double all = c.hit_pages + c.computed_pages;
  out.push_back({{"hits " + rate(c.hit_pages) + " pages in " + rate(c.lookups) + " attaches" +
                  (all > 0 ? format_double(", hit rate %.0f %%", 100 * c.hit_pages / all) : "") + "   refused " +
                  rate(c.refusals) + format_double("   waiting %.0f", now_->waiting)}});
  const SessionSample* oldest = nullptr;
  for (const SessionSample& s : now_->sessions) {
    if (!wish_.device.empty() && s.device != wish_.device) continue;
    if (s.open_steps > 0 && (oldest == nullptr || s.oldest_step_ms > oldest->oldest_step_ms)) oldest = &s;
  }
  if (oldest == nullptr) {
    out.push_back({{"no step is open"}});
  } else {
    out.push_back({{"oldest open step " + duration(static_cast<std::uint64_t>(oldest->oldest_step_ms)) +
                        format_double(": session %.0f", oldest->id) + format_double(", pid %.0f", oldest->pid) + ", " +
                        oldest->label + ", holds back " + bytes_text(oldest->limbo),
                    oldest->hung ? Style::alarm : Style::plain}});
  }
  return out;
}

Line TopModel::foot() const {
  if (filtering_)
    return {{"filter: " + wish_.filter + "_", Style::bold}, {"  Enter keeps it, Esc clears it", Style::dim}};
  Line line = {{"q quit  p pause  Tab tenants/sessions  s sort  r reverse  / filter  ? help", Style::dim}};
  if (!wish_.filter.empty()) line.insert(line.begin(), {"[" + wish_.filter + "]  ", Style::bold});
  if (!wish_.device.empty()) line.insert(line.begin(), {wish_.device + "  ", Style::bold});
  return line;
}

Frame TopModel::help() const {
  Frame out;
  for (const char* text :
       {"", "  q            quit", "  p, space     pause, go on", "  Tab          the list: tenants, sessions",
        "  s, S         sort by the next column, the one before", "  r            turn the order around",
        "  /            filter the list by a part of any word; Esc clears it", "  arrows, PgUp, PgDn   scroll the list",
        "  d            devices: all, one after the other", "  +, -         look less often, more often", "",
        "  Marks in a bar: q quantize_at, e evict_at, r refuse_at. USED is of the quota.",
        "  HELD BACK: memory that a session's oldest step keeps from being used again.", "", "  any key goes back"}) {
    out.push_back({{text}});
  }
  return out;
}

Frame TopModel::frame(std::size_t width, std::size_t height, std::uint64_t now_ms) const {
  if (width < kLeastWidth || height < kLeastHeight)
    return kvqctl::fit({{{"too small: 40x10 is the least"}}}, width, height);
  Frame out = {title(), news(now_ms)};
  const auto add = [&out](Frame more) { std::move(more.begin(), more.end(), std::back_inserter(out)); };
  if (helping_) {
    add(help());
  } else if (now_) {
    add(bars(width, std::min(kMostBars, height / 4)));
    out.push_back(legend());
    if (height >= 16) add(chart(width, std::min(kMostChartRows, height / 4)));
    add(figures());
    out.emplace_back();
    const std::size_t left = height - std::min(height, out.size() + 1);
    add(table_of(*now_, rates_of_device().hits, wish_, left).lines);
  }
  out = kvqctl::fit(std::move(out), width, height - 1);
  out.push_back(foot());
  return kvqctl::fit(std::move(out), width, height);
}

}  // namespace kvqctl

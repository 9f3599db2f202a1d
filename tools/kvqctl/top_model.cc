// What happens to top's state: looks at kvqd, and keys.
#include "tools/kvqctl/top_model.h"

#include <algorithm>
#include <cctype>

namespace kvqctl {
namespace {

constexpr std::size_t kPastLooks = 600;
constexpr std::uint64_t kRatesMs = 5000;  // what kvqd does in bursts is a rate over these
constexpr std::size_t kFilterBytes = 40;
constexpr std::uint64_t kShortestMs = 250, kLongestMs = 60'000;
constexpr std::ptrdiff_t kPage = 10;

bool same_daemon(const Sample& a, const Sample& b) { return a.pid == b.pid && a.uptime_ms <= b.uptime_ms; }

}  // namespace

void TopModel::add(const Sample& sample) {
  lost_ = false;
  if (paused_) return;
  if (now_ && !same_daemon(*now_, sample)) {
    restarted_ = true;
    recent_.clear();
  }
  now_ = sample;
  recent_.push_back(sample);
  while (recent_.size() > 2 && recent_[1].at_ms + kRatesMs <= sample.at_ms) recent_.pop_front();
  past_.emplace_back();
  for (const DeviceSample& d : sample.devices) past_.back().devices.emplace_back(d.name, d.use);
  if (past_.size() > kPastLooks) past_.pop_front();
  scroll(0);
}

void TopModel::lost(const std::string& why, std::uint64_t now_ms) {
  if (!lost_) lost_since_ms_ = now_ms;
  lost_ = true;
  why_lost_ = why;
}

bool TopModel::press(int key) {
  if (filtering_) return edit_filter(key);
  if (helping_) {
    helping_ = false;
    return key != 'q';
  }
  const std::size_t columns = columns_of(wish_.view).names.size();
  std::size_t& sort_by = sort_by_[static_cast<std::size_t>(wish_.view)];
  switch (key) {
    case 'q':
      return false;
    case 'p':
    case ' ':
      paused_ = !paused_;
      break;
    case 's':
      sort_by = (sort_by + 1) % columns;
      break;
    case 'S':
      sort_by = (sort_by + columns - 1) % columns;
      break;
    case 'r':
      wish_.reverse = !wish_.reverse;
      break;
    case '/':
      filtering_ = true;
      break;
    case kEscape:
      wish_.filter.clear();
      break;
    case kTab:
      wish_.view = wish_.view == View::tenants ? View::sessions : View::tenants;
      wish_.first = 0;
      break;
    case 'd':
      pick_device();
      break;
    case '+':
      interval_ms_ = std::min(interval_ms_ * 2, kLongestMs);
      break;
    case '-':
      interval_ms_ = std::max(interval_ms_ / 2, kShortestMs);
      break;
    case 'h':
    case '?':
      helping_ = true;
      break;
    case kUp:
      scroll(-1);
      break;
    case kDown:
      scroll(1);
      break;
    case kPageUp:
      scroll(-kPage);
      break;
    case kPageDown:
      scroll(kPage);
      break;
  }
  wish_.sort_by = sort_by_[static_cast<std::size_t>(wish_.view)];
  return true;
}

bool TopModel::edit_filter(int key) {
  std::string& text = wish_.filter;
  if (key == kEnter || key == kEscape) filtering_ = false;
  if (key == kEscape) text.clear();
  if (key == kBackspace && !text.empty()) text.pop_back();
  if (key >= ' ' && key <= '~' && text.size() < kFilterBytes) text.push_back(static_cast<char>(key));
  wish_.first = 0;
  return true;
}

// All, the first, ... the last, all.
void TopModel::pick_device() {
  if (!now_ || now_->devices.size() < 2) return;
  const auto& all = now_->devices;
  const auto at = std::find_if(all.begin(), all.end(), [&](const DeviceSample& d) { return d.name == wish_.device; });
  const auto next = wish_.device.empty() ? all.begin() : at == all.end() ? all.end() : at + 1;
  wish_.device = next == all.end() ? "" : next->name;
  wish_.first = 0;
}

std::size_t TopModel::rows_wanted() const { return now_ ? table_of(*now_, {}, wish_, 0).rows : 0; }

void TopModel::scroll(std::ptrdiff_t rows) {
  const auto last = std::max<std::ptrdiff_t>(0, static_cast<std::ptrdiff_t>(rows_wanted()) - 1);
  const auto first = static_cast<std::ptrdiff_t>(wish_.first) + rows;
  wish_.first = static_cast<std::size_t>(std::clamp<std::ptrdiff_t>(first, 0, last));
}

Rates TopModel::rates_of_device() const {
  Rates out;
  if (recent_.size() < 2 || recent_.back().at_ms <= recent_.front().at_ms) return out;
  const Sample& before = recent_.front();
  out.seconds = static_cast<double>(now_->at_ms - before.at_ms) / 1000;
  Counters a, b;
  for (const DeviceSample& d : before.devices)
    a += wish_.device.empty() || d.name == wish_.device ? d.counters : Counters{};
  for (const DeviceSample& d : now_->devices)
    b += wish_.device.empty() || d.name == wish_.device ? d.counters : Counters{};
  for (const auto of : kCounters) out.counters.*of = std::max(0.0, b.*of - a.*of) / out.seconds;
  std::map<std::string, double> earlier;
  for (const TenantSample& t : before.tenants) earlier[tenant_key(t.device, t.name)] = t.hit_pages;
  for (const TenantSample& t : now_->tenants) {
    const std::string key = tenant_key(t.device, t.name);
    out.hits[key] = std::max(0.0, t.hit_pages - earlier[key]) / out.seconds;
  }
  return out;
}

}  // namespace kvqctl

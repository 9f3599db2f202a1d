// spdlog behind the bound.
#include "daemon/log.h"

#include <spdlog/sinks/stdout_sinks.h>
#include <spdlog/spdlog.h>

#include <cstdlib>
#include <map>

namespace kvq {
namespace {

constexpr std::uint32_t kLinesPerSecond = 10;  // of one kind
constexpr std::size_t kMaxKinds = 256;

struct Kind {
  std::uint64_t since_ms = 0;
  std::uint32_t lines = 0;
  std::uint64_t left_out = 0;
};

}  // namespace

void start_log(const std::string& level) {
  const bool journal = std::getenv("JOURNAL_STREAM") != nullptr;
  auto logger = std::make_shared<spdlog::logger>("kvqd", std::make_shared<spdlog::sinks::stderr_sink_st>());
  logger->set_pattern(journal ? "level=%l %v" : "%Y-%m-%dT%H:%M:%S.%e%z level=%l %v");
  logger->set_level(spdlog::level::from_str(level));
  logger->flush_on(spdlog::level::info);
  spdlog::set_default_logger(std::move(logger));
}

std::string log_event(const std::string& line, std::uint64_t now_ms) {
  static std::map<std::string, Kind> kinds;
  const std::string name = line.substr(0, line.find(' '));
  if (kinds.size() >= kMaxKinds && kinds.count(name) == 0) kinds.clear();
  Kind& kind = kinds[name];
  if (now_ms - kind.since_ms >= 1000) {
    kind.since_ms = now_ms;
    kind.lines = 0;
  }
  if (++kind.lines > kLinesPerSecond) {
    ++kind.left_out;
    return {};
  }
  const std::string told = line + (kind.left_out == 0 ? "" : " left_out=" + std::to_string(kind.left_out));
  kind.left_out = 0;
  spdlog::info("{}", told);
  return told;
}

void log_warning(const std::string& line) { spdlog::warn("{}", line); }
void log_error(const std::string& line) { spdlog::error("{}", line); }

}  // namespace kvq

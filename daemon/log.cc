// spdlog behind the bound.
#include "daemon/log.h"

#include <spdlog/details/null_mutex.h>
#include <spdlog/sinks/base_sink.h>
#include <spdlog/sinks/stdout_sinks.h>
#include <spdlog/spdlog.h>
#include <sys/stat.h>
#include <sys/uio.h>
#include <syslog.h>
#include <systemd/sd-journal.h>
#include <unistd.h>

#include <cctype>
#include <cstdio>
#include <cstdlib>
#include <map>
#include <vector>

#include "daemon/event_line.h"

namespace kvq {
namespace {

constexpr std::uint32_t kLinesPerSecond = 10;  // of one kind
constexpr std::size_t kMaxKinds = 256;
constexpr char kJournalSocket[] = "/run/systemd/journal/socket";  // libsystemd's

struct Kind {
  std::uint64_t since_ms = 0;
  std::uint32_t lines = 0;
  std::uint64_t left_out = 0;
};

// As systemd.exec(5) says: the variable alone may be inherited from somebody whose stderr it is.
bool stderr_is_journal() {
  const char* stream = std::getenv("JOURNAL_STREAM");
  struct stat file {};
  if (stream == nullptr || ::fstat(STDERR_FILENO, &file) != 0) return false;
  if (stream != std::to_string(file.st_dev) + ":" + std::to_string(file.st_ino)) return false;
  return ::access(kJournalSocket, W_OK) == 0;  // sd_journal_sendv says nothing where it is not there, as in a container
}

int priority_of(spdlog::level::level_enum level) {
  switch (level) {
    case spdlog::level::critical:
      return LOG_CRIT;
    case spdlog::level::err:
      return LOG_ERR;
    case spdlog::level::warn:
      return LOG_WARNING;
    case spdlog::level::info:
      return LOG_INFO;
    default:
      return LOG_DEBUG;
  }
}

// A field's name as the journal takes it: A-Z 0-9 _, at most 64.
std::string field_name(const std::string& key) {
  std::string name = "KVQ_";
  for (const char c : key.substr(0, 60)) {
    name += std::isalnum(static_cast<unsigned char>(c)) ? static_cast<char>(std::toupper(c)) : '_';
  }
  return name;
}

class JournalSink final : public spdlog::sinks::base_sink<spdlog::details::null_mutex> {
  void sink_it_(const spdlog::details::log_msg& message) override {
    const std::string line(message.payload.data(), message.payload.size());
    std::vector<std::string> fields = {"MESSAGE=" + line, "PRIORITY=" + std::to_string(priority_of(message.level)),
                                       "SYSLOG_IDENTIFIER=kvqd"};
    for (const auto& [key, value] : event_fields(line)) fields.push_back(field_name(key) + "=" + value);
    std::vector<iovec> parts;
    for (std::string& field : fields) parts.push_back({field.data(), field.size()});
    if (sd_journal_sendv(parts.data(), static_cast<int>(parts.size())) < 0) {
      std::fprintf(stderr, "<%d>%s\n", priority_of(message.level), line.c_str());  // the stream's own way
    }
  }
  void flush_() override {}
};

}  // namespace

void start_log(const std::string& level) {
  spdlog::sink_ptr sink = std::make_shared<spdlog::sinks::stderr_sink_st>();
  if (stderr_is_journal()) sink = std::make_shared<JournalSink>();
  auto logger = std::make_shared<spdlog::logger>("kvqd", std::move(sink));
  logger->set_pattern("%Y-%m-%dT%H:%M:%S.%e%z level=%l %v");
  logger->set_level(spdlog::level::from_str(level));
  logger->flush_on(spdlog::level::info);
  spdlog::set_default_logger(std::move(logger));
}

bool set_log_level(const std::string& level) {
  const auto wanted = spdlog::level::from_str(level);
  if (spdlog::default_logger()->level() == wanted) return false;
  spdlog::set_level(wanted);
  return true;
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

// sd_listen_fds_with_names: systemd's sockets and its descriptor store arrive in one row.
#include "daemon/intake.h"

#include <sys/stat.h>
#include <systemd/sd-daemon.h>

#include <cstdlib>
#include <cstring>

namespace kvq {
namespace {

constexpr std::string_view kOurs = "kvq-";

bool is_socket(int fd) {
  struct stat status {};
  return ::fstat(fd, &status) == 0 && S_ISSOCK(status.st_mode);
}

}  // namespace

Intake take_descriptors() {
  Intake out;
  char** names = nullptr;
  const int count = ::sd_listen_fds_with_names(/*unset_environment=*/1, &names);
  if (count < 0) {
    throw StartupError(ExitCode::usage, std::string("LISTEN_FDS or LISTEN_FDNAMES: ") + std::strerror(-count) +
                                            ": let only the service manager or kvq-hold set them");
  }
  int sockets = 0;
  for (int i = 0; i < count; ++i) {
    Descriptor fd(SD_LISTEN_FDS_START + i);
    const std::string name = names != nullptr ? names[i] : "";
    if (names != nullptr) std::free(names[i]);
    if (is_socket(fd.get())) {
      ++sockets;
      out.socket = std::move(fd);
    } else if (name.starts_with(kOurs)) {
      // Holders hand back the newest first.
      if (!out.kept.try_emplace(name, std::move(fd)).second) {
        out.warnings.push_back("descriptor " + name + " was kept twice: the newer one counts");
      }
    } else {
      out.warnings.push_back("descriptor " + name + " is neither a socket nor kvqd's (kvq-...): closed");
    }
  }
  std::free(names);
  if (sockets > 1) {
    throw StartupError(ExitCode::usage, "systemd handed over " + std::to_string(sockets) +
                                            " sockets: kvqd.socket must have one ListenStream= line");
  }
  return out;
}

}  // namespace kvq

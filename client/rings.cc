// Invariant: a doorbell never blocks: a full counter means that the daemon has not read it yet and is going to look
// anyway.
#include "client/rings.h"

#include <unistd.h>

namespace kvq::client {

void Rings::ring_doorbell() {
  const std::uint64_t one = 1;
  [[maybe_unused]] const ssize_t written = ::write(doorbell_fd_, &one, sizeof(one));
}

}  // namespace kvq::client

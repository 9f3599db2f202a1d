// Small conversions between the daemon's values and the wire.
//
// Invariant: a Memory capability owns its descriptor (a duplicate), so that no later reuse of a number can leak another
// file to a peer; every text that came from a peer is made printable before it is stored, logged or shown.
#pragma once

#include <kj/io.h>

#include <memory>
#include <string>
#include <string_view>

#include "kvq/protocol.capnp.h"
#include "kvq/result.h"

namespace kvq {

// A descriptor that several owners may give up early (a slab's, once its receiver has mapped it).
using SharedFd = std::shared_ptr<kj::AutoCloseFd>;

// A duplicate of `fd`, close-on-exec. Holds -1 when the process has no descriptor left.
SharedFd duplicate(int fd);

wire::Memory::Client make_memory(SharedFd fd);

void set_status(wire::Status::Builder status, Errc code, std::string_view message, int native = 0);
void set_status(wire::Status::Builder status, const Error& error);
inline void set_ok(wire::Status::Builder status) { set_status(status, Errc::ok, ""); }

// "context (detail)", with errno's text where there is one.
std::string describe(const Error& error);

// At most `limit` bytes; control characters, quotes and non-ASCII bytes become '?'.
std::string printable(std::string_view text, std::size_t limit);

}  // namespace kvq

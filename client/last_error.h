// The text behind kvq_last_error: one line for each thread, written where a call fails.
//
// Invariant: a text names the offending value and what to do about it; writing one allocates nothing. Every function of
// this room that can fail returns a kvq_status and has called fail() on the calling thread when it is not KVQ_OK.
#pragma once

#include "kvq/kvq.h"
#include "kvq/result.h"

namespace kvq::client {

// Sets the calling thread's text and returns `status`.
[[gnu::format(printf, 2, 3)]] kvq_status fail(kvq_status status, const char* format, ...);

// The same for an error value of the kernels.
kvq_status fail(const Error& error);

const char* last_error();
const char* status_name(kvq_status status);

}  // namespace kvq::client

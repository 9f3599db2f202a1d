// The border between C and C++: handles, and the wrapper that every exported call runs in.
//
// Invariant: no exception passes call(); a handle of the parent process is refused before anything of it is touched.
#pragma once

#include <atomic>
#include <cstddef>
#include <cstring>
#include <exception>
#include <memory>
#include <new>

#include "client/connection.h"
#include "client/fork_guard.h"
#include "client/last_error.h"
#include "client/model.h"
#include "client/sequence.h"
#include "kvq/kvq.h"

struct kvq_client {
  const std::uint64_t generation = kvq::client::fork_generation();
  std::unique_ptr<kvq::client::Connection> connection;
  std::atomic<std::uint32_t> models{0};  // not yet closed
};

struct kvq_model {
  const std::uint64_t generation = kvq::client::fork_generation();
  std::shared_ptr<kvq::client::Model> model;
  kvq_client* client = nullptr;
};

struct kvq_sequence {
  const std::uint64_t generation = kvq::client::fork_generation();
  std::unique_ptr<kvq::client::Sequence> sequence;
};

namespace kvq::client {

// Runs `body` with every exception turned into SYSTEM.
template <typename Body>
kvq_status guarded(const char* name, Body body) noexcept {
  try {
    return body();
  } catch (const std::bad_alloc&) {
    return fail(KVQ_ERR_SYSTEM, "%s: out of memory", name);
  } catch (const std::exception& error) {
    return fail(KVQ_ERR_SYSTEM, "%s: %s", name, error.what());
  } catch (...) {
    return fail(KVQ_ERR_SYSTEM, "%s: unexpected error", name);
  }
}

// The same for a call on a handle, which is checked first.
template <typename Handle, typename Body>
kvq_status call(const char* name, Handle* handle, Body body) noexcept {
  if (handle == nullptr) return fail(KVQ_ERR_INVALID_ARGUMENT, "%s: the handle is NULL", name);
  if (handle->generation != fork_generation()) {
    return fail(KVQ_ERR_FORKED, "%s: the handle belongs to the parent process; connect anew in the child", name);
  }
  return guarded(name, [&] { return body(*handle); });
}

// Length of the first version of a struct: members that came later are behind it.
template <typename Struct>
inline constexpr std::size_t kFirstSize = sizeof(Struct);
template <>
inline constexpr std::size_t kFirstSize<kvq_model_desc> = offsetof(kvq_model_desc, device);
template <>
inline constexpr std::size_t kFirstSize<kvq_model_info> = offsetof(kvq_model_info, device_uuid);
template <>
inline constexpr std::size_t kFirstSize<kvq_attend_args> = offsetof(kvq_attend_args, max_query_tokens);

// Whether a caller's struct is at least as long as the first version of it.
template <typename Struct>
kvq_status check_size(const char* name, const Struct* value) {
  if (value == nullptr) return fail(KVQ_ERR_INVALID_ARGUMENT, "%s: the struct is NULL", name);
  if (value->size >= kFirstSize<Struct>) return KVQ_OK;
  return fail(KVQ_ERR_INVALID_ARGUMENT, "%s: size is %zu, expected %zu; set it to sizeof the struct", name, value->size,
              sizeof(Struct));
}

// A caller's struct, once its size is checked: members that it does not have yet are zero.
template <typename Struct>
Struct as_of_now(const Struct& value) {
  if (value.size >= sizeof(Struct)) return value;
  Struct whole{};
  std::memcpy(&whole, &value, value.size);
  return whole;
}

inline kvq_status missing(const char* name, const char* what) {
  return fail(KVQ_ERR_INVALID_ARGUMENT, "%s: %s is NULL", name, what);
}

}  // namespace kvq::client

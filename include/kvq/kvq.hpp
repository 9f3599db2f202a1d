// kvq.hpp: RAII over kvq.h. Header only; a thin layer that adds ownership and exceptions, and nothing else.
//
// Invariant: each object owns one handle and gives it back once, in its destructor; objects move and do not copy. A
// call that fails throws kvq::Failure, which carries the status and the text. Order of lives: Client outlives Model
// outlives Sequence, Step. Objects outlive a restart of kvqd (kvq.h, Restarts); destructors wait for no daemon, except
// that a Sequence whose release meets a full ring waits for a living one.
#pragma once

#include <cstdint>
#include <stdexcept>
#include <string>
#include <utility>
#include <vector>

#include "kvq/kvq.h"

namespace kvq {

class Failure : public std::runtime_error {
 public:
  explicit Failure(kvq_status status)
      : std::runtime_error(std::string(kvq_status_name(status)) + ": " + kvq_last_error()), status_(status) {}
  kvq_status status() const noexcept { return status_; }

 private:
  kvq_status status_;
};

inline void check(kvq_status status) {
  if (status != KVQ_OK) throw Failure(status);
}

namespace detail {

// One owned handle; End gives it back.
template <typename Handle, kvq_status (*End)(Handle*)>
class Owned {
 public:
  Owned() = default;
  explicit Owned(Handle* handle) : handle_(handle) {}
  Owned(Owned&& other) noexcept : handle_(std::exchange(other.handle_, nullptr)) {}
  Owned& operator=(Owned&& other) noexcept {
    std::swap(handle_, other.handle_);
    return *this;
  }
  ~Owned() { End(handle_); }
  Handle* get() const noexcept { return handle_; }

 private:
  Handle* handle_ = nullptr;
};

}  // namespace detail

class Client {
 public:
  // `socket_path` empty: environment KVQ_SOCKET, else the default.
  explicit Client(const std::string& socket_path = {}, const std::string& label = {}, std::uint32_t deadline_ms = 0) {
    const kvq_connect_options options{sizeof(options), socket_path.empty() ? nullptr : socket_path.c_str(),
                                      label.empty() ? nullptr : label.c_str(), deadline_ms};
    kvq_client* handle = nullptr;
    check(kvq_connect(&options, &handle));
    handle_ = detail::Owned<kvq_client, kvq_disconnect>(handle);
  }
  kvq_client* get() const noexcept { return handle_.get(); }

 private:
  detail::Owned<kvq_client, kvq_disconnect> handle_;
};

class Sequence {
 public:
  explicit Sequence(kvq_sequence* handle = nullptr) : handle_(handle) {}
  kvq_sequence* get() const noexcept { return handle_.get(); }

  void reserve(std::uint64_t tokens, std::uint32_t deadline_ms) { check(kvq_reserve(get(), tokens, deadline_ms)); }
  void commit(const std::vector<std::uint32_t>& tokens, std::uint64_t step = 0, std::uint32_t step_session = 0) {
    check(kvq_commit(get(), tokens.data(), tokens.size(), step, step_session));
  }
  void truncate(std::uint64_t tokens, std::uint32_t deadline_ms) { check(kvq_truncate(get(), tokens, deadline_ms)); }
  void drop_before(std::uint64_t position) { check(kvq_drop_before(get(), position)); }
  Sequence fork(std::uint32_t deadline_ms) {
    kvq_sequence* child = nullptr;
    check(kvq_fork(get(), deadline_ms, &child));
    return Sequence(child);
  }
  void park() { check(kvq_park(get())); }
  void resume(std::uint32_t deadline_ms) { check(kvq_resume(get(), deadline_ms)); }

  kvq_sequence_info info() const {
    kvq_sequence_info out{};
    out.size = sizeof(out);
    check(kvq_sequence_get_info(get(), &out));
    return out;
  }
  std::vector<std::int32_t> block_table() const {
    std::vector<std::int32_t> out(static_cast<std::size_t>(info().pages));
    std::size_t count = 0;
    check(kvq_block_table(get(), out.data(), out.size(), &count));
    return out;
  }
  std::vector<std::int64_t> slot_mapping(std::uint64_t first, std::uint64_t count) const {
    std::vector<std::int64_t> out(static_cast<std::size_t>(count));
    check(kvq_slot_mapping(get(), first, count, out.data()));
    return out;
  }
  std::vector<std::uint8_t> export_bytes() const {
    std::size_t bytes = 0;
    check(kvq_sequence_export(get(), nullptr, 0, &bytes));
    std::vector<std::uint8_t> out(bytes);
    check(kvq_sequence_export(get(), out.data(), out.size(), &bytes));
    return out;
  }

 private:
  detail::Owned<kvq_sequence, kvq_sequence_release> handle_;
};

class Model {
 public:
  Model(Client& client, const kvq_model_desc& desc) {
    kvq_model* handle = nullptr;
    check(kvq_register_model(client.get(), &desc, &handle));
    handle_ = detail::Owned<kvq_model, kvq_model_close>(handle);
  }
  kvq_model* get() const noexcept { return handle_.get(); }

  kvq_model_info info() const {
    kvq_model_info out{};
    out.size = sizeof(out);
    check(kvq_model_get_info(get(), &out));
    return out;
  }
  kvq_lookup_result lookup(const std::vector<std::uint32_t>& tokens) const {
    kvq_lookup_result out{};
    out.size = sizeof(out);
    check(kvq_lookup(get(), tokens.data(), tokens.size(), nullptr, 0, &out));
    return out;
  }
  // *cached_tokens: how many of `tokens` were attached.
  Sequence open(const std::vector<std::uint32_t>& tokens, std::uint64_t* cached_tokens = nullptr,
                const kvq_open_options* options = nullptr) {
    kvq_sequence* handle = nullptr;
    check(kvq_sequence_open(get(), tokens.data(), tokens.size(), options, cached_tokens, &handle));
    return Sequence(handle);
  }
  Sequence import_bytes(const std::vector<std::uint8_t>& bytes) {
    kvq_sequence* handle = nullptr;
    check(kvq_sequence_import(get(), bytes.data(), bytes.size(), &handle));
    return Sequence(handle);
  }
  kvq_pressure pressure() const {
    kvq_pressure out{};
    out.size = sizeof(out);
    check(kvq_get_pressure(get(), &out));
    return out;
  }
  void append(const kvq_append_args& args) { check(kvq_append(get(), &args)); }
  void attend(const kvq_attend_args& args) { check(kvq_attend(get(), &args)); }

 private:
  detail::Owned<kvq_model, kvq_model_close> handle_;
};

// One forward pass: ends when it goes out of scope, unless end() ended it.
class Step {
 public:
  explicit Step(Model& model) : model_(model.get()) { check(kvq_step_begin(model_, &serial_)); }
  Step(const Step&) = delete;
  Step& operator=(const Step&) = delete;
  ~Step() {
    if (open_) kvq_step_end(model_, serial_, nullptr);
  }
  void end(void* stream = nullptr) {
    check(kvq_step_end(model_, serial_, stream));
    open_ = false;
  }
  std::uint64_t serial() const noexcept { return serial_; }

 private:
  kvq_model* model_;
  std::uint64_t serial_ = 0;
  bool open_ = true;
};

}  // namespace kvq

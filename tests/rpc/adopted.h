// What an earlier daemon left, for tests: records, descriptors, and a holder that remembers names.
#pragma once

#include <signal.h>
#include <sys/eventfd.h>
#include <sys/syscall.h>
#include <sys/wait.h>

#include "tests/rpc/harness.h"

namespace kvq::testing {

class Holder final : public Keeper {
 public:
  void keep(const std::string& name, int fd) override {
    EXPECT_GE(fd, 0) << name;
    EXPECT_TRUE(names.insert(name).second) << name << " is kept twice";
  }
  void forget(const std::string& name) override { names.erase(name); }
  std::set<std::string> names;
};

// A process that does nothing until it is killed.
class Idler {
 public:
  Idler() {
    pid = ::fork();
    if (pid == 0) {
      for (;;) ::pause();
    }
    pidfd = static_cast<int>(::syscall(SYS_pidfd_open, pid, 0));
    EXPECT_GE(pidfd, 0);
  }
  ~Idler() {
    end();
    ::close(pidfd);
  }
  void end() {
    if (pid > 0) {
      ::kill(pid, SIGKILL);
      ::waitpid(pid, nullptr, 0);
    }
    pid = -1;
  }
  pid_t pid = -1;
  int pidfd = -1;
};

// The record and the descriptors of session 17, of this very process unless a test says otherwise.
struct Left {
  Left() {
    record.id = SessionId{17};
    record.tenant = TenantId{1};
    record.pid = static_cast<std::uint32_t>(::getpid());
    record.uid = ::getuid();
    record.label = "server of before";
    record.waits = true;
    pidfd = Descriptor(static_cast<int>(::syscall(SYS_pidfd_open, ::getpid(), 0)));
    doorbell = Descriptor(::eventfd(0, EFD_CLOEXEC | EFD_NONBLOCK));
    notice = Descriptor(::eventfd(0, EFD_CLOEXEC | EFD_NONBLOCK));
  }
  void belong_to(const Idler& process) {
    record.pid = static_cast<std::uint32_t>(process.pid);
    pidfd = Descriptor(::dup(process.pidfd));
  }

  AdoptedSession record;
  Descriptor pidfd, doorbell, notice;
};

// A server that starts with what was left. Each uid has its own tenant; this one's is the first.
class Successor {
 public:
  explicit Successor(std::vector<Left*> sessions, RpcOptions options = {}, Kept more = {})
      : kept(std::move(more)), harness(prepared(std::move(options), sessions), /*slabs_at_open=*/1, [&](FakeStore& s) {
          s.add_tenant({.name = "uid-" + std::to_string(::getuid())});
          for (const Left* left : sessions) s.adopt(left->record);
        }) {}

  // Asks for session `id` with one thing spoilt; the status code.
  Errc resume(
      Client& client, Sink::Seen& seen, std::uint32_t id = 17,
      const std::function<void(wire::Registration::Builder)>& spoil = [](auto) {}) {
    auto request = resume_request(client, seen, id);
    spoil(request.getRequest());
    kept_response = harness.wait(send(kj::mv(request)));
    auto& response = KJ_ASSERT_NONNULL(kept_response);
    const auto code = static_cast<Errc>(response.getStatus().getCode());
    EXPECT_EQ(response.hasSession(), code == Errc::ok);
    EXPECT_EQ(code == Errc::ok, response.getStatus().getMessage().size() == 0);
    return code;
  }
  auto resume_request(Client& client, Sink::Seen& seen, std::uint32_t id = 17)
      -> capnp::Request<wire::Node::RegisterParams, wire::Node::RegisterResults> {
    auto request = client.node.registerRequest();
    auto registration = request.initRequest();
    fill(registration, kj::heap<Sink>(seen));
    registration.setResumeSession(id);
    registration.setResumeToken(kj::arrayPtr(FakeStore::kToken.data(), FakeStore::kToken.size()));
    return request;
  }
  bool holds(std::uint32_t id) const {
    const auto number = std::to_string(id);
    const auto has = [&](const char* kind) { return holder.names.count("kvq-" + (kind + ("-" + number))) != 0; };
    EXPECT_EQ(has("pid"), has("doorbell"));
    EXPECT_EQ(has("pid"), has("notice"));
    return has("pid");
  }

  Holder holder;
  Kept kept;
  Harness harness;
  kj::Maybe<capnp::Response<wire::Node::RegisterResults>> kept_response;  // of the last attempt

 private:
  RpcOptions prepared(RpcOptions options, const std::vector<Left*>& sessions) {
    options.unlisted = TenantSpec{};
    options.keeper = &holder;
    options.kept = &kept;
    for (Left* left : sessions) {
      const auto number = std::to_string(raw(left->record.id));
      const auto leave = [&](const char* kind, Descriptor& fd) {
        const std::string name = "kvq-" + (kind + ("-" + number));
        holder.names.insert(name);
        if (fd.get() >= 0) kept[name] = std::move(fd);
      };
      leave("pid", left->pidfd);
      leave("doorbell", left->doorbell);
      leave("notice", left->notice);
    }
    for (const auto& [name, fd] : kept) holder.names.insert(name);
    return options;
  }
};

}  // namespace kvq::testing

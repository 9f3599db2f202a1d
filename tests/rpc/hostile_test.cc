// Peers that die, flood or stay silent: the daemon goes on and leaks nothing.
#include <grp.h>
#include <sys/wait.h>

#include "tests/rpc/harness.h"
#include "tests/rpc/raw_peer.h"

namespace kvq {
namespace {

using namespace kvq::testing;

// A process with its own loop, forked before the harness has one. It gets the socket's path, runs `body`, reports a
// byte and then waits to be killed.
class Child {
 public:
  explicit Child(std::function<char(const std::string& path)> body) {
    EXPECT_EQ(::socketpair(AF_UNIX, SOCK_STREAM | SOCK_CLOEXEC, 0, wire_), 0);
    pid_ = ::fork();
    if (pid_ == 0) {
      char path[128] = {};
      if (::read(wire_[1], path, sizeof(path) - 1) <= 0) ::_exit(1);
      const char outcome = body(path);
      if (::write(wire_[1], &outcome, 1) != 1) ::_exit(1);
      for (;;) ::pause();
    }
    EXPECT_EQ(::fcntl(wire_[0], F_SETFL, O_NONBLOCK), 0);
  }
  ~Child() {
    kill();
    ::close(wire_[0]);
    ::close(wire_[1]);
  }
  void start(const std::string& path) { EXPECT_EQ(::write(wire_[0], path.data(), path.size()), ssize_t(path.size())); }
  // The byte, or 0 while there is none.
  char outcome() {
    char byte = 0;
    return ::read(wire_[0], &byte, 1) == 1 ? byte : 0;
  }
  void kill() {
    if (pid_ > 0) {
      ::kill(pid_, SIGKILL);
      ::waitpid(pid_, nullptr, 0);
    }
    pid_ = -1;
  }

 private:
  int wire_[2] = {-1, -1};
  pid_t pid_ = -1;
};

// Gives up root for another user with these supplementary groups. Without root, one's own user is nobody special
// already.
bool become_nobody(const std::vector<gid_t>& groups) {
  if (::getuid() != 0) return true;
  return ::setgroups(groups.size(), groups.data()) == 0 && ::setresgid(4242, 4242, 4242) == 0 &&
         ::setresuid(4242, 4242, 4242) == 0;
}

TEST(Death, AKilledClientsSessionIsReleasedAtOnce) {
  Child child([](const std::string& path) {
    static kj::AsyncIoContext io = kj::setupAsyncIo();
    static Client client(*io.lowLevelProvider, path);
    static Sink::Seen seen;
    auto request = client.node.registerRequest();
    fill(request.initRequest(), kj::heap<Sink>(seen));
    static auto response = request.send().wait(io.waitScope);
    return response.getStatus().getCode() == 0 ? 'y' : 'n';
  });
  Harness h;
  h.store.open_steps = 1;  // an open step of a dead process counts for nothing
  child.start(h.path);
  char outcome = 0;
  h.until([&] { return (outcome = child.outcome()) != 0; });
  ASSERT_EQ(outcome, 'y');
  ASSERT_EQ(h.server->sessions(), 1u);
  const auto start = h.loop.now_ms();
  child.kill();
  h.until([&] { return h.server->sessions() == 0 && h.server->connections() == 0; });
  EXPECT_LT(h.loop.now_ms() - start, 250u);
  EXPECT_EQ(h.store.count("process_ended"), 1u);
}

TEST(Admin, APeerOutsideTheAdminGroupIsRefused) {
  Child child([](const std::string& path) {
    if (!become_nobody({4243})) return 's';
    auto io = kj::setupAsyncIo();
    Client client(*io.lowLevelProvider, path);
    auto response = client.node.adminRequest().send().wait(io.waitScope);
    const std::string message = response.getStatus().getMessage().cStr();
    if (response.getStatus().getCode() == 0) return 'y';
    return message.find("group kvq-admin") != std::string::npos &&
                   message.find("uid " + std::to_string(::getuid())) != std::string::npos
               ? 'n'
               : 'm';
  });
  RpcOptions options;
  options.admin_gid = 77;
  options.admin_group = "kvq-admin";
  Harness h(std::move(options));
  child.start(h.path);
  char outcome = 0;
  h.until([&] { return (outcome = child.outcome()) != 0; });
  EXPECT_EQ(outcome, 'n');
}

TEST(Admin, AGroupAdmits) {
  const gid_t group = ::getuid() == 0 ? 77 : ::getgid();
  Child child([group](const std::string& path) {
    if (!become_nobody({4243, group})) return 's';
    auto io = kj::setupAsyncIo();
    Client client(*io.lowLevelProvider, path);
    return client.node.adminRequest().send().wait(io.waitScope).getStatus().getCode() == 0 ? 'y' : 'n';
  });
  RpcOptions options;
  options.admin_gid = group;
  options.admin_group = "kvq-admin";
  Harness h(std::move(options));
  child.start(h.path);
  char outcome = 0;
  h.until([&] { return (outcome = child.outcome()) != 0; });
  EXPECT_EQ(outcome, 'y');
}

TEST(Leaks, AHundredSessionsComeAndGoWithoutADescriptorLeft) {
  Harness h({}, /*slabs_at_open=*/4);
  const auto visit = [&] {
    Client client = h.connect();
    Sink::Seen seen;
    auto response = h.register_model(client, seen);
    h.wait(send(response.getSession().readyRequest()));
    auto directory = h.wait(send(response.getSession().directoryRequest()));
    EXPECT_TRUE(h.wait(directory.getMemory().getFd()) != nullptr);
  };
  const auto settle = [&] { h.until([&] { return h.server->sessions() == 0 && h.server->connections() == 0; }); };
  visit();
  settle();
  const auto before = open_descriptors();
  for (int i = 0; i < 100; ++i) visit();
  settle();
  EXPECT_EQ(open_descriptors(), before);
}

TEST(Leaks, MappedSlabsCostTheDaemonNoDescriptor) {
  Harness h({}, /*slabs_at_open=*/1);
  Client client = h.connect();
  Sink::Seen seen;
  auto response = h.register_model(client, seen);
  h.wait(send(response.getSession().readyRequest()));
  const auto before = open_descriptors();
  const SessionId id = h.store.live.begin()->first;
  for (std::uint32_t slab = 1; slab <= 50; ++slab) h.store.announce(id, slab, true);
  h.until([&] { return h.store.count("mapped") == 51; });
  EXPECT_EQ(open_descriptors() - before, 50u);  // those of the client, which is this process too
}

TEST(Silence, IdleConnectionsCannotCrowdOutRoot) {
  RpcOptions options;
  options.max_connections = 24;
  Harness h(std::move(options));
  std::vector<int> idle;
  for (int i = 0; i < 40; ++i) idle.push_back(connect_to(h.path));
  const std::size_t most = ::getuid() == 0 ? 24 : 8;
  h.until([&] { return h.server->connections() == most && !h.log.empty(); });
  for (int fd : idle) ::close(fd);
  h.until([&] { return h.server->connections() == 0; });
  Client client = h.connect();
  Sink::Seen seen;
  auto response = h.register_model(client, seen);
}

TEST(Silence, APeerThatDoesNotReadItsRepliesIsCut) {
  RpcOptions options;
  options.stalled_write_ms = 200;
  Harness h(std::move(options));
  Client client = h.connect();
  Sink::Seen seen;
  auto response = h.register_model(client, seen);
  h.wait(send(response.getSession().readyRequest()));
  // The client's loop is this one, so its side is stopped by asking and not reading: raw calls on a second socket. Each
  // is finished, so that only the replies pile up.
  RawPeer peer(h.path);
  h.until([&] { return h.server->connections() == 2; });
  std::uint32_t question = 0;
  h.until([&] {
    for (int i = 0; i < 2000 && peer.bootstrap_and_finish(question); ++i) ++question;
    return h.server->connections() == 1;
  });
  EXPECT_TRUE(h.logged("event=replies_not_read action=disconnect"));
}

}  // namespace
}  // namespace kvq

// Keeping descriptors: what goes out to a service manager, real sockets in place of it, and what a start takes in.
#include "daemon/keeper.h"

#include <fcntl.h>
#include <gmock/gmock.h>
#include <gtest/gtest.h>
#include <poll.h>
#include <sys/eventfd.h>
#include <sys/mman.h>
#include <sys/socket.h>
#include <sys/un.h>
#include <sys/wait.h>
#include <unistd.h>

#include <cerrno>
#include <cstdlib>
#include <cstring>
#include <deque>
#include <optional>

#include "daemon/intake.h"
#include "daemon/make_store.h"

namespace kvq {
namespace {

using ::testing::ElementsAre;
using ::testing::HasSubstr;
using ::testing::IsEmpty;

Descriptor file_of(const std::string& text) {
  Descriptor fd(::memfd_create("keeper-test", MFD_CLOEXEC));
  EXPECT_EQ(::write(fd.get(), text.data(), text.size()), static_cast<ssize_t>(text.size()));
  return fd;
}

std::string content(int fd) {
  char text[64] = {};
  const ssize_t got = ::pread(fd, text, sizeof text, 0);
  return got < 0 ? std::strerror(errno) : std::string(text, static_cast<std::size_t>(got));
}

// The manager's end of the protocol. Its queue takes as many datagrams as the kernel allows (10 by default).
class Manager {
 public:
  explicit Manager(const std::string& address) : address_(address) {
    sockaddr_un bound{};
    bound.sun_family = AF_UNIX;
    std::memcpy(bound.sun_path, address.data(), address.size());
    if (address[0] == '@') bound.sun_path[0] = '\0';
    fd_ = Descriptor(::socket(AF_UNIX, SOCK_DGRAM | SOCK_CLOEXEC | SOCK_NONBLOCK, 0));
    const auto size = static_cast<socklen_t>(offsetof(sockaddr_un, sun_path) + address.size());
    EXPECT_EQ(::bind(fd_.get(), reinterpret_cast<const sockaddr*>(&bound), size), 0) << std::strerror(errno);
  }
  ~Manager() {
    if (address_[0] != '@') ::unlink(address_.c_str());
  }
  struct Heard {
    std::string text;
    Descriptor fd;
  };
  std::optional<Heard> hear() {
    char text[512];
    alignas(cmsghdr) char control[CMSG_SPACE(sizeof(int))];
    iovec part{text, sizeof text};
    msghdr message{};
    message.msg_iov = &part;
    message.msg_iovlen = 1;
    message.msg_control = control;
    message.msg_controllen = sizeof control;
    const ssize_t got = ::recvmsg(fd_.get(), &message, MSG_CMSG_CLOEXEC);
    if (got < 0) return std::nullopt;
    Heard out{std::string(text, static_cast<std::size_t>(got)), {}};
    if (const cmsghdr* header = CMSG_FIRSTHDR(&message); header != nullptr) {
      int fd = -1;
      std::memcpy(&fd, CMSG_DATA(header), sizeof fd);
      out.fd = Descriptor(fd);
    }
    return out;
  }

 private:
  std::string address_;
  Descriptor fd_;
};

class KeeperTest : public ::testing::Test {
 protected:
  std::string path() const { return ::testing::TempDir() + "kvq_keeper_" + std::to_string(::getpid()); }
  Notify::Log log() {
    return [this](const std::string& line) { lines_.push_back(line); };
  }
  std::size_t said(const std::string& event) const {
    return static_cast<std::size_t>(std::count_if(
        lines_.begin(), lines_.end(), [&](const std::string& line) { return line.starts_with("event=" + event); }));
  }
  std::vector<std::string> lines_;
};

TEST_F(KeeperTest, KeepsAndForgetsByPathAndByAbstractName) {
  for (const std::string& address : {path(), "@" + path()}) {
    Manager manager(address);
    Notify notify(address, log());
    ServiceKeeper keeper(notify, {});
    EXPECT_TRUE(keeper.active());
    keeper.keep("kvq-root", file_of("the root").get());
    keeper.forget("kvq-root");
    auto kept = manager.hear();
    ASSERT_TRUE(kept.has_value());
    EXPECT_EQ(kept->text, "FDSTORE=1\nFDNAME=kvq-root\nFDPOLL=0");
    EXPECT_EQ(content(kept->fd.get()), "the root");
    auto forgotten = manager.hear();
    ASSERT_TRUE(forgotten.has_value());
    EXPECT_EQ(forgotten->text, "FDSTOREREMOVE=1\nFDNAME=kvq-root");
    EXPECT_EQ(forgotten->fd.get(), -1);
  }
  EXPECT_THAT(lines_, IsEmpty());
}

TEST_F(KeeperTest, AFullQueueIsNeverWaitedForAndLosesNothing) {
  constexpr int kMessages = 2000;
  Manager manager(path());
  Notify notify(path(), log());
  int asked = 0;
  notify.on_waiting([&] { ++asked; });
  ServiceKeeper keeper(notify, {});
  std::deque<Manager::Heard> heard;
  for (int i = 0; i < kMessages; ++i) {  // hardly anything is read: a call that waited would hang here
    if (i == kMessages / 2) heard.push_back(*manager.hear());  // there is room again: who came first goes first
    if (i % 10 == 9) {
      keeper.forget("kvq-slab-" + std::to_string(i - 1));
    } else {
      keeper.keep("kvq-slab-" + std::to_string(i), file_of(std::to_string(i)).get());  // closed right after
    }
  }
  EXPECT_GT(notify.waiting(), 0u);
  EXPECT_EQ(asked, 1);
  EXPECT_EQ(said("notify_waits"), 1u);
  while (heard.size() < kMessages) {
    if (auto message = manager.hear()) {
      heard.push_back(std::move(*message));
    } else {
      const std::size_t before = notify.waiting();
      notify.flush();
      ASSERT_LT(notify.waiting(), before);
    }
  }
  for (int i = 0; i < kMessages; ++i) {
    const Manager::Heard& message = heard[static_cast<std::size_t>(i)];
    const bool removes = i % 10 == 9;
    const std::string name = "kvq-slab-" + std::to_string(removes ? i - 1 : i);
    ASSERT_EQ(message.text, removes ? "FDSTOREREMOVE=1\nFDNAME=" + name : "FDSTORE=1\nFDNAME=" + name + "\nFDPOLL=0");
    if (!removes) {
      ASSERT_EQ(content(message.fd.get()), std::to_string(i));
    }
  }
  EXPECT_TRUE(notify.flush());
  EXPECT_EQ(notify.waiting(), 0u);
  EXPECT_EQ(said("notify_caught_up"), 1u);
}

TEST_F(KeeperTest, AManagerThatIsGoneIsSaidOnceAndHarmless) {
  auto manager = std::make_unique<Manager>(path());
  Notify notify(path(), log());
  ServiceKeeper keeper(notify, {});
  const Descriptor file = file_of("x");
  for (int i = 0; i < 500; ++i) keeper.keep("kvq-slab-" + std::to_string(i), file.get());
  EXPECT_GT(notify.waiting(), 0u);
  manager.reset();
  EXPECT_TRUE(notify.flush());
  EXPECT_FALSE(keeper.active());
  for (int i = 0; i < 10; ++i) keeper.keep("kvq-pages-" + std::to_string(i), file.get());
  keeper.forget_all();
  EXPECT_EQ(notify.waiting(), 0u);
  EXPECT_EQ(said("notify_lost"), 1u);
  EXPECT_EQ(said("notify_caught_up"), 0u) << "nothing was caught up with";
}

TEST_F(KeeperTest, WithoutASocketNothingIsKept) {
  Notify notify("", log());
  ServiceKeeper keeper(notify, {});
  EXPECT_FALSE(keeper.active());
  keeper.keep("kvq-root", file_of("x").get());
  EXPECT_THAT(keeper.names(), IsEmpty());
  EXPECT_THAT(lines_, IsEmpty());
}

TEST_F(KeeperTest, AnAddressOfAnotherKindIsRefusedWithAWarning) {
  for (const std::string& address :
       {std::string("vsock:2:1234"), std::string("/") + std::string(120, 'x'), std::string("@")}) {
    Notify notify(address, log());
    EXPECT_FALSE(notify.active());
  }
  EXPECT_EQ(said("notify_refused"), 3u);
}

TEST_F(KeeperTest, EachDeviceKeepsAndForgetsItsOwnNames) {
  Manager manager(path());
  Notify notify(path(), log());
  const std::string a = kept_prefix("GPU-aaaa"), b = kept_prefix("GPU-bbbb");
  ASSERT_NE(a, b);
  EXPECT_EQ(prefix_of(a + "slab-5"), a);
  for (const char* of_host : {"kvq-slab-5", "kvq-doorbell-1", "kvq-root", "kvq-deadbeef", "kvq-"}) {
    EXPECT_EQ(prefix_of(of_host), "kvq-") << of_host;
  }
  Kept kept;
  for (const std::string& name : {std::string("kvq-root"), a + "root", b + "root", b + "slab-5"}) {
    kept[name] = file_of(name);
  }
  ServiceKeeper all(notify, kept);
  PartKeeper host(all, kept_prefix("")), first(all, a), second(all, b);
  const Kept of_second = second.take(kept);
  ASSERT_EQ(of_second.size(), 2u);
  EXPECT_EQ(content(of_second.at("kvq-root").get()), b + "root");
  EXPECT_EQ(content(of_second.at("kvq-slab-5").get()), b + "slab-5");
  EXPECT_EQ(first.take(kept).size(), 1u);
  EXPECT_EQ(host.take(kept).size(), 1u);
  EXPECT_TRUE(kept.empty());
  second.keep("kvq-slab-6", file_of("6").get());
  second.forget_all();
  EXPECT_THAT(all.names(), ElementsAre(std::min(a + "root", std::string("kvq-root")),
                                       std::max(a + "root", std::string("kvq-root"))));
  host.forget_all();
  EXPECT_THAT(all.names(), ElementsAre(a + "root"));
}

TEST_F(KeeperTest, ForgetAllCoversWhatWasHandedBackAndReplacingDoesNotDouble) {
  Manager manager(path());
  Notify notify(path(), log());
  Kept kept;
  kept["kvq-root"] = file_of("old");
  ServiceKeeper keeper(notify, kept);
  keeper.keep("kvq-root", file_of("new").get());
  keeper.keep("kvq-journal", file_of("j").get());
  keeper.forget_all();
  std::vector<std::string> heard;
  while (auto message = manager.hear()) heard.push_back(message->text.substr(0, message->text.find("\nFDPOLL")));
  EXPECT_THAT(heard, ElementsAre("FDSTOREREMOVE=1\nFDNAME=kvq-root", "FDSTORE=1\nFDNAME=kvq-root",
                                 "FDSTORE=1\nFDNAME=kvq-journal", "FDSTOREREMOVE=1\nFDNAME=kvq-journal",
                                 "FDSTOREREMOVE=1\nFDNAME=kvq-root"));
  EXPECT_THAT(keeper.names(), IsEmpty());
}

// What an earlier daemon left and cannot be trusted: a root that is no root.
TEST_F(KeeperTest, ARefusedStateIsForgottenAndTheStartIsClean) {
  for (const bool with_root : {true, false}) {
    Manager manager(path());
    Notify notify(path(), log());
    Kept kept;
    kept[with_root ? "kvq-root" : "kvq-slab-0"] = file_of("garbage");
    ServiceKeeper all(notify, kept);
    PartKeeper keeper(all, kept_prefix(""));
    int devices = 0;
    const MadeStore made = make_store({.config = {},
                                       .make_device =
                                           [&](const std::optional<KeptArena>&) {
                                             ++devices;
                                             return make_host_device(16 << 20, 1 << 20, [](auto work, auto done) {
                                               work();
                                               done();
                                             });
                                           },
                                       .deliver = [](const SlabNotice&) {},
                                       .log = log()},
                                      keeper, std::move(kept), 0);
    ASSERT_NE(made.store, nullptr);
    EXPECT_EQ(devices, with_root ? 2 : 1) << "a device that adoption touched is not used again";
    EXPECT_EQ(said("adopt_refused why=\""), 1u);
    EXPECT_THAT(made.state, HasSubstr("refused"));
    EXPECT_NE(made.store->status().adopt.refused, "");
    const auto first = manager.hear();
    ASSERT_TRUE(first.has_value());
    EXPECT_EQ(first->text, std::string("FDSTOREREMOVE=1\nFDNAME=") + (with_root ? "kvq-root" : "kvq-slab-0"));
    lines_.clear();
  }
}

TEST_F(KeeperTest, WithNothingLeftTheStartIsQuiet) {
  Notify notify("", log());
  ServiceKeeper all(notify, {});
  PartKeeper keeper(all, kept_prefix(""));
  const auto device = [](const std::optional<KeptArena>&) {
    return make_host_device(16 << 20, 1 << 20, [](auto work, auto) { work(); });
  };
  const MadeStore made = make_store(
      {.config = {}, .make_device = device, .deliver = [](const SlabNotice&) {}, .log = log()}, keeper, {}, 0);
  EXPECT_EQ(made.state, "new");
  EXPECT_EQ(said("adopt"), 0u);
}

// In a child, since descriptors from 3 on may be in use here. `check` gets what was taken in; its 0 is passed on.
struct Given {
  std::string name;
  std::function<Descriptor()> make;
};

int take_in_child(const std::vector<Given>& given, const std::function<int(Intake&)>& check,
                  const char* count = nullptr) {
  const pid_t child = ::fork();
  if (child == 0) {
    std::string names;
    std::vector<int> high;
    for (const Given& one : given) {
      names += (names.empty() ? "" : ":") + one.name;
      const Descriptor made = one.make();
      high.push_back(::fcntl(made.get(), F_DUPFD, 100));
    }
    for (std::size_t i = 0; i < high.size(); ++i) {
      ::dup2(high[i], 3 + static_cast<int>(i));
      ::close(high[i]);
    }
    ::setenv("LISTEN_PID", std::to_string(::getpid()).c_str(), 1);
    ::setenv("LISTEN_FDS", count != nullptr ? count : std::to_string(given.size()).c_str(), 1);
    ::setenv("LISTEN_FDNAMES", names.c_str(), 1);
    try {
      Intake intake = take_descriptors();
      if (std::getenv("LISTEN_FDS") != nullptr || std::getenv("LISTEN_FDNAMES") != nullptr) ::_exit(50);
      ::_exit(check(intake));
    } catch (const StartupError& error) {
      ::_exit(100 + static_cast<int>(error.code));
    }
  }
  int status = 0;
  EXPECT_EQ(::waitpid(child, &status, 0), child);
  return WIFEXITED(status) ? WEXITSTATUS(status) : 1000;
}

Given kept_file(const std::string& name, const std::string& text) {
  return {name, [text] { return file_of(text); }};
}
Given a_socket(const std::string& name, int type = SOCK_STREAM) {
  return {name, [type] { return Descriptor(::socket(AF_UNIX, type, 0)); }};
}

TEST(Intake, SplitsSocketAndKeptAndClosesTheRest) {
  const Given event{"kvq-doorbell-7", [] { return Descriptor(::eventfd(5, 0)); }};
  EXPECT_EQ(take_in_child({a_socket("kvqd.socket"), kept_file("kvq-root", "root"), kept_file("log", "?"), event},
                          [](Intake& intake) {
                            if (intake.socket.get() != 3 || intake.kept.size() != 2) return 1;
                            if (content(intake.kept["kvq-root"].get()) != "root") return 2;
                            if (intake.kept["kvq-doorbell-7"].get() != 6) return 3;
                            if (::fcntl(5, F_GETFD) != -1 || intake.warnings.size() != 1) return 4;
                            for (const int fd : {3, 4, 6}) {
                              if (!(::fcntl(fd, F_GETFD) & FD_CLOEXEC)) return 5;
                            }
                            return intake.warnings[0].find("log") != std::string::npos ? 0 : 6;
                          }),
            0);
}

TEST(Intake, ASocketIsTheListeningOneWhateverItsName) {
  EXPECT_EQ(take_in_child({kept_file("kvq-root", "root"), a_socket("kvq-socket")},
                          [](Intake& intake) { return intake.socket.get() == 4 && intake.kept.size() == 1 ? 0 : 1; }),
            0);
}

TEST(Intake, OfOneNameTheNewerCountsAndItIsSaid) {
  EXPECT_EQ(take_in_child({kept_file("kvq-root", "new"), kept_file("kvq-root", "old")},
                          [](Intake& intake) {
                            if (content(intake.kept["kvq-root"].get()) != "new" || intake.warnings.size() != 1)
                              return 1;
                            return ::fcntl(4, F_GETFD) == -1 ? 0 : 2;
                          }),
            0);
}

TEST(Intake, TwoSocketsOrNonsenseAreRefused) {
  const auto any = [](Intake&) { return 0; };
  const int usage = 100 + static_cast<int>(ExitCode::usage);
  EXPECT_EQ(take_in_child({a_socket("a"), a_socket("b", SOCK_DGRAM)}, any), usage);
  EXPECT_EQ(take_in_child({kept_file("kvq-root", "x")}, any, "many"), usage);
  EXPECT_EQ(take_in_child({kept_file("kvq-root", "x")}, any, "2"), usage) << "descriptor 4 does not exist";
}

TEST(Intake, WithoutTheManagersWordsThereIsNothing) {
  const Intake intake = take_descriptors();
  EXPECT_EQ(intake.socket.get(), -1);
  EXPECT_TRUE(intake.kept.empty());
}

}  // namespace
}  // namespace kvq

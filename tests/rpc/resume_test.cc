// Sessions that an earlier daemon left: they go on, their clients take them up, and whoever does not come back is let
// go.
#include <sys/vfs.h>

#include "daemon/rpc/kept_session.h"
#include "tests/rpc/adopted.h"

namespace kvq {
namespace {

using namespace kvq::testing;

void let_ticks_pass(Harness& h) {
  const auto before = h.store.ticks;
  h.until([&] { return h.store.ticks > before + 3; });
}

TEST(Adopted, ASessionGoesOnBeforeItsClientIsBack) {
  Left left;
  const int doorbell = ::dup(left.doorbell.get()), notice = ::dup(left.notice.get());
  Successor s({&left});
  Harness& h = s.harness;
  EXPECT_EQ(h.server->sessions(), 1u);
  const std::uint64_t one = 1;
  ASSERT_EQ(::write(doorbell, &one, sizeof(one)), 8);
  h.until([&] { return h.store.count("drain_commands") > 0; });
  h.store.notices.insert(SessionId{17});
  std::uint64_t count = 0;
  h.until([&] { return ::read(notice, &count, sizeof(count)) == 8; });
  let_ticks_pass(h);
  EXPECT_EQ(h.store.count("disconnect"), 0u);
  EXPECT_TRUE(s.holds(17));
  ::close(doorbell);
  ::close(notice);
}

TEST(Adopted, SlabNoticesWaitForTheClient) {
  Left left;
  Successor s({&left});
  Harness& h = s.harness;
  h.store.announce(SessionId{17}, 5, /*map=*/true);
  let_ticks_pass(h);
  Client client = h.connect();
  Sink::Seen seen;
  ASSERT_EQ(s.resume(client, seen), Errc::ok);
  h.until([&] { return h.store.count("mapped") == 1; });  // the store told again of those that there are: slab 0
  EXPECT_EQ(seen.maps, 1u);
  h.store.announce(SessionId{17}, 6, /*map=*/true);
  h.until([&] { return seen.maps == 2; });
}

TEST(Adopted, AProcessThatEndedBeforeIsReleasedAtOnce) {
  Idler process;
  Left left;
  left.belong_to(process);
  process.end();
  Successor s({&left});
  Harness& h = s.harness;
  h.until([&] { return h.server->sessions() == 0; });
  EXPECT_EQ(h.store.count("process_ended"), 1u);
  EXPECT_FALSE(s.holds(17));
}

TEST(Adopted, AProcessThatEndsWhileWaitingIsReleasedAtOnce) {
  Idler process;
  Left left;
  left.belong_to(process);
  Successor s({&left});
  Harness& h = s.harness;
  h.store.open_steps = 1;
  let_ticks_pass(h);
  EXPECT_EQ(h.server->sessions(), 1u);
  process.end();
  h.until([&] { return h.server->sessions() == 0; });
  EXPECT_EQ(h.store.count("process_ended"), 1u);
}

TEST(Adopted, AClientThatDoesNotComeBackIsDisconnected) {
  Left left;
  RpcOptions options;
  options.reconnect_ms = 100;
  Successor s({&left}, std::move(options));
  Harness& h = s.harness;
  h.store.open_steps = 1;
  const auto start = h.loop.now_ms();
  h.until([&] { return h.store.count("disconnect") == 1; });
  EXPECT_GE(h.loop.now_ms() - start, 90u);
  EXPECT_TRUE(h.logged("event=client_not_back action=disconnect session=17"));
  let_ticks_pass(h);
  EXPECT_EQ(h.store.count("process_ended"), 0u);
  h.store.open_steps = 0;
  h.until([&] { return h.server->sessions() == 0; });
  EXPECT_EQ(h.store.count("disconnect"), 1u);
  EXPECT_FALSE(s.holds(17));
}

TEST(Adopted, AClientThatHadHungUpBeforeIsOnlyWaitedOut) {
  Left left;
  left.record.waits = false;
  Successor s({&left});
  Harness& h = s.harness;
  h.store.open_steps = 1;
  let_ticks_pass(h);
  Client client = h.connect();
  Sink::Seen seen;
  EXPECT_EQ(s.resume(client, seen), Errc::stale_id);
  h.store.open_steps = 0;
  h.until([&] { return h.server->sessions() == 0; });
  EXPECT_EQ(h.store.count("disconnect"), 0u);
  EXPECT_EQ(h.store.count("process_ended"), 1u);
}

// What comes back from the holder is believed only as far as the kernel confirms it.
TEST(Adopted, MissingAndWrongDescriptorsEndTheSession) {
  Idler other;
  const auto memory = [] { return Descriptor(::memfd_create("x", MFD_CLOEXEC)); };
  const std::vector<std::pair<const char*, std::function<void(Left&)>>> spoilers = {
      {"its pidfd is missing", [](Left& l) { l.pidfd = Descriptor(); }},
      {"its pidfd is none", [&](Left& l) { l.pidfd = memory(); }},
      {"its pidfd names process", [&](Left& l) { l.pidfd = Descriptor(::dup(other.pidfd)); }},
      {"its doorbell is missing", [](Left& l) { l.doorbell = Descriptor(); }},
      {"its doorbell is no eventfd", [&](Left& l) { l.doorbell = memory(); }},
      {"its notice is missing", [](Left& l) { l.notice = Descriptor(); }},
      {"its notice is no eventfd", [&](Left& l) { l.notice = memory(); }}};
  for (const auto& [problem, spoil] : spoilers) {
    SCOPED_TRACE(problem);
    Left left;
    spoil(left);
    Successor s({&left});
    Harness& h = s.harness;
    h.store.open_steps = 1;
    h.until([&] { return h.store.count("disconnect") == 1; });
    EXPECT_TRUE(h.logged("event=session_incomplete action=disconnect session=17"));
    EXPECT_TRUE(h.logged(problem));
    Client client = h.connect();
    Sink::Seen seen;
    EXPECT_EQ(s.resume(client, seen), Errc::stale_id);
    let_ticks_pass(h);
    EXPECT_EQ(h.store.count("process_ended"), 0u);
    h.store.open_steps = 0;
    h.until([&] { return h.server->sessions() == 0; });
    EXPECT_FALSE(s.holds(17));
  }
}

TEST(Resume, TheClientGetsItsSessionBack) {
  Left left;
  const int doorbell = ::dup(left.doorbell.get());
  Successor s({&left});
  Harness& h = s.harness;
  {
    Client client = h.connect();
    Sink::Seen seen;
    ASSERT_EQ(s.resume(client, seen), Errc::ok);
    auto& response = KJ_ASSERT_NONNULL(s.kept_response);
    EXPECT_EQ(response.getInfo().getSession(), 17u);
    EXPECT_EQ(response.getInfo().getDaemonInstance(), 0x1234u);
    EXPECT_EQ(response.getInfo().getTenantName(), ("uid-" + std::to_string(::getuid())).c_str());
    h.until([&] { return h.store.count("mapped") == 1; });
    auto segment = h.wait(send(response.getSession().segmentRequest()));
    EXPECT_TRUE(h.wait(segment.getMemory().getFd()) != nullptr);
    auto bell = h.wait(send(response.getSession().doorbellRequest()));
    const std::uint64_t one = 1;
    const auto before = h.store.count("drain_commands");
    ASSERT_EQ(::write(KJ_ASSERT_NONNULL(h.wait(bell.getMemory().getFd())), &one, sizeof(one)), 8);
    h.until([&] { return h.store.count("drain_commands") > before; });
    EXPECT_TRUE(h.logged("event=session_resumed session=17"));
    EXPECT_TRUE(s.holds(17));
    s.kept_response = nullptr;
  }
  // From here on it is a session like any other: its connection's end is its end.
  h.until([&] { return h.server->sessions() == 0; });
  EXPECT_EQ(h.store.count("disconnect"), 1u);
  EXPECT_FALSE(s.holds(17));
  ::close(doorbell);
}

TEST(Resume, AResumedSessionIsNotWaitedForAnyMore) {
  Left left;
  RpcOptions options;
  options.reconnect_ms = 50;
  Successor s({&left}, std::move(options));
  Harness& h = s.harness;
  Client client = h.connect();
  Sink::Seen seen;
  ASSERT_EQ(s.resume(client, seen), Errc::ok);
  const auto start = h.loop.now_ms();
  h.until([&] { return h.loop.now_ms() > start + 150; });
  EXPECT_EQ(h.store.count("disconnect"), 0u);
}

TEST(Resume, WhoCannotProveThatTheSessionIsItsIsRefusedAndChangesNothing) {
  Idler other;
  Left mine, of_another_process, of_another_user;
  of_another_process.record.id = SessionId{18};
  of_another_process.belong_to(other);
  of_another_user.record.id = SessionId{19};
  of_another_user.record.uid = ::getuid() + 1;
  Successor s({&mine, &of_another_process, &of_another_user});
  Harness& h = s.harness;
  Client client = h.connect();
  Sink::Seen seen;
  EXPECT_EQ(s.resume(client, seen, 16), Errc::stale_id);
  EXPECT_EQ(s.resume(client, seen, 18), Errc::permission_denied);
  EXPECT_EQ(s.resume(client, seen, 19), Errc::permission_denied);
  EXPECT_EQ(h.store.count("resume_session"), 0u);  // the store was not asked at all
  EXPECT_EQ(s.resume(client, seen, 17, [](auto r) { r.initResumeToken(16); }), Errc::permission_denied);
  EXPECT_EQ(s.resume(client, seen, 17, [](auto r) { r.initResumeToken(15); }), Errc::permission_denied);
  EXPECT_EQ(s.resume(client, seen, 17, [](auto r) { r.setContractVersion(kContractVersion + 1); }),
            Errc::version_mismatch);
  h.store.resume_error = {Errc::wrong_layout, 0, "the model is another"};
  EXPECT_EQ(s.resume(client, seen), Errc::wrong_layout);
  let_ticks_pass(h);
  EXPECT_EQ(seen.maps, 0u);  // what the store said before it refused was not passed on
  EXPECT_EQ(h.store.count("disconnect"), 0u);
  EXPECT_EQ(h.server->sessions(), 3u);
  EXPECT_TRUE(h.logged("event=resume_refused session=18"));
  h.store.resume_error = {};
  EXPECT_EQ(s.resume(client, seen), Errc::ok);
}

TEST(Resume, AUserWhoseTenantIsAnotherNowIsRefused) {
  Left left;
  RpcOptions options;
  options.rules.push_back({TenantId{2}, {::getuid()}, {}});
  Successor s({&left}, std::move(options));
  s.harness.store.add_tenant({.name = "moved"});
  Client client = s.harness.connect();
  Sink::Seen seen;
  EXPECT_EQ(s.resume(client, seen), Errc::permission_denied);
}

TEST(Resume, OnlyTheFirstOfTwoAttemptsGetsIt) {
  Left left;
  Successor s({&left});
  Harness& h = s.harness;
  Client one = h.connect(), two = h.connect();
  Sink::Seen seen;
  auto first = send(s.resume_request(one, seen)), second = send(s.resume_request(two, seen));
  auto answer_one = h.wait(kj::mv(first)), answer_two = h.wait(kj::mv(second));
  const Errc codes[] = {static_cast<Errc>(answer_one.getStatus().getCode()),
                        static_cast<Errc>(answer_two.getStatus().getCode())};
  EXPECT_EQ(std::count(std::begin(codes), std::end(codes), Errc::ok), 1);
  EXPECT_EQ(std::count(std::begin(codes), std::end(codes), Errc::stale_id), 1);
  EXPECT_EQ(s.resume(two, seen), Errc::stale_id);
  EXPECT_EQ(h.store.count("resume_session"), 1u);
}

TEST(Resume, ANumberThatIsUsedAgainIsNoProof) {
  Idler before, now;
  struct statfs system {};
  ASSERT_EQ(::fstatfs(now.pidfd, &system), 0);
  const bool kernel_tells_processes_apart = system.f_type == 0x50494446;
  EXPECT_EQ(same_living_process(before.pidfd, 7, now.pidfd, 7), !kernel_tells_processes_apart);
  EXPECT_TRUE(same_living_process(now.pidfd, 7, now.pidfd, 7));
  EXPECT_FALSE(same_living_process(now.pidfd, 7, now.pidfd, 8));
  now.end();
  EXPECT_FALSE(same_living_process(now.pidfd, 7, now.pidfd, 7));
}

TEST(Keeping, ASessionIsKeptBeforeItsClientKnowsItAndForgottenAtItsEnd) {
  Successor s({});
  Harness& h = s.harness;
  {
    Client client = h.connect();
    Sink::Seen seen;
    auto response = h.register_model(client, seen);
    EXPECT_TRUE(s.holds(response.getInfo().getSession()));
    EXPECT_EQ(s.holder.names.size(), 3u);
  }
  h.until([&] { return h.server->sessions() == 0; });
  EXPECT_TRUE(s.holder.names.empty());
}

TEST(Keeping, WhatNoRecordNamesIsForgotten) {
  Left left, stranger;
  Kept more;
  more["kvq-pid-99"] = std::move(stranger.pidfd);
  more["kvq-notice-99"] = std::move(stranger.notice);
  more["kvq-slab-1"] = std::move(stranger.doorbell);  // the store's
  Successor s({&left}, {}, std::move(more));
  EXPECT_TRUE(s.holds(17));
  EXPECT_FALSE(s.holds(99));
  EXPECT_EQ(s.holder.names.count("kvq-slab-1"), 1u);
  EXPECT_EQ(s.kept.size(), 1u);
}

TEST(Leaving, SessionsAreLeftToTheNextDaemon) {
  Left left;
  Successor s({&left});
  Harness& h = s.harness;
  Client client = h.connect();
  Sink::Seen seen;
  auto response = h.register_model(client, seen);
  const auto id = response.getInfo().getSession();
  h.store.room = false;
  auto request = response.getSession().creditsRequest();
  request.setDeadlineMs(kPatienceMs);
  auto waiting = send(kj::mv(request));
  h.until([&] { return h.store.count("request_credits") >= 2; });
  h.server->leave();
  {
    auto late = client.node.registerRequest();
    fill(late.initRequest(), kj::heap<Sink>(seen));
    EXPECT_EQ(static_cast<Errc>(h.wait(send(kj::mv(late))).getStatus().getCode()), Errc::draining);
  }
  h.server.reset();
  EXPECT_ANY_THROW(h.wait(kj::mv(waiting)));
  EXPECT_EQ(h.store.count("disconnect"), 0u);
  EXPECT_EQ(h.store.count("process_ended"), 0u);
  EXPECT_TRUE(s.holds(17));
  EXPECT_TRUE(s.holds(id));
}

}  // namespace
}  // namespace kvq

// What an operator sees of sessions and may do to them: hung ones, evictions, verification; and lost pages.
#include <nlohmann/json.hpp>

#include "tests/rpc/adopted.h"
#include "tools/kvqctl/tables.h"

namespace kvq {
namespace {

using namespace kvq::testing;
using kvqctl::Json;

// The test's own user is the operator, root or not.
RpcOptions own_uid() {
  RpcOptions options;
  options.admin_uids = {::getuid()};
  return options;
}

wire::Admin::Client admin_of(Harness& h, Client& client) {
  auto response = h.wait(send(client.node.adminRequest()));
  EXPECT_EQ(response.getStatus().getCode(), 0) << response.getStatus().getMessage().cStr();
  return response.getAdmin();
}

struct Outcome {
  Errc code;
  std::string message;
  Json document;
};

template <typename Response>
Outcome outcome_of(const Response& response) {
  const auto status = response.getStatus();
  return {static_cast<Errc>(status.getCode()), status.getMessage().cStr(),
          response.hasJson() ? Json::parse(response.getJson().cStr()) : Json()};
}

Outcome evict(Harness& h, wire::Admin::Client admin, std::uint32_t session, bool kill) {
  auto request = admin.evictSessionRequest();
  request.setSession(session);
  request.setKill(kill);
  return outcome_of(h.wait(send(kj::mv(request))));
}

auto verify(wire::Admin::Client admin, const std::string& tenant, std::uint32_t deadline_ms) {
  auto request = admin.verifyRequest();
  request.setTenant(tenant);
  request.setDeadlineMs(deadline_ms);
  return send(kj::mv(request));
}

TEST(Sessions, AHungOneIsSeenAtFirstSight) {
  RpcOptions options = own_uid();
  options.step_deadline_ms = 2000;
  Left left;
  Successor s({&left}, std::move(options));
  Harness& h = s.harness;
  Client client = h.connect();
  auto admin = admin_of(h, client);
  const auto document = [&] { return Json::parse(h.wait(send(admin.sessionsRequest())).getJson().cStr()); };
  h.store.open_steps = 1;
  h.store.oldest_step_ms = 2000;
  EXPECT_EQ(document()["sessions"][0]["hung"], false);
  EXPECT_EQ(kvqctl::show_sessions(document()).find('!'), std::string::npos);
  h.store.oldest_step_ms = 2001;
  const Json hung = document();
  EXPECT_EQ(hung["sessions"][0]["hung"], true);
  EXPECT_EQ(hung["sessions"][0]["oldest_step_ms"], 2001);
  EXPECT_EQ(hung["sessions"][0]["waits_for_client"], true);
  for (const char* key : {"evicted", "limbo_bytes", "lost_pages"})
    EXPECT_TRUE(hung["sessions"][0].contains(key)) << key;
  const std::string table = kvqctl::show_sessions(hung);
  for (const char* text : {"\n!       17", "2001 ms", "waiting", "longer than 2.0 s", "evict-session ends it (17)"}) {
    EXPECT_NE(table.find(text), std::string::npos) << text << " in\n" << table;
  }
}

TEST(Status, ShowsVerificationAndAdoption) {
  Harness h(own_uid());
  Client client = h.connect();
  auto admin = admin_of(h, client);
  h.store.verifying = {
      .pages_total = 200, .pages_done = 50, .pages_bad = 1, .passes = 2, .pages_bad_ever = 3, .running = true};
  h.store.adopt_report = {.adopted = true, .sessions = 4, .sequences = 5, .slabs = 6, .pages = 7, .undone_bytes = 8};
  const auto document = [&] { return Json::parse(h.wait(send(admin.statusRequest())).getJson().cStr()); };
  const Json status = document();
  EXPECT_EQ(status["instance"], "0000000000001234");
  EXPECT_EQ(status["verify"]["pages_done"], 50);
  EXPECT_EQ(status["adopt"]["undone_bytes"], 8);
  EXPECT_NE(kvqctl::show_status(status).find("50 of 200 pages compared (25 %), 1 bad"), std::string::npos);
  EXPECT_NE(kvqctl::show_status(status).find("4 sessions, 5 sequences, 7 pages in 6 slabs; 8 bytes undone"),
            std::string::npos);
  h.store.verifying.running = false;
  h.store.adopt_report = {.refused = "kvq-root has format 9"};
  EXPECT_NE(kvqctl::show_status(document()).find("last pass: 50 pages, 1 bad; 3 bad since start"), std::string::npos);
  EXPECT_NE(kvqctl::show_status(document()).find("refused, started clean: kvq-root has format 9"), std::string::npos);
}

TEST(Evict, EndsTheSessionAndItsConnection) {
  Harness h(own_uid());
  h.store.open_steps = 1;
  Client victim = h.connect(), client = h.connect();
  Sink::Seen seen;
  auto response = h.register_model(victim, seen);
  auto admin = admin_of(h, client);
  const auto id = response.getInfo().getSession();
  const Outcome outcome = evict(h, admin, id, /*kill=*/false);
  EXPECT_EQ(outcome.code, Errc::ok) << outcome.message;
  EXPECT_EQ(outcome.document["pid"], ::getpid());
  EXPECT_EQ(outcome.document["killed"], false);
  h.wait(victim.rpc.onDisconnect());
  EXPECT_EQ(h.store.count("evict"), 1u);
  EXPECT_EQ(h.store.count("disconnect"), 1u);
  EXPECT_EQ(h.server->connections(), 1u);  // the operator's
  EXPECT_TRUE(h.logged("event=session_evicted session=" + std::to_string(id)));
  EXPECT_EQ(h.store.count("process_ended"), 0u);         // its step is open still
  EXPECT_EQ(evict(h, admin, id, false).code, Errc::ok);  // an operator may say it twice
  h.store.open_steps = 0;
  h.until([&] { return h.server->sessions() == 0; });
  EXPECT_EQ(evict(h, admin, id, false).code, Errc::stale_id);
}

TEST(Evict, NamesASessionThatDoesNotExist) {
  Harness h(own_uid());
  Client client = h.connect();
  const Outcome outcome = evict(h, admin_of(h, client), 99, /*kill=*/true);
  EXPECT_EQ(outcome.code, Errc::stale_id);
  EXPECT_NE(outcome.message.find("no session 99"), std::string::npos) << outcome.message;
  EXPECT_FALSE(h.logged("session_evicted"));
}

TEST(Evict, AWaitingSessionCannotBeTakenUpAfterIt) {
  Left left;
  Successor s({&left}, own_uid());
  Harness& h = s.harness;
  h.store.open_steps = 1;
  Client client = h.connect();
  EXPECT_EQ(evict(h, admin_of(h, client), 17, false).code, Errc::ok);
  EXPECT_EQ(h.store.count("disconnect"), 1u);
  Sink::Seen seen;
  EXPECT_EQ(s.resume(client, seen), Errc::stale_id);
}

TEST(Evict, KillsItsProcessWhenAsked) {
  Idler process;
  Left left;
  left.belong_to(process);
  Successor s({&left}, own_uid());
  Harness& h = s.harness;
  h.store.open_steps = 1;
  Client client = h.connect();
  const Outcome outcome = evict(h, admin_of(h, client), 17, /*kill=*/true);
  EXPECT_EQ(outcome.code, Errc::ok) << outcome.message;
  EXPECT_EQ(outcome.document["killed"], true);
  int status = 0;
  h.until([&] { return ::waitpid(process.pid, &status, WNOHANG) == process.pid; });
  process.pid = -1;
  EXPECT_EQ(WTERMSIG(status), SIGKILL);
  h.until([&] { return h.server->sessions() == 0; });
  EXPECT_EQ(h.store.count("process_ended"), 1u);
}

// In a process of its own, since it gives up root. Its victim is the first process, which nobody but root may kill.
char evict_what_may_not_be_killed() {
  if (::getuid() == 0 && ::setresuid(4242, 4242, 4242) != 0) return 's';
  if (::getuid() == 0) return 's';
  Left left;
  left.record.pid = 1;
  left.record.uid = 0;
  left.pidfd = Descriptor(static_cast<int>(::syscall(SYS_pidfd_open, 1, 0)));
  Successor s({&left}, own_uid());
  s.harness.store.open_steps = 1;
  Client client = s.harness.connect();
  const Outcome outcome = evict(s.harness, admin_of(s.harness, client), 17, /*kill=*/true);
  const bool named = outcome.message.find("may not kill process 1 of uid 0") != std::string::npos &&
                     outcome.message.find("kill -9 1") != std::string::npos;
  return outcome.code == Errc::permission_denied && named && outcome.document["killed"] == false &&
                 s.harness.store.count("evict") == 1 && s.harness.store.count("disconnect") == 1
             ? 'y'
             : 'n';
}

TEST(Evict, StandsWhenTheProcessMayNotBeKilled) {
  const pid_t pid = ::fork();
  if (pid == 0) ::_exit(evict_what_may_not_be_killed());
  int status = 0;
  ASSERT_EQ(::waitpid(pid, &status, 0), pid);
  EXPECT_EQ(WEXITSTATUS(status), 'y');
}

TEST(Verify, AnswersWhenThePassHasEnded) {
  Harness h(own_uid());
  h.store.add_tenant({.name = "alpha"});
  Client client = h.connect();
  auto waiting = verify(admin_of(h, client), "alpha", kPatienceMs);
  h.until([&] { return h.store.count("verify 1") == 1; });
  const auto before = h.store.ticks;
  h.until([&] { return h.store.ticks > before + 3; });  // without a session, too
  EXPECT_FALSE(waiting.poll(h.io.waitScope));
  h.store.verifying = {.pages_total = 9, .pages_done = 9, .pages_bad = 2, .running = false};
  const Outcome outcome = outcome_of(h.wait(kj::mv(waiting)));
  EXPECT_EQ(outcome.code, Errc::ok);
  EXPECT_EQ(outcome.document["finished"], true);
  EXPECT_EQ(outcome.document["pages"], 9);
  EXPECT_EQ(outcome.document["bad"], 2);
  EXPECT_EQ(kvqctl::show_verify(outcome.document), "verified 9 of 9 pages: 2 bad\n");
}

TEST(Verify, AnswersAtItsDeadline) {
  Harness h(own_uid());
  Client client = h.connect();
  auto admin = admin_of(h, client);
  const auto start = h.loop.now_ms();
  const Outcome outcome = outcome_of(h.wait(verify(admin, "", 50)));
  EXPECT_GE(h.loop.now_ms() - start, 49u);
  EXPECT_EQ(outcome.document["finished"], false);
  EXPECT_EQ(h.store.count("verify"), 1u);
  const auto ticks = h.store.ticks;
  h.io.provider->getTimer().afterDelay(100 * kj::MILLISECONDS).wait(h.io.waitScope);
  EXPECT_EQ(h.store.ticks, ticks);  // nobody waits any more: asleep again
}

TEST(Verify, UnknownTenantsAndTooManyCallsAreRefused) {
  Harness h(own_uid());
  Client client = h.connect();
  auto admin = admin_of(h, client);
  EXPECT_EQ(outcome_of(h.wait(verify(admin, "beta", 1))).code, Errc::invalid_argument);
  EXPECT_EQ(h.store.count("verify"), 0u);
  std::vector<kj::Promise<capnp::Response<wire::Admin::VerifyResults>>> waiting;
  for (int i = 0; i < 16; ++i) waiting.push_back(verify(admin, "", kPatienceMs));
  EXPECT_EQ(outcome_of(h.wait(verify(admin, "", kPatienceMs))).code, Errc::limit_reached);
  waiting.clear();  // callers that go make room
  h.until([&] { return outcome_of(h.wait(verify(admin, "", 1))).code == Errc::ok; });
}

TEST(LostPages, AreTheOnesAfterTheCountThatTheClientKnows) {
  Harness h;
  Client client = h.connect();
  Sink::Seen seen;
  auto response = h.register_model(client, seen);
  h.store.lost = {{PageId{5}, SequenceId{1}}, {PageId{6}, SequenceId{2}}};
  auto request = response.getSession().lostPagesRequest();
  request.setSince(1);
  auto lost = h.wait(send(kj::mv(request)));
  EXPECT_EQ(lost.getStatus().getCode(), 0);
  EXPECT_EQ(lost.getNow(), 2u);
  ASSERT_EQ(lost.getPages().size(), 1u);
  ASSERT_EQ(lost.getSequences().size(), 1u);
  EXPECT_EQ(lost.getPages()[0], 6u);
  EXPECT_EQ(lost.getSequences()[0], 2u);
}

}  // namespace
}  // namespace kvq

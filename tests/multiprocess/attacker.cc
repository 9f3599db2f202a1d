// Peers that do their worst: each way of attacking is a role that goes on until it is killed.
//
// Invariant: an attacker is another user than its victim, with a low priority, so that what its victim notices is
// kvqd's doing and not the scheduler's. That kvqd cuts it is expected and starts its next round.
#include <capnp/any.h>
#include <capnp/rpc.capnp.h>
#include <capnp/serialize.h>
#include <fcntl.h>
#include <grp.h>
#include <poll.h>
#include <sys/mman.h>
#include <sys/socket.h>
#include <sys/un.h>
#include <unistd.h>

#include <atomic>
#include <cstring>
#include <deque>
#include <map>
#include <random>
#include <thread>

#include "kvq/protocol.capnp.h"
#include "kvq/segment.h"
#include "tests/multiprocess/relay.h"
#include "tests/support/raw_session.h"
#include "tests/support/role_process.h"
#include "tests/support/tiny_model.h"

namespace kvq::test {
namespace {

using Random = std::mt19937_64;

template <std::size_t N>
std::array<std::uint8_t, N> random_bytes(Random& random) {
  std::array<std::uint8_t, N> out;
  for (auto& b : out) b = static_cast<std::uint8_t>(random());
  return out;
}

// A registered session and its segment.
struct Foothold {
  explicit Foothold(const std::string& socket, bool answers = true) : raw(socket, answers) {
    if (raw.register_model(kContractVersion, nullptr) != 0) throw std::runtime_error("refused");
    const int fd = raw.descriptor("segment");
    void* at = ::mmap(nullptr, kSegmentBytes, PROT_READ | PROT_WRITE, MAP_SHARED, fd, 0);
    if (at == MAP_FAILED) throw std::runtime_error("no segment");
    segment = static_cast<Segment*>(at);
    doorbell = raw.descriptor("doorbell");
  }
  ~Foothold() { ::munmap(segment, kSegmentBytes); }
  void ring() const {
    const std::uint64_t one = 1;
    [[maybe_unused]] const ssize_t written = ::write(doorbell, &one, sizeof(one));
  }
  RawSession raw;
  Segment* segment = nullptr;
  int doorbell = -1;
};

// Random bytes over the whole segment while its session makes calls.
void scribble(const std::string& socket, Random& random) {
  Foothold foothold(socket);
  std::atomic<bool> stop{false};
  std::thread writer([&, seed = random()] {
    Random own(seed);
    auto* words = reinterpret_cast<std::atomic<std::uint64_t>*>(foothold.segment);
    while (!stop.load()) {
      const std::uint64_t value = own() % 4 == 0 ? own() % 64 : own();
      words[own() % (kSegmentBytes / 8)].store(value, std::memory_order_relaxed);
    }
  });
  for (int call = 0; call < 10; ++call) {
    foothold.raw.credits(static_cast<std::uint32_t>(random() % 64), 5);
    foothold.raw.attach(static_cast<std::uint32_t>(1 + random() % 9), static_cast<std::uint32_t>(random() % 200), 0, 1,
                        random_bytes<32>(random));
    foothold.ring();
  }
  stop = true;
  writer.join();
}

// Commands, attaches and resumes that name everybody's sequences, pages and sessions.
void claim(const std::string& socket, Random& random) {
  Foothold foothold(socket);
  auto& ring = foothold.segment->commands;
  std::uint64_t produced = ring.produced.load();
  for (int round = 0; round < 2; ++round) {
    for (int i = 0; i < 200; ++i) {
      Command& c = ring.item[produced % kCommandSlots];
      c = {};
      c.kind = static_cast<CommandKind>(random() % 12);
      c.flags = static_cast<std::uint16_t>(random() % 4);
      c.sequence = SequenceId{static_cast<std::uint32_t>(random() % 50)};
      c.page = PageId{static_cast<std::uint32_t>(random() % 400)};
      c.generation = static_cast<std::uint16_t>(random() % 3);
      c.index = static_cast<std::uint32_t>(random() % 10);
      c.argument = static_cast<std::uint32_t>(random() % 50);
      c.serial = random() % 3;
      ring.produced.store(++produced, std::memory_order_release);
    }
    foothold.ring();
    foothold.raw.credits(1, 5);
    for (std::uint32_t page = 1; page < 20; ++page) {
      foothold.raw.attach(static_cast<std::uint32_t>(60 + page), page, static_cast<std::uint16_t>(random() % 3), 1,
                          random_bytes<32>(random));
    }
    RawSession thief(socket);
    std::array<std::uint8_t, 16> own;
    std::memcpy(own.data(), foothold.segment->header.token, 16);
    for (std::uint32_t id = 0; id < 8; ++id) {
      if (thief.resume_session(id, random() % 2 == 0 ? own : random_bytes<16>(random)) == 0 && id != 0) {
        throw std::logic_error("took up session " + std::to_string(id));
      }
    }
  }
}

// Maps nothing, ends no step, fills the eventfds and makes writing to them wait.
void keep_silent(const std::string& socket, Random&) {
  std::deque<Foothold> footholds;
  for (int i = 0; i < 6; ++i) {
    Foothold& f = footholds.emplace_back(socket, /*answers=*/i % 2 == 0);
    for (auto& slot : f.segment->step) {
      slot.epoch = 1;
      slot.begun = 1;
    }
    for (const char* name : {"doorbell", "notice"}) {
      const int fd = f.raw.descriptor(name);
      ::fcntl(fd, F_SETFL, 0);
      const std::uint64_t full = ~std::uint64_t{1};
      ::fcntl(fd, F_SETFL, O_NONBLOCK);
      [[maybe_unused]] const ssize_t written = ::write(fd, &full, sizeof(full));
      ::fcntl(fd, F_SETFL, 0);
    }
  }
  std::this_thread::sleep_for(std::chrono::milliseconds(1500));
}

std::string nested(Random& random) {
  capnp::MallocMessageBuilder message;
  auto call = message.initRoot<capnp::rpc::Message>().initCall();
  call.initTarget().initPromisedAnswer();
  call.setInterfaceId(capnp::typeId<wire::Node>());
  capnp::AnyPointer::Builder at = call.initParams().getContent();
  for (std::uint64_t depth = 100 + random() % 3000; depth > 0; --depth) {
    at = at.initAsAnyStruct(0, 1).getPointerSection()[0];
  }
  const auto words = capnp::messageToFlatArray(message);
  return {reinterpret_cast<const char*>(words.begin()), words.size() * sizeof(capnp::word)};
}

std::string mutation(const std::vector<std::string>& recorded, Random& random) {
  std::string out;
  const auto piece = [&] { return recorded[random() % recorded.size()]; };
  switch (random() % 7) {
    case 0:  // replayed whole
      for (const std::string& m : recorded) out += m;
      return out;
    case 1:  // truncated
      for (const std::string& m : recorded) out += m;
      return out.substr(0, random() % out.size());
    case 2:  // some bytes changed
      for (const std::string& m : recorded) out += m;
      for (int i = 0; i < 8; ++i) out[random() % out.size()] = static_cast<char>(random());
      return out;
    case 3: {  // huge, by its header
      const std::uint32_t header[] = {static_cast<std::uint32_t>(random() % 2 == 0 ? 0 : random()), 0x7fff'ffff};
      return std::string(reinterpret_cast<const char*>(header), sizeof(header)) + piece();
    }
    case 4:
      return recorded.front() + nested(random);
    case 5:  // out of order, many times
      for (int i = 0; i < 100; ++i) out += piece();
      return out;
    default:
      for (int i = 0; i < 200; ++i) out += static_cast<char>(random());
      return out;
  }
}

// What libkvq sent once, in every wrong way.
void babble(const std::string& socket, Random& random) {
  static const std::vector<std::string> recorded = record(socket);
  std::deque<RawSocket> open;
  for (int i = 0; i < 40; ++i) {
    RawSocket& peer = open.emplace_back(socket);
    peer.send(mutation(recorded, random));
    if (random() % 2 == 0) peer.take_replies();
    if (open.size() > 8) open.pop_front();
  }
  RawSession other(socket);
  other.register_model(kContractVersion + 1 + static_cast<std::uint32_t>(random() % 9), nullptr);
}

void connect_often(const std::string& socket, Random&) {
  std::deque<RawSocket> open;
  for (int i = 0; i < 2000; ++i) {
    open.emplace_back(socket);
    if (open.size() > 300) open.pop_front();
  }
}

void send_descriptors(const std::string& socket, Random& random) {
  static const std::vector<std::string> recorded = record(socket);
  static const int null = ::open("/dev/null", O_RDWR | O_CLOEXEC);
  RawSocket peer(socket);
  for (int i = 0; i < 20; ++i) {
    if (!peer.send(recorded[static_cast<std::size_t>(i) % recorded.size()], std::vector<int>(250, null))) return;
    if (random() % 4 == 0) peer.take_replies();
  }
}

const std::map<std::string, void (*)(const std::string&, Random&)>& attacks() {
  static const std::map<std::string, void (*)(const std::string&, Random&)> all = {
      {"scribbles", scribble}, {"claims", claim},           {"keeps_silent", keep_silent},
      {"babbles", babble},     {"connects", connect_often}, {"sends_descriptors", send_descriptors}};
  return all;
}

void become_nobody() {
  if (::setgroups(0, nullptr) != 0 || ::setgid(65534) != 0 || ::setuid(65534) != 0) throw std::logic_error("setuid");
  [[maybe_unused]] const int nice_now = ::nice(10);
}

// Says how many rounds it made when it is told to end; ends by itself only when it got what it must not get.
KVQ_ROLE(attacker) {
  become_nobody();
  Random random(std::stoull(arguments[2]));
  const auto attack = attacks().at(arguments[1]);
  say("attacking");
  for (std::uint64_t rounds = 1;; ++rounds) {
    try {
      attack(arguments[0], random);
    } catch (const std::logic_error&) {
      throw;
    } catch (const std::exception&) {  // cut, or refused: once more
    }
    pollfd told{0, POLLIN, 0};
    if (::poll(&told, 1, 1) == 0) continue;
    say(std::to_string(rounds));
    return 0;
  }
}

// Comes, registers, writes and goes, so that its tenant exists.
KVQ_ROLE(visitor) {
  become_nobody();
  TinyModel tiny(arguments[0], {});
  Sequence sequence = tiny.model().open({});
  tiny.write(sequence, 0, token_stream(1, 10));
  return 0;
}

// Tries to take up another's session with the token in `arguments[2]`, as nobody or as the same user. Says the codes.
KVQ_ROLE(thief) {
  if (arguments[3] == "nobody") become_nobody();
  const auto session = static_cast<std::uint32_t>(std::stoul(arguments[1]));
  std::array<std::uint8_t, 16> token{};
  for (std::size_t i = 0; i < 16; ++i)
    token[i] = static_cast<std::uint8_t>(std::stoul(arguments[2].substr(2 * i, 2), nullptr, 16));
  say(std::to_string(RawSession(arguments[0]).resume_session(session, token)));
  Random random(1);
  std::string others;
  for (int i = 0; i < 8; ++i) {
    const int code = RawSession(arguments[0]).resume_session(session, random_bytes<16>(random));
    if (code != static_cast<int>(Errc::permission_denied)) others += std::to_string(code) + " ";
  }
  say("others: " + others);
  return 0;
}

}  // namespace
}  // namespace kvq::test

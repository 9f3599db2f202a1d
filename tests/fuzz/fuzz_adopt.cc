// Damaged states of an earlier daemon: any bytes changed in any table, and daemons that die while they take over.
//
// Invariant checked: taking over refuses, or gives a store whose sums hold, which goes on working, and which the daemon
// after it can take over whole.
#include <sys/mman.h>

#include <set>

#include "daemon/shm/memfd.h"
#include "tests/fuzz/input.h"
#include "tests/support/sim_server.h"

namespace kvq::testing {
namespace {

constexpr std::size_t kBlockBytes = 64;  // records are aligned to it, or fit

struct File {
  std::string name;
  std::vector<std::byte> bytes;     // as it was left
  std::vector<std::uint32_t> used;  // blocks that hold something
  Descriptor fd;                    // a copy, for each input anew
  std::byte* copy = nullptr;
};

void find_used(File& file) {
  const std::array<std::byte, kBlockBytes> zero{};
  for (std::size_t at = 0; at + kBlockBytes <= file.bytes.size(); at += kBlockBytes) {
    if (std::memcmp(file.bytes.data() + at, zero.data(), kBlockBytes) != 0) {
      file.used.push_back(static_cast<std::uint32_t>(at / kBlockBytes));
    }
  }
  KVQ_ASSERT(!file.used.empty());
  file.used.push_back(std::min<std::uint32_t>(file.used.back() + 1, file.bytes.size() / kBlockBytes - 1));
}

// One of each kind, for the next daemon to carry out.
void leave_commands(SimServer& s) {
  s.open(5);
  const MagazineItem page = s.take(5, 0, chain_key(5, 0));
  s.seal(5, 0, page, chain_key(5, 0));
  const auto send = [&](CommandKind kind, std::uint32_t sequence, std::uint32_t index, std::uint32_t argument) {
    Command c = s.command(kind, sequence);
    c.index = index;
    c.argument = argument;
    s.send(c);
  };
  send(CommandKind::fork, 6, 1, 5);
  send(CommandKind::truncate, 1, 4, 0);
  send(CommandKind::drop_before, 1, 2, 0);
  send(CommandKind::commit, 3, 16, 0);
  send(CommandKind::park, 4, 0, 0);
  send(CommandKind::release, 6, 0, 0);
  Command back = s.command(CommandKind::return_credit, 0);
  const MagazineItem unused = *s.client.pop();
  back.page = unused.page;
  back.generation = unused.generation;
  s.send(back);
}

// One state with something of everything, made once.
std::vector<File>& left() {
  static std::vector<File> files = [] {
    StoreNode node(6);
    auto client = node.client(node.tenant("a"), 2), other = node.client(node.tenant("b"));
    SimServer s{node, *client};
    KVQ_ASSERT(s.grow(1, 7, 5).size() == 5 && s.grow(2, 8, 3).size() == 3 && s.grow(3, 9, 2).size() == 2);
    s.release(2);
    s.act(CommandKind::fork, 4, 3, 1);
    node.ticks(3);
    node.store->quantize(std::nullopt, 0, false, node.now_ms);
    node.ticks(3);
    KVQ_ASSERT(s.want(3, 10));
    const MagazineItem item = s.take(3, 2, chain_key(9, 2));
    s.seal(3, 2, item, chain_key(9, 2), 5);  // a step that has not ended
    s.drain();
    leave_commands(s);
    std::vector<File> out;
    for (const auto& [name, fd] : node.keeper.held()) {
      const auto bytes = static_cast<std::size_t>(::lseek(fd.get(), 0, SEEK_END));
      File file;
      file.name = name;
      file.bytes.resize(bytes);
      KVQ_ASSERT(::pread(fd.get(), file.bytes.data(), bytes, 0) == static_cast<ssize_t>(bytes));
      find_used(file);
      auto copy = make_memory_file("copy", bytes);
      KVQ_ASSERT(copy);
      file.fd = std::move(*copy);
      file.copy = map_file(file.fd.get(), bytes, /*writable=*/true);
      out.push_back(std::move(file));
    }
    return out;
  }();
  return files;
}

void work(Store& store, std::uint64_t& now_ms) {
  store.check_invariants();
  for (int i = 0; i < 4; ++i) store.tick(++now_ms);
  store.quantize(std::nullopt, 0, false, now_ms);
  store.verify(std::nullopt);
  for (const AdoptedSession& s : store.adopted_sessions()) {
    (void)store.request_credits(s.id, 3);
    (void)store.resume(s.id, SequenceId{4}, now_ms);
    std::uint64_t lost = 0;
    (void)store.lost_pages(s.id, 0, lost);
  }
  (void)store.take_notices();
  for (int i = 0; i < 4; ++i) store.tick(++now_ms);
  store.check_invariants();
}

void end_all(Store& store, std::uint64_t now_ms) {
  for (const SessionStatus& s : store.sessions()) {
    store.tick(++now_ms);
    store.process_ended(s.id, now_ms);
  }
  for (int i = 0; i < 4; ++i) store.tick(++now_ms);
  store.check_invariants();
  KVQ_ASSERT(store.sessions().empty());
}

// Anything in a block that is in use, one in eight times anywhere: other bytes, another count, one bit, another record.
void edit(FuzzInput& in, File& file) {
  const auto block_bytes = [&] { return kBlockBytes * file.used[in.take<std::uint16_t>() % file.used.size()]; };
  const std::size_t at = in.below(8) == 7 ? in.take<std::uint32_t>() % (file.bytes.size() - kBlockBytes)
                                          : block_bytes() + in.below(kBlockBytes) / 2 * 2;
  std::byte* bytes = file.copy + at;
  std::uint16_t word = 0;
  switch (in.below(6)) {
    case 0:
      in.copy(bytes, std::min<std::size_t>(1 + in.below(8), file.bytes.size() - at));
      return;
    case 1:
    case 2:
      std::memcpy(&word, bytes, sizeof(word));
      word = static_cast<std::uint16_t>(word + in.below(5) - 2);
      std::memcpy(bytes, &word, sizeof(word));
      return;
    case 3:
      *bytes ^= static_cast<std::byte>(1u << in.below(8));
      return;
    case 4:
      std::memcpy(file.copy + at / kBlockBytes * kBlockBytes, file.bytes.data() + block_bytes(), kBlockBytes);
      return;
    default:
      word = static_cast<std::uint16_t>(in.below(20));
      std::memcpy(bytes, &word, sizeof(word));
  }
}

std::unique_ptr<Store> take_over(Device& device, MapKeeper& keeper, std::uint64_t now_ms, std::string& why) {
  Kept kept = keeper.hand_over();
  why.clear();
  auto adopted = Store::adopt(
      StoreNode::small(), device, [](const SlabNotice&) {}, [](const std::string&) {}, keeper, kept, why, now_ms);
  // Without a root record there was no state: nothing to say.
  KVQ_ASSERT(adopted ? why.empty() : !why.empty() || adopted.error().code == Errc::stale_id);
  return adopted ? std::move(*adopted) : nullptr;
}

std::unique_ptr<Device> make_device() {
  return make_host_device(6 * StoreNode::kSlabBytes, StoreNode::kSlabBytes, run_inline(), 12 * StoreNode::kSlabBytes);
}

void adopt(FuzzInput& in) {
  MapKeeper keeper;
  for (File& file : left()) {
    std::memcpy(file.copy, file.bytes.data(), file.bytes.size());
    keeper.keep(file.name, file.fd.get());
  }
  executioner = {};
  executioner.countdown = in.below(4);
  if (in.below(16) == 15) keeper.forget(left()[in.below(256) % left().size()].name);
  for (int edits = 0; edits < 6 && !in.done(); ++edits) edit(in, left()[in.below(256) % left().size()]);
  std::uint64_t now_ms = 4000;
  std::string why;
  std::unique_ptr<Device> device = make_device();
  std::unique_ptr<Store> store;
  try {
    store = take_over(*device, keeper, now_ms, why);
  } catch (const Killed&) {
    device = make_device();
    store = take_over(*device, keeper, now_ms, why);
  }
  if (store == nullptr) return;
  executioner.countdown = 0;
  work(*store, now_ms);
  store.reset();
  device = make_device();
  store = take_over(*device, keeper, now_ms, why);
  KVQ_ASSERT(store != nullptr);
  work(*store, now_ms);
  end_all(*store, now_ms);
}

}  // namespace
}  // namespace kvq::testing

extern "C" int LLVMFuzzerTestOneInput(const std::uint8_t* data, std::size_t size) {
  ::testing::GTEST_FLAG(break_on_failure) = true;
  kvq::kill_point_hook = kvq::testing::execute;
  kvq::testing::FuzzInput in(data, size);
  kvq::testing::adopt(in);
  return 0;
}

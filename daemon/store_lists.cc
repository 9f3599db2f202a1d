// Sequences and cached chains for operators. The work of a call is bounded: by the number of sequence records, by its
// limit, and by StoreConfig::most_pages_looked page records for each of the walks over pages.
#include "daemon/store_lists.h"

#include <algorithm>
#include <tuple>

#include "daemon/store_state.h"

namespace kvq {
namespace {

std::uint64_t since(std::uint64_t then_ms, std::uint64_t now_ms) { return now_ms - std::min(now_ms, then_ms); }

struct Leaf {
  std::uint64_t idle_ms;
  TenantId tenant;
  PageId page;
};

bool is_before(const Leaf& a, const Leaf& b) {  // the longest unused first
  return std::tie(b.idle_ms, a.tenant, a.page) < std::tie(a.idle_ms, b.tenant, b.page);
}

Leaf leaf_of(TenantId tenant, const PageTable& pages, PageId page, std::uint64_t now_ms) {
  const bool in_use = pages.use(page).running > 0;
  return {in_use ? 0 : since(pages.record(page).last_use_ms, now_ms), tenant, page};
}

// Leaves that nobody holds lie in a list of their own, in this order.
void add_droppable(TenantId tenant, const PageTable& pages, std::uint32_t limit, std::uint64_t now_ms,
                   std::vector<Leaf>& leaves) {
  PageId page = pages.first_victim(VictimList::cached);
  for (std::uint32_t n = 0; n < limit && page != kNullPage; ++n) {
    leaves.push_back(leaf_of(tenant, pages, page, now_ms));
    page = pages.next_victim(VictimList::cached, page);
  }
}

// Those that are held lie anywhere: looks at the table until it has seen `indexed` pages of the index or at `budget`
// records, and returns whether those were all.
bool add_held(TenantId tenant, const PageTable& pages, std::uint32_t indexed, std::uint64_t now_ms,
              std::uint32_t& budget, std::vector<Leaf>& leaves) {
  for (std::uint32_t i = 1; i < pages.capacity() && indexed > 0 && budget > 0; ++i, --budget) {
    const PageId page{i};
    if ((pages.record(page).flags & kPageIndexed) == 0) continue;
    --indexed;
    if (pages.use(page).children == 0 && !pages.droppable(page)) leaves.push_back(leaf_of(tenant, pages, page, now_ms));
  }
  return indexed == 0;
}

}  // namespace

void StoreState::count_page(const Tenant& t, PageId page, FormatUse (&format)[kFormatCount]) const {
  const PageRecord& r = t.pages->record(page);
  FormatUse& use = format[static_cast<std::size_t>(r.format)];
  ++use.pages;
  use.bytes += layouts_->layout(r.model, r.format).page_bytes;
}

SequenceStatus StoreState::status_of(const SequenceRecord& r, SequenceIndex sequence, std::uint64_t now_ms) const {
  const Tenant& t = tenant_of(r.tenant);
  SequenceStatus out;
  out.session = r.session;
  out.tenant = r.tenant;
  out.sequence = r.id;
  out.running = (r.flags & kSequenceRunning) != 0;
  out.pages = r.pages - r.first_kept;
  out.tokens = r.tokens;
  out.idle_ms = since(r.last_use_ms, now_ms);
  for (std::uint32_t i = r.first_kept; i < r.pages; ++i) {
    const PageId page = sequences_->page(sequence, i);
    count_page(t, page, out.format);
    out.shared_pages += t.pages->use(page).references > 1 ? 1 : 0;
    out.lost_pages += t.pages->record(page).state == PageState::lost ? 1 : 0;
  }
  return out;
}

SequenceList StoreState::sequences(std::optional<TenantId> tenant, SessionId session, std::uint32_t limit,
                                   std::uint64_t now_ms) const {
  struct Found {
    std::uint32_t pages;
    SequenceIndex at;
  };
  std::vector<Found> found;
  sequences_->each_live([&](SequenceIndex at, const SequenceRecord& r) {
    if (tenant && r.tenant != *tenant) return;
    if (session != SessionId{} && r.session != session) return;
    found.push_back({r.pages - r.first_kept, at});
  });
  const std::size_t most = std::min<std::size_t>(limit, found.size());
  std::partial_sort(found.begin(), found.begin() + static_cast<std::ptrdiff_t>(most), found.end(),
                    [](const Found& a, const Found& b) { return std::tie(b.pages, a.at) < std::tie(a.pages, b.at); });
  SequenceList out;
  out.total = found.size();
  std::uint64_t looked = 0;
  for (std::size_t i = 0; i < most; ++i) {
    looked += found[i].pages;
    if (i > 0 && looked > config_.most_pages_looked) break;
    out.longest.push_back(status_of(sequences_->record(found[i].at), found[i].at, now_ms));
  }
  return out;
}

PrefixStatus StoreState::prefix(std::optional<TenantId> tenant, std::uint32_t limit, std::uint64_t now_ms) const {
  PrefixStatus out;
  std::vector<Leaf> leaves;
  std::uint32_t budget = config_.most_pages_looked;
  for (const auto& t : tenants_) {
    if (tenant && t->id != *tenant) continue;
    PrefixUse use;
    use.tenant = t->id;
    use.capacity = t->prefix_file.header().buckets;
    for (std::size_t f = 0; f < kFormatCount; ++f) {
      use.indexed[f] = t->pages->indexed()[f];
      use.cached[f] = t->pages->cached()[f];
    }
    out.tenants.push_back(use);
    add_droppable(t->id, *t->pages, limit, now_ms, leaves);
    out.complete = add_held(t->id, *t->pages, t->prefix->size(), now_ms, budget, leaves) && out.complete;
  }
  const std::size_t most = std::min<std::size_t>(limit, leaves.size());
  std::partial_sort(leaves.begin(), leaves.begin() + static_cast<std::ptrdiff_t>(most), leaves.end(), is_before);
  budget = config_.most_pages_looked;
  for (std::size_t i = 0; i < most; ++i) {
    const Tenant& t = tenant_of(leaves[i].tenant);
    const PageId leaf = leaves[i].page;
    ChainStatus chain{.tenant = t.id,
                      .page = leaf,
                      .generation = t.pages->record(leaf).generation,
                      .format = {},
                      .references = t.pages->use(leaf).references,
                      .idle_ms = leaves[i].idle_ms};
    for (PageId page = leaf; page != kNullPage && budget > 0; page = t.pages->record(page).parent, --budget) {
      count_page(t, page, chain.format);
      ++chain.pages;
    }
    if (budget == 0) {
      out.complete = false;
      break;
    }
    out.chains.push_back(chain);
  }
  return out;
}

}  // namespace kvq

// Limbo and ledger: nothing is reaped at or after the oldest open step, and no charge is returned twice.
#include "daemon/core/limbo.h"

#include <gtest/gtest.h>

#include "daemon/core/tenant_ledger.h"

namespace kvq {
namespace {

Retired item(std::uint64_t tag) {
  return {.slot = {}, .page = PageId{static_cast<std::uint32_t>(tag)}, .tag = Epoch{tag}};
}

TEST(Limbo, RetiredSlotWaitsForOldestStep) {
  Limbo limbo;
  for (std::uint64_t tag : {3, 3, 4, 6}) limbo.retire(item(tag));
  std::vector<std::uint32_t> reaped;
  const auto note = [&](const Retired& r) { reaped.push_back(raw(r.page)); };
  EXPECT_EQ(limbo.reap(Epoch{3}, note), 0u);
  EXPECT_EQ(limbo.reap(Epoch{4}, note), 2u);
  EXPECT_EQ(limbo.reap(Epoch{6}, note), 1u);
  EXPECT_EQ(limbo.size(), 1u);
  EXPECT_EQ(limbo.reap(Epoch{7}, note), 1u);
  EXPECT_EQ(reaped, (std::vector<std::uint32_t>{3, 3, 4, 6}));
}

TEST(LimboDeathTest, TagsNeverFall) {
  Limbo limbo;
  limbo.retire(item(4));
  EXPECT_DEATH(limbo.retire(item(3)), "assertion failed");
}

TEST(TenantLedger, ChargeReturnsItselfOnce) {
  TenantLedger ledger;
  ledger.open_account(100);
  {
    auto first = ledger.charge(TenantId{1}, 60, 0);
    ASSERT_TRUE(first);
    TenantLedger::Charge moved = std::move(*first);
    EXPECT_EQ(ledger.account(TenantId{1}).charged_bytes, 60u);
    TenantLedger::Charge target;
    target = std::move(moved);
    EXPECT_EQ(ledger.account(TenantId{1}).charged_bytes, 60u);
  }
  EXPECT_EQ(ledger.account(TenantId{1}).charged_bytes, 0u);
}

TEST(TenantLedger, QuotaHoldsToTheByteAndOverdraftIsExtra) {
  TenantLedger ledger;
  ledger.open_account(100);
  ledger.open_account(0);
  auto all = ledger.charge(TenantId{1}, 100, 0);
  ASSERT_TRUE(all);
  EXPECT_EQ(ledger.charge(TenantId{1}, 1, 0).error().code, Errc::over_quota);
  auto over = ledger.charge(TenantId{1}, 50, 50);
  EXPECT_TRUE(over);
  EXPECT_FALSE(ledger.charge(TenantId{1}, 1, 50));
  EXPECT_TRUE(ledger.charge(TenantId{2}, 1'000'000, 0));  // no quota
}

}  // namespace
}  // namespace kvq

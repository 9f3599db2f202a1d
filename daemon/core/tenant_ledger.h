// The ledger: how many bytes of slabs each tenant is charged, against its quota.
//
// Invariant: the charges of a tenant are the sum of its live Charge tokens. A token returns its bytes when it is
// destroyed and can be moved but not copied, so nothing is returned twice or forgotten.
#pragma once

#include <cstdint>
#include <deque>
#include <utility>

#include "kvq/result.h"
#include "kvq/types.h"

namespace kvq {

class TenantLedger {
 public:
  struct Account {
    std::uint64_t quota_bytes = 0;  // 0: no bound but the arena
    std::uint64_t charged_bytes = 0;
  };

  class Charge {
   public:
    Charge() = default;
    Charge(Charge&& other) noexcept
        : account_(std::exchange(other.account_, nullptr)), bytes_(std::exchange(other.bytes_, 0)) {}
    Charge& operator=(Charge&& other) noexcept {
      if (this != &other) {
        give_back();
        account_ = std::exchange(other.account_, nullptr);
        bytes_ = std::exchange(other.bytes_, 0);
      }
      return *this;
    }
    ~Charge() { give_back(); }
    void give_back() {
      if (account_ == nullptr) return;
      KVQ_ASSERT(account_->charged_bytes >= bytes_);
      account_->charged_bytes -= bytes_;
      account_ = nullptr;
      bytes_ = 0;
    }
    std::uint64_t bytes() const { return bytes_; }

   private:
    friend class TenantLedger;
    Charge(Account* account, std::uint64_t bytes) : account_(account), bytes_(bytes) {}
    Account* account_ = nullptr;  // owned by the ledger, which outlives its charges
    std::uint64_t bytes_ = 0;
  };

  // Accounts are numbered from 1, as tenants are.
  void open_account(std::uint64_t quota_bytes) { accounts_.push_back({quota_bytes, 0}); }
  const Account& account(TenantId tenant) const { return accounts_.at(raw(tenant) - 1); }
  void set_quota(TenantId tenant, std::uint64_t quota_bytes) {
    accounts_.at(raw(tenant) - 1).quota_bytes = quota_bytes;
  }

  // `overdraft_bytes`: how far beyond the quota this charge may go. Only transcodes have one, since they make room.
  Result<Charge> charge(TenantId tenant, std::uint64_t bytes, std::uint64_t overdraft_bytes) {
    Account& a = accounts_.at(raw(tenant) - 1);
    if (a.quota_bytes != 0 && a.charged_bytes + bytes > a.quota_bytes + overdraft_bytes) {
      return Error{Errc::over_quota, 0, "the tenant's quota holds no further slab"};
    }
    a.charged_bytes += bytes;
    return Charge(&a, bytes);
  }

 private:
  std::deque<Account> accounts_;  // stable addresses
};

}  // namespace kvq

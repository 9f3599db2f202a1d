// The sites by name, and which scenario's controls take each away.
//
// Invariant: while a site is taken away by no control, this does not compile.
#pragma once

#include <array>

#include "kvq/memory_site.h"

namespace kvq::model {

constexpr const char* name(Site site) {
  switch (site) {
    case Site::plain:
      return "";
    case Site::begin_step:
      return "begin_step";
    case Site::advance_epoch:
      return "advance_epoch";
    case Site::revoke:
      return "revoke";
    case Site::epoch_advanced:
      return "epoch_advanced";
    case Site::step_reopened:
      return "step_reopened";
    case Site::epoch_scanned:
      return "epoch_scanned";
    case Site::step_ended:
      return "step_ended";
    case Site::end_scanned:
      return "end_scanned";
    case Site::end_seen:
      return "end_seen";
    case Site::step_begun:
      return "step_begun";
    case Site::begun_scanned:
      return "begun_scanned";
    case Site::entry_published:
      return "entry_published";
    case Site::entry_loaded:
      return "entry_loaded";
    case Site::item_produced:
      return "item_produced";
    case Site::produced_seen:
      return "produced_seen";
    case Site::item_consumed:
      return "item_consumed";
    case Site::consumed_seen:
      return "consumed_seen";
    case Site::bucket_cleared:
      return "bucket_cleared";
    case Site::bucket_checked:
      return "bucket_checked";
    case Site::bucket_named:
      return "bucket_named";
    case Site::bucket_seen:
      return "bucket_seen";
  }
  return nullptr;
}

inline constexpr std::array kMoveSites = {Site::begin_step,   Site::advance_epoch, Site::epoch_advanced,
                                          Site::step_ended,   Site::end_scanned,   Site::entry_published,
                                          Site::entry_loaded, Site::step_reopened, Site::epoch_scanned};
inline constexpr std::array kDeviceSites = {Site::step_ended, Site::end_scanned, Site::end_seen, Site::step_reopened,
                                            Site::epoch_scanned};
inline constexpr std::array kRevokeSites = {Site::begin_step, Site::revoke};
inline constexpr std::array kSealSites = {Site::step_ended, Site::end_scanned, Site::entry_published,
                                          Site::entry_loaded};
inline constexpr std::array kRingSites = {Site::item_produced, Site::produced_seen, Site::item_consumed,
                                          Site::consumed_seen};
inline constexpr std::array kCreditSites = {Site::begin_step,  Site::advance_epoch, Site::step_ended,
                                            Site::end_scanned, Site::item_produced, Site::produced_seen};
inline constexpr std::array kBucketSites = {Site::bucket_cleared, Site::bucket_checked, Site::bucket_named,
                                            Site::bucket_seen};
inline constexpr std::array kAdoptionSites = {Site::begin_step, Site::advance_epoch, Site::step_ended,
                                              Site::end_scanned};
// Asked for, but not for safety: without them all holds.
inline constexpr std::array kSpareSites = {Site::step_begun, Site::begun_scanned};

constexpr bool each_site_has_a_control() {
  for (int i = 1; i < 64; ++i) {
    const Site site{static_cast<std::uint8_t>(i)};
    bool found = name(site) == nullptr;
    const auto look = [&](const auto& sites) {
      for (Site s : sites) found = found || s == site;
    };
    look(kMoveSites);
    look(kDeviceSites);
    look(kSpareSites);
    look(kRevokeSites);
    look(kRingSites);
    look(kBucketSites);
    if (!found) return false;
  }
  return true;
}
static_assert(each_site_has_a_control());

}  // namespace kvq::model

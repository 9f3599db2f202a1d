// What the scenarios share: the shapes of shared memory made of the model's words, and the two ways a test ends.
//
// Invariant: a test that holds() has seen every run; one that fails() names what it took away and what must go wrong.
#pragma once

#include <gmock/gmock.h>

#include <cstdio>
#include <cstdlib>

#include "kvq/directory.h"
#include "kvq/ring_protocol.h"
#include "kvq/step_protocol.h"
#include "tests/epochs/machine.h"
#include "tests/epochs/site_names.h"

namespace kvq::model {

struct Slot {
  Word epoch{"slot.epoch"}, begun{"slot.begun"}, ended{"slot.ended"};
};

template <typename T, std::uint32_t N>
struct Ring {
  Word produced{"ring.produced"}, consumed{"ring.consumed"};
  Cell<T> item[N];
};

inline std::string site_of(const testing::TestParamInfo<Site>& info) { return name(info.param); }

inline void expect(bool holds, const char* what) { Machine::current().expect(holds, what); }

inline void print(const Report& report) {
  const auto* test = testing::UnitTest::GetInstance()->current_test_info();
  std::printf("%s.%s: %llu executions, %llu states\n", test->test_suite_name(), test->name(),
              static_cast<unsigned long long>(report.executions), static_cast<unsigned long long>(report.states));
}

inline void holds(const Machine::Scenario& scenario, Site off = Site::plain) {
  const Report report = Machine::explore(scenario, off);
  print(report);
  if (!report.failure.empty()) ADD_FAILURE() << report.failure;
}

// `what`: part of the failure that the checker must find. KVQ_EPOCHS_TRACE=1 prints the run that it found.
inline void fails(const char* what, const Machine::Scenario& scenario, Site off = Site::plain) {
  const Report report = Machine::explore(scenario, off);
  if (std::getenv("KVQ_EPOCHS_TRACE") != nullptr) std::printf("%s\n", report.failure.c_str());
  EXPECT_THAT(report.failure, testing::HasSubstr(what)) << "after " << report.executions << " executions";
}

}  // namespace kvq::model

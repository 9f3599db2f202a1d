// A kvqd that dies and comes back: model servers do not notice.
#include <gtest/gtest.h>

#include "tests/support/daemon_process.h"
#include "tests/support/held_daemon.h"
#include "tests/support/tiny_model.h"

namespace kvq::test {
namespace {

TEST(Adoption, SequencesStepsAndCacheSurviveTheDaemon) {
  HeldDaemon daemon(calm_settings());
  TinyModel tiny(daemon.socket(), {});
  const auto tokens = token_stream(1, 300);
  Sequence sequence = tiny.model().open({});
  tiny.write(sequence, 0, tokens);
  std::uint64_t step = 0;
  check(kvq_step_begin(tiny.get(), &step));
  for (std::uint32_t life = 2; life < 6; ++life) {
    daemon.kill();
    EXPECT_EQ(tiny.attend_and_check(sequence.block_table(), 300, 0, test_seed()).exact, 1u);  // with no daemon
    daemon.await_lives(life);
    EXPECT_EQ(tiny.attend_and_check(sequence.block_table(), 300, 1, test_seed()).exact, 1u);
  }
  check(kvq_step_end(tiny.get(), step, nullptr));
  // It goes on where it was: more tokens, a fork, and another process's worth of prefix.
  tiny.write(sequence, 300, token_stream(2, 200));
  Sequence again = tiny.model().open(tokens);
  EXPECT_EQ(again.info().committed_tokens, 256u) << daemon.log();
  EXPECT_EQ(tiny.attend_and_check(sequence.block_table(), 500, 0, test_seed()).exact, 1u);
}

}  // namespace
}  // namespace kvq::test

// The ring of events, what a reader is told of it, and what the ticks add.
#include <gtest/gtest.h>

#include "daemon/rpc/event_report.h"
#include "daemon/rpc/room_events.h"

namespace kvq {
namespace {

TEST(EventRing, KeepsTheLastThousandAndSaysWhatIsMissed) {
  EventRing ring;
  EXPECT_EQ(report_events(ring, 0, 10, 5)["events"].size(), 0u);
  for (int i = 1; i <= 1500; ++i) ring.add("event=e n=" + std::to_string(i), 10 * i);
  const auto all = report_events(ring, 0, 5000, 15'007);
  EXPECT_EQ(all["events"].size(), 1000u);
  EXPECT_EQ(all["missed"], 500);
  EXPECT_EQ(all["next"], 1500);
  EXPECT_EQ(all["events"].front()["number"], 501);
  EXPECT_EQ(all["events"].back()["line"], "event=e n=1500");
  EXPECT_EQ(all["events"].back()["age_ms"], 7);
  const auto last = report_events(ring, 1498, 10, 15'000);
  ASSERT_EQ(last["events"].size(), 2u);
  EXPECT_EQ(last["missed"], 0);
  EXPECT_EQ(last["events"][0]["fields"]["n"], "1499");
  const auto few = report_events(ring, 1490, 3, 15'000);
  EXPECT_EQ(few["events"].front()["number"], 1498);
  EXPECT_EQ(few["missed"], 7);
}

TEST(EventRing, AReaderOfAnEarlierDaemonIsToldNothingTwice) {
  EventRing ring;
  ring.add("event=ready", 1);
  const auto report = report_events(ring, 700, 10, 2);
  EXPECT_EQ(report["next"], 1);
  EXPECT_EQ(report["missed"], 0);
  EXPECT_TRUE(report["events"].empty());
}

TEST(EventRing, ALineHasAMostLength) {
  EventRing ring;
  ring.add(std::string(1 << 20, 'x'), 1);
  EXPECT_EQ(ring.events().front().line.size(), EventRing::kLineBytes);
}

TEST(EventFields, AreTheWordsOfTheLine) {
  const auto fields = fields_of("event=warning text=\"a b=c; d\" pid=7 empty= last=\"\"");
  EXPECT_EQ(fields.size(), 5u);
  EXPECT_EQ(fields["event"], "warning");
  EXPECT_EQ(fields["text"], "a b=c; d");
  EXPECT_EQ(fields["pid"], "7");
  EXPECT_EQ(fields["empty"], "");
  EXPECT_EQ(fields["last"], "");
}

TEST(EventFields, OfNonsenseAreNone) {
  for (const char* line : {"", "=", "x", "x=\"", "a=\"b", " = = ", "\"=\"="})
    EXPECT_LE(fields_of(line).size(), 3u) << line;
}

TEST(RoomEvents, AreALineASecondThatLosesNoPage) {
  std::vector<std::string> lines;
  RoomEvents events([&](const std::string& line) { lines.push_back(line); }, "host");
  events.add({}, 1000);
  EXPECT_TRUE(lines.empty());
  TickReport report;
  report.transcodes_done = 3;
  report.level = PressureLevel::quantize;
  events.add(report, 1001);
  ASSERT_EQ(lines.size(), 1u);
  EXPECT_EQ(lines[0], "event=made_room device=host level=quantize pages_rewritten=3 pages_failed=0 pages_dropped=0");
  report.dropped_pages = 2;
  for (std::uint64_t ms = 1002; ms < 2001; ++ms) events.add(report, ms);
  EXPECT_EQ(lines.size(), 1u);
  report = {};
  events.add(report, 2001);
  ASSERT_EQ(lines.size(), 2u);
  EXPECT_EQ(lines[1], "event=made_room device=host level=calm pages_rewritten=2997 pages_failed=0 pages_dropped=1998");
}

}  // namespace
}  // namespace kvq

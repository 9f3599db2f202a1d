// top's model: looks and keys in, frames as text out.
#include "tools/kvqctl/top_model.h"

#include <gmock/gmock.h>

namespace kvqctl {
namespace {

using ::testing::ContainsRegex;
using ::testing::HasSubstr;
using ::testing::Not;

constexpr double kMiB = 1 << 20;

Json tenant(const std::string& name, double dense_mib, double int4_mib, double hit_pages = 0) {
  const double held = dense_mib + int4_mib + 1;
  return {
      {"name", name},
      {"level", "calm"},
      {"sessions", 1},
      {"quota_bytes", 64 * kMiB},
      {"slab_bytes", held * kMiB},
      {"limbo_bytes", kMiB / 2},
      {"free_bytes", kMiB / 2},
      {"cached_pages", 5},
      {"lookups", hit_pages / 10},
      {"hit_pages", hit_pages},
      {"computed_pages", hit_pages / 4},
      {"formats",
       {{"dense", {{"pages", 4}, {"bytes", dense_mib * kMiB}}}, {"int4", {{"pages", 8}, {"bytes", int4_mib * kMiB}}}}}};
}

Json device(const std::string& uuid, std::vector<Json> tenants, double transcodes = 0) {
  return {{"device", uuid.empty() ? "host" : "cuda"},
          {"level", "quantize"},
          {"draining", false},
          {"arena", {{"bytes", 100 * kMiB}}},
          {"watermarks", {{"quantize_at", 0.7}, {"evict_at", 0.85}, {"refuse_at", 0.95}}},
          {"transcodes", {{"done", transcodes}, {"bytes", transcodes * kMiB}, {"failed", 0}, {"in_flight", 3}}},
          {"dropped_pages", 2 * transcodes},
          {"refusals", 0},
          {"device_health", {{"state", "ok"}, {"text", ""}, {"uuid", uuid}}},
          {"tenants", tenants}};
}

Json status(const Json& of_device, std::uint64_t pid = 77, std::uint64_t uptime_ms = 60'000) {
  Json out = {{"version", "0.1.0"}, {"pid", pid}, {"uptime_ms", uptime_ms}, {"connections", 2}, {"parked_requests", 1}};
  if (of_device.is_array()) {
    out["devices"] = of_device;
  } else {
    out.update(of_device);
  }
  return out;
}

Json session(int id, const std::string& label, double step_ms = 0, bool hung = false) {
  return {{"id", id},
          {"tenant", "chat"},
          {"device", "host"},
          {"pid", 1000 + id},
          {"label", label},
          {"connected", true},
          {"waits_for_client", false},
          {"evicted", false},
          {"hung", hung},
          {"ready", true},
          {"sequences", 4},
          {"running", 2},
          {"pages", 10 * id},
          {"credits", 4},
          {"open_steps", step_ms > 0 ? 1 : 0},
          {"oldest_step_ms", step_ms},
          {"limbo_bytes", kMiB},
          {"lost_pages", 0}};
}

Json sessions(std::vector<Json> list) { return {{"sessions", list}}; }

std::string shown(const TopModel& model, std::size_t width = 80, std::size_t height = 24, std::uint64_t now_ms = 5000) {
  return text_of(model.frame(width, height, now_ms));
}

std::string line_with(const std::string& text, const std::string& part) {
  const auto at = text.find(part);
  if (at == std::string::npos) return "";
  const auto start = text.rfind('\n', at) + 1;
  return text.substr(start, text.find('\n', at) - start);
}

TopModel busy() {
  TopModel model("/run/kvq/kvqd.sock", 1000);
  model.add(sample_of(status(device("", {tenant("chat", 20, 30)}, 100)), sessions({session(1, "vllm worker 0", 1500)}),
                      1000));
  model.add(sample_of(status(device("", {tenant("chat", 20, 30, 80), tenant("batch", 10, 0)}, 110), 77, 62'000),
                      sessions({session(1, "vllm worker 0", 3500), session(2, "vllm worker 1")}), 3000));
  return model;
}

TEST(Top, AFrameHasExactlyTheSizeAskedFor) {
  const TopModel model = busy();
  for (std::size_t width : {1, 39, 40, 80, 81, 200}) {
    for (std::size_t height : {1, 9, 10, 15, 16, 24, 60}) {
      const Frame frame = model.frame(width, height, 4000);
      ASSERT_EQ(frame.size(), height);
      for (const Line& line : frame) ASSERT_EQ(width_of(line), width) << width << "x" << height;
    }
  }
}

TEST(Top, AFrameOf80x24HasAllOfIt) {
  const std::string text = shown(busy());
  EXPECT_EQ(text.substr(0, text.find('\n')),
            "kvqctl top  kvqd 0.1.0, pid 77, up 1 min 2 s; 2 tenants, 2 sessions  every 1.0 s");
  EXPECT_THAT(text, HasSubstr("host QUANTIZE 62 % of 100 MiB"));
  EXPECT_THAT(text, HasSubstr("# dense 30.0 MiB  + int4 30.0 MiB  ~ limbo 1.0 MiB  . slack 1.0 MiB  unused 38"));
  EXPECT_THAT(text, HasSubstr("quantized 5.0/s (5.0 MiB/s), failed 0/s, in flight 3   dropped 10/s\n"));
  EXPECT_THAT(text, HasSubstr("hits 40/s pages in 4.0/s attaches, hit rate 80 %   refused 0/s   waiting 1\n"));
  EXPECT_THAT(text, HasSubstr("oldest open step 3.5 s: session 1, pid 1001, vllm worker 0, holds back 1.0 MiB"));
  EXPECT_THAT(line_with(text, "chat "),
              ContainsRegex("chat +calm +51.0 MiB +80 % +20.0 MiB +30.0 MiB +512 KiB +5 +40 +1"));
}

TEST(Top, TheBarShowsSharesAndMarks) {
  const std::string bar = line_with(shown(busy(), 145), "host QUANTIZE");
  const std::string inside = bar.substr(bar.find('[') + 1, bar.find(']') - bar.find('[') - 1);
  const auto share = [&](char c) {
    return static_cast<double>(std::count(inside.begin(), inside.end(), c)) / static_cast<double>(inside.size());
  };
  EXPECT_NEAR(share('#'), 0.30, 0.01);
  EXPECT_NEAR(share('+'), 0.30, 0.01);
  EXPECT_NEAR(static_cast<double>(inside.find('q')) / static_cast<double>(inside.size()), 0.70, 0.01);
  EXPECT_NEAR(static_cast<double>(inside.find('e')) / static_cast<double>(inside.size()), 0.85, 0.01);
  EXPECT_NEAR(static_cast<double>(inside.find('r')) / static_cast<double>(inside.size()), 0.95, 0.01);
}

TEST(Top, BarsOverTimeGrowFromTheRight) {
  TopModel model("s", 1000);
  for (std::uint64_t i = 1; i <= 3; ++i) {
    model.add(
        sample_of(status(device("", {tenant("chat", 30.0 * static_cast<double>(i) - 1, 0)})), sessions({}), i * 1000));
  }
  const std::string text = shown(model);
  const std::string bottom = line_with(text, "  0 %|"), top = line_with(text, "100 %|");
  EXPECT_EQ(bottom, "  0 %|" + std::string(70, ' ') + "###");
  EXPECT_EQ(top, "100 %|");  // 90 MiB of 100 do not reach the middle of the uppermost row
  std::size_t columns = 0;
  for (char c : text.substr(text.find("100 %|"), text.find("  0 %|") - text.find("100 %|")))
    columns += c == '#' ? 1 : 0;
  EXPECT_EQ(columns, 1u + 3u + 4u);
}

TEST(Top, SortsByAnyColumnBothWays) {
  TopModel model = busy();
  const auto before = [&](const char* first, const char* second) {
    const std::string text = shown(model);
    return text.find(first, text.find("TENANT")) < text.find(second, text.find("TENANT"));
  };
  EXPECT_TRUE(before("chat ", "batch "));  // by what they hold
  EXPECT_THAT(shown(model), HasSubstr("HOLDS*"));
  model.press('r');
  EXPECT_TRUE(before("batch ", "chat "));
  EXPECT_THAT(shown(model), HasSubstr("HOLDS^"));
  model.press('r');
  model.press('S');
  model.press('S');
  EXPECT_THAT(shown(model), HasSubstr("TENANT*"));
  EXPECT_TRUE(before("batch ", "chat "));
}

TEST(Top, FiltersByAnyWord) {
  TopModel model = busy();
  model.press(kTab);
  EXPECT_THAT(shown(model), HasSubstr("vllm worker 1"));
  for (char c : std::string("/WORKER 1")) model.press(c);
  EXPECT_THAT(shown(model), HasSubstr("filter: WORKER 1_"));
  model.press(kEnter);
  const std::string list = shown(model).substr(shown(model).find("SESSION*"));
  EXPECT_THAT(list, HasSubstr("1002"));
  EXPECT_THAT(list, Not(HasSubstr("1001")));
  EXPECT_TRUE(model.press('x'));
  model.press(kEscape);
  EXPECT_THAT(shown(model), HasSubstr("1001"));
}

TEST(Top, ScrollsNoFurtherThanTheLastRow) {
  TopModel model("s", 1000);
  std::vector<Json> many;
  for (int i = 1; i <= 30; ++i) many.push_back(session(i, "w"));
  model.add(sample_of(status(device("", {})), sessions(many), 1000));
  model.press(kTab);
  EXPECT_THAT(shown(model), Not(HasSubstr("1030")));
  for (int i = 0; i < 9; ++i) model.press(kPageDown);
  EXPECT_THAT(shown(model), HasSubstr("1030"));
  EXPECT_THAT(shown(model), Not(HasSubstr("1029")));
  for (int i = 0; i < 40; ++i) model.press(kUp);
  EXPECT_THAT(shown(model), HasSubstr("1001"));
}

TEST(Top, PauseKeepsTheFigures) {
  TopModel model = busy();
  model.press('p');
  const std::string before = shown(model);
  EXPECT_THAT(before, HasSubstr("paused"));
  model.add(sample_of(status(device("", {tenant("other", 1, 1)})), sessions({}), 9000));
  EXPECT_EQ(shown(model), before);
  model.press('p');
  model.add(sample_of(status(device("", {tenant("other", 1, 1)})), sessions({}), 9000));
  EXPECT_THAT(shown(model), HasSubstr("other"));
}

TEST(Top, ARestartOfKvqdGivesNoRatesAndIsTold) {
  TopModel model = busy();
  model.lost("no daemon at s (Connection refused); start kvqd", 4000);
  EXPECT_THAT(shown(model, 80, 24, 6500), HasSubstr("waiting for kvqd, 2.5 s: no daemon at s"));
  EXPECT_THAT(shown(model), HasSubstr("chat"));  // what was known stays
  model.add(sample_of(status(device("", {tenant("chat", 1, 0, 5)}, 3), 78, 200), sessions({}), 7000));
  EXPECT_THAT(shown(model), HasSubstr("kvqd was restarted 0.2 s ago"));
  EXPECT_THAT(shown(model), HasSubstr("quantized -, failed -"));
  model.add(sample_of(status(device("", {tenant("chat", 1, 0, 5)}, 5), 78, 1200), sessions({}), 8000));
  EXPECT_THAT(shown(model), HasSubstr("quantized 2.0/s"));
}

TEST(Top, RatesAreOverTheLastSeconds) {
  TopModel model("s", 1000);
  double done = 0;
  for (std::uint64_t i = 1; i <= 20; ++i) {  // a burst of 50 at the twelfth look, and nothing else
    done += i == 12 ? 50 : 0;
    model.add(sample_of(status(device("", {}, done), 77, i * 1000), sessions({}), i * 1000));
    EXPECT_THAT(shown(model), HasSubstr(i == 1             ? "quantized -"
                                        : i < 12 || i > 16 ? "quantized 0/s"
                                                           : "quantized 10/s"))
        << i;
  }
}

TEST(Top, TellsWhatIsNotAsUsualInOneLine) {
  TopModel model("s", 1000);
  EXPECT_THAT(shown(model), HasSubstr("asking kvqd at s"));
  model.add(sample_of(status(device("", {})), sessions({session(3, "w", 40'000, true)}), 1000));
  EXPECT_THAT(shown(model), HasSubstr("session 3 hangs (pid 1003): kvqctl evict-session 3 ends it"));
  Json unwell = device("", {});
  unwell["device_health"] = {{"state", "degraded"}, {"text", "the worker died"}, {"uuid", "GPU-a"}};
  model.add(sample_of(status(unwell), sessions({}), 2000));
  EXPECT_THAT(shown(model), HasSubstr("DEGRADED GPU-a: the worker died"));
}

TEST(Top, SeveralDevicesHaveABarEachAndCanBeSeenAlone) {
  TopModel model("s", 1000);
  model.add(
      sample_of(status(Json::array({device("GPU-a", {tenant("one", 10, 0)}), device("GPU-b", {tenant("two", 0, 40)})})),
                sessions({}), 1000));
  EXPECT_THAT(shown(model), HasSubstr("GPU-a QUANTIZE 11 %"));
  EXPECT_THAT(shown(model), HasSubstr("GPU-b QUANTIZE 41 %"));
  EXPECT_THAT(shown(model, 100), HasSubstr("DEVICE"));
  model.press('d');
  model.press('d');
  EXPECT_THAT(shown(model), Not(HasSubstr("GPU-a")));
  EXPECT_THAT(shown(model), HasSubstr("# dense 0 B  + int4 40.0 MiB"));
  EXPECT_THAT(shown(model), Not(HasSubstr("one ")));
  model.press('d');
  EXPECT_THAT(shown(model), HasSubstr("GPU-a QUANTIZE"));
}

TEST(Top, NothingFromAClientReachesTheTerminalButPrintableText) {
  TopModel model("s", 1000);
  model.add(sample_of(status(device("", {})), sessions({session(1, "a\x1b[2Jb")}), 1000));
  model.press(kTab);
  EXPECT_THAT(shown(model, 120), HasSubstr("a?[2Jb"));
}

TEST(Top, KeysQuitHelpAndSetThePace) {
  TopModel model = busy();
  model.press('?');
  EXPECT_THAT(shown(model), HasSubstr("sort by the next column"));
  model.press('x');
  EXPECT_THAT(shown(model), HasSubstr("chat"));
  model.press('+');
  EXPECT_EQ(model.interval_ms(), 2000u);
  for (int i = 0; i < 9; ++i) model.press('-');
  EXPECT_EQ(model.interval_ms(), 250u);
  EXPECT_FALSE(model.press('q'));
}

}  // namespace
}  // namespace kvqctl

// The text that Prometheus gets: every series from the start, exact numbers, and nothing that a name could break.
#include "daemon/metrics/node_metrics.h"

#include <gtest/gtest.h>

#include <set>

#include "daemon/metrics/exposition.h"
#include "tests/support/scrape.h"

namespace kvq {
namespace {

using test::parse_samples;
using test::Samples;
using test::sum_of;

NodeReport fresh(const std::vector<std::string>& devices = {"host"}) {
  NodeReport report;
  for (const std::string& name : devices) {
    DeviceReport d;
    d.name = name;
    d.store.arena_bytes = 16 << 20;
    d.store.slab_bytes = 1 << 20;
    d.store.slabs = d.store.slabs_free = 16;
    d.store.slabs_reserved = 1;
    TenantStatus t;
    t.name = "chat";
    d.store.tenants.push_back(t);
    report.devices.push_back(d);
  }
  return report;
}

std::set<std::string> names_of(const Samples& samples) {
  std::set<std::string> out;
  for (const auto& [name, value] : samples) out.insert(name);
  return out;
}

TEST(NodeMetrics, EverySeriesIsThereAtZeroFromTheStart) {
  const Samples samples = parse_samples(metrics_text(fresh()));
  for (const auto& [name, value] : samples) {
    const std::string family = name.substr(0, name.find('{'));
    if (family.ends_with("_total") || family.ends_with("_count") || family.ends_with("_sum") ||
        family.ends_with("_bucket")) {
      EXPECT_EQ(value, 0) << name;
    }
  }
  for (const char* name :
       {"kvq_transcodes_total{device=\"host\",from=\"dense\",to=\"int4\"}",
        "kvq_transcodes_total{device=\"host\",from=\"int4\",to=\"int4\"}",
        "kvq_sessions_ended_total{device=\"host\",how=\"lost\"}", "kvq_evicted_pages_total{device=\"host\"}",
        "kvq_worker_restarts_total{device=\"host\"}", "kvq_alloc_wait_seconds_bucket{device=\"host\",le=\"+Inf\"}",
        "kvq_prefix_hit_tokens_total{device=\"host\",tenant=\"chat\",format=\"int4\"}"}) {
    EXPECT_EQ(samples.count(name), 1u) << name;
  }
}

TEST(NodeMetrics, NoSeriesAppearsLater) {
  NodeReport report = fresh();
  report.devices[0].store.counts.noise.resize(2);  // a model has registered
  const auto before = names_of(parse_samples(metrics_text(report)));
  StoreCounts& counts = report.devices[0].store.counts;
  counts.transcodes[1][2] = counts.transcodes[2][2] = counts.drops = counts.refusals = 7;
  counts.step.add(100'000);
  counts.noise[1].add(0.1);
  report.devices[0].counts.lost = 3;
  report.devices[0].store.tenants[0].counts.hit_pages[2] = 5;
  EXPECT_EQ(names_of(parse_samples(metrics_text(report))), before);
}

TEST(NodeMetrics, KindsOfMemorySumToTheArena) {
  NodeReport report = fresh();
  StoreStatus& s = report.devices[0].store;
  s.slabs_free = 13;
  TenantStatus& t = s.tenants[0];
  t.slab_bytes = 3 << 20;
  t.format[1].bytes = 1'000'000;
  t.format[2].bytes = 500'000;
  t.limbo_bytes = 300'000;
  t.free_bytes = t.slab_bytes - 1'800'000;
  for (const std::uint32_t free : {13u, 1u, 0u}) {  // down to the reserve, and into it
    s.slabs_free = free;
    t.free_bytes = (std::uint64_t{s.slabs - free} << 20) - 1'800'000;
    const Samples samples = parse_samples(metrics_text(report));
    EXPECT_EQ(sum_of(samples, "kvq_memory_bytes"), sum_of(samples, "kvq_arena_bytes")) << free;
    EXPECT_EQ(samples.at("kvq_memory_bytes{device=\"host\",kind=\"reserve\"}"), free > 0 ? 1 << 20 : 0);
  }
}

TEST(NodeMetrics, SlabsAboveTheArenasNewSizeCountAsLongAsTheyAreThere) {
  NodeReport report = fresh();
  StoreStatus& s = report.devices[0].store;
  s.target_bytes = 4 << 20;  // 6 slabs are in use
  s.arena_bytes = 6 << 20;
  s.slabs = 6;
  s.slabs_free = 0;
  s.slabs_over = 2;
  s.tenants[0].slab_bytes = 6 << 20;
  s.tenants[0].format[1].bytes = 5 << 20;
  s.tenants[0].free_bytes = 1 << 20;
  const Samples samples = parse_samples(metrics_text(report));
  EXPECT_EQ(sum_of(samples, "kvq_memory_bytes"), 6 << 20);
  EXPECT_EQ(sum_of(samples, "kvq_arena_bytes"), 6 << 20);
  EXPECT_EQ(sum_of(samples, "kvq_arena_target_bytes"), 4 << 20);
  EXPECT_EQ(samples.at("kvq_memory_bytes{device=\"host\",kind=\"free\"}"), 0);
}

TEST(NodeMetrics, ATenantEndsWhenNoSettingNamesItAndItHoldsNothing) {
  NodeReport report = fresh();
  TenantStatus& t = report.devices[0].store.tenants[0];
  t.configured = false;
  EXPECT_EQ(metrics_text(report).find("tenant=\"chat\""), std::string::npos);
  t.sessions = 1;
  EXPECT_NE(metrics_text(report).find("tenant=\"chat\""), std::string::npos);
  t.sessions = 0;
  t.slab_bytes = 1;
  EXPECT_NE(metrics_text(report).find("tenant=\"chat\""), std::string::npos);
}

TEST(NodeMetrics, EachDeviceHasItsOwn) {
  NodeReport report = fresh({"GPU-a", "GPU-b"});
  report.devices[1].store.counts.drops = 4;
  const Samples samples = parse_samples(metrics_text(report));
  EXPECT_EQ(samples.at("kvq_evicted_pages_total{device=\"GPU-a\"}"), 0);
  EXPECT_EQ(samples.at("kvq_evicted_pages_total{device=\"GPU-b\"}"), 4);
}

TEST(Exposition, HistogramsAreCumulativeAndEndAtTheirCount) {
  TimeHistogram times;
  for (const std::uint64_t ms : {0, 1, 2, 60'000, 60'001}) times.add(ms);
  Exposition out;
  out.family("x_seconds", MetricKind::histogram, "Times.");
  out.sample({{"device", "host"}}, times);
  const Samples samples = parse_samples(out.take());
  EXPECT_EQ(samples.at("x_seconds_bucket{device=\"host\",le=\"0.001\"}"), 2);
  EXPECT_EQ(samples.at("x_seconds_bucket{device=\"host\",le=\"0.002\"}"), 3);
  EXPECT_EQ(samples.at("x_seconds_bucket{device=\"host\",le=\"30\"}"), 3);
  EXPECT_EQ(samples.at("x_seconds_bucket{device=\"host\",le=\"60\"}"), 4);
  EXPECT_EQ(samples.at("x_seconds_bucket{device=\"host\",le=\"+Inf\"}"), 5);
  EXPECT_EQ(samples.at("x_seconds_count{device=\"host\"}"), 5);
  EXPECT_DOUBLE_EQ(samples.at("x_seconds_sum{device=\"host\"}"), 120.004);
}

TEST(Exposition, RatiosHaveBoundsOfTheirOwn) {
  RatioHistogram ratios;
  for (const double ratio : {0.0, 0.005, 0.09, 2.0}) ratios.add(ratio);
  Exposition out;
  out.family("x_ratio", MetricKind::histogram, "Ratios.");
  out.sample({}, ratios);
  const Samples samples = parse_samples(out.take());
  EXPECT_EQ(samples.at("x_ratio_bucket{le=\"0.005\"}"), 2);
  EXPECT_EQ(samples.at("x_ratio_bucket{le=\"0.1\"}"), 3);
  EXPECT_EQ(samples.at("x_ratio_bucket{le=\"1\"}"), 3);
  EXPECT_EQ(samples.at("x_ratio_bucket{le=\"+Inf\"}"), 4);
  EXPECT_EQ(samples.at("x_ratio_count"), 4);
  EXPECT_DOUBLE_EQ(samples.at("x_ratio_sum"), 2.095);
}

TEST(Exposition, NumbersAndLabelsAreWrittenExactly) {
  Exposition out;
  out.family("x_total", MetricKind::counter, "Something.");
  out.sample({{"name", "a\"b\\c\nd"}}, std::uint64_t{18'446'744'073'709'551'615u});
  out.sample({}, 0.7);
  out.sample_ms({{"t", "1"}}, 60'050);
  out.sample_ms({{"t", "2"}}, 7);
  EXPECT_EQ(out.take(),
            "# HELP x_total Something.\n# TYPE x_total counter\n"
            "x_total{name=\"a\\\"b\\\\c\\nd\"} 18446744073709551615\nx_total 0.7\n"
            "x_total{t=\"1\"} 60.05\nx_total{t=\"2\"} 0.007\n");
}

}  // namespace
}  // namespace kvq

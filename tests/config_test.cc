// Each setting from both sources, and each way to get it wrong: the message is one line with place, key, value and fix.
#include "daemon/config.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>
#include <unistd.h>

#include <filesystem>
#include <fstream>
#include <sstream>
#include <string>
#include <vector>

#include "daemon/config_setting.h"

namespace kvq {
namespace {

using ::testing::AllOf;
using ::testing::ElementsAre;
using ::testing::EndsWith;
using ::testing::HasSubstr;
using ::testing::Not;
using ::testing::StartsWith;

class ConfigTest : public ::testing::Test {
 protected:
  ConfigTest() { std::filesystem::create_directories(directory); }
  ~ConfigTest() override { std::filesystem::remove_all(directory); }

  static CommandLine parse(std::vector<const char*> arguments) {
    arguments.insert(arguments.begin(), "kvqd");
    return parse_command_line(static_cast<int>(arguments.size()), arguments.data());
  }

  CommandLine parse_file(const std::string& text, std::vector<const char*> more = {}) {
    std::ofstream(file) << text;
    more.insert(more.begin(), {"--config", file.c_str()});
    return parse(more);
  }

  // The one-line refusal of a file, its path cut to "kvqd.toml".
  std::string refusal(const std::string& text, std::vector<const char*> more = {}) {
    const auto result = parse_file(text, more);
    EXPECT_FALSE(result.config.has_value());
    EXPECT_EQ(result.exit_code, ExitCode::usage);
    EXPECT_THAT(result.message, Not(HasSubstr("\n")));
    auto message = result.message;
    if (const auto at = message.find(directory + "/"); at != std::string::npos) message.erase(at, directory.size() + 1);
    return message;
  }

  static std::string refusal_of(std::vector<const char*> arguments) {
    const auto result = parse(arguments);
    EXPECT_FALSE(result.config.has_value());
    EXPECT_EQ(result.exit_code, ExitCode::usage);
    EXPECT_THAT(result.message, Not(HasSubstr("\n")));
    return result.message;
  }

  const std::string directory = ::testing::TempDir() + "kvq_config_" + std::to_string(getpid());
  const std::string file = directory + "/kvqd.toml";
};

TEST_F(ConfigTest, DefaultsAreConsistent) {
  const auto result = parse({});
  ASSERT_TRUE(result.config.has_value()) << result.message;
  EXPECT_EQ(result.config->socket, "/run/kvq/kvqd.sock");
  EXPECT_EQ(result.config->slab_bytes, 64ull << 20);
  EXPECT_TRUE(result.config->allow_unlisted);
  EXPECT_EQ(result.config->unlisted_quota_bytes, 0u) << "the arena, as large as it is";
}

TEST_F(ConfigTest, MetricsAreOffOrOnLoopbackOrInTheFileSystem) {
  EXPECT_TRUE(parse({}).config.value().metrics.off());
  EXPECT_TRUE(parse_file("metrics = \"off\"").config.value().metrics.off());
  const MetricsAddress v4 = parse_file("metrics = \"127.0.0.1:9477\"").config.value().metrics;
  EXPECT_EQ(v4.host + " " + std::to_string(v4.port) + v4.path, "127.0.0.1 9477");
  const MetricsAddress v6 = parse({"--metrics", "[::1]:1"}).config.value().metrics;
  EXPECT_EQ(v6.host + " " + std::to_string(v6.port) + v6.path, "::1 1");
  EXPECT_EQ(parse_file("metrics = \"unix:/run/kvq/m.sock\"").config.value().metrics.path, "/run/kvq/m.sock");
  EXPECT_TRUE(parse_file("metrics = \"127.0.0.1:9477\"", {"--metrics", "off"}).config.value().metrics.off());
  for (const char* bad :
       {"", "9477", ":9477", "0.0.0.0:9477", "127.0.0.1", "127.0.0.1:", "127.0.0.1:0", "127.0.0.1:65536",
        "127.0.0.1:9477x", "localhost:9477", "[::]:9477", "[::1]9477", "unix:relative", "/run/m.sock"}) {
    EXPECT_THAT(refusal(std::string("# settings\nmetrics = \"") + bad + "\""),
                AllOf(StartsWith("kvqd.toml:2: metrics = "), HasSubstr("only loopback is served")))
        << bad;
  }
  EXPECT_THAT(refusal("metrics = 9477"), HasSubstr("kvqd.toml:1: metrics = 9477: must be text"));
  EXPECT_THAT(refusal("socket = \"/tmp/k.sock\"\nmetrics = \"unix:/tmp/k.sock\""),
              AllOf(StartsWith("kvqd.toml:2: metrics = "), HasSubstr("is kvqd's own socket")));
}

TEST_F(ConfigTest, FileSetsEveryKind) {
  const auto result = parse_file(R"(
socket = "/tmp/k.sock"
arena_bytes = "1GiB"
slab_bytes = 1048576
quantize_at = 0.5
evict_at = 0.8
refuse_at = 1
relief = 0.1
cold_format = "k8v4"
lock_memory = true
max_sessions = 7
log_level = "debug"

[[tenants]]
name = "chat"
uids = [1000, 1001]
quota_bytes = "512MiB"
share = 3
format_floor = "dense"
salt = "000102030405060708090a0b0c0d0eFF"

[[tenants]]
name = "batch"
gids = [50]
)");
  ASSERT_TRUE(result.config.has_value()) << result.message;
  const auto& config = *result.config;
  EXPECT_EQ(config.socket, "/tmp/k.sock");
  EXPECT_EQ(config.arena_bytes, 1ull << 30);
  EXPECT_EQ(config.slab_bytes, 1ull << 20);
  EXPECT_DOUBLE_EQ(config.watermarks.quantize_at, 0.5);
  EXPECT_DOUBLE_EQ(config.watermarks.refuse_at, 1.0);
  EXPECT_EQ(config.cold_format, Format::k8v4);
  EXPECT_TRUE(config.lock_memory);
  EXPECT_EQ(config.max_sessions, 7u);
  ASSERT_EQ(config.tenants.size(), 2u);
  EXPECT_EQ(config.tenants[0].name, "chat");
  EXPECT_THAT(config.tenants[0].uids, ElementsAre(1000, 1001));
  EXPECT_EQ(config.tenants[0].quota_bytes, 512ull << 20);
  EXPECT_EQ(config.tenants[0].share, 3u);
  EXPECT_EQ(config.tenants[0].format_floor, Format::dense);
  EXPECT_EQ(config.tenants[0].salt.size(), 16u);
  EXPECT_EQ(static_cast<unsigned char>(config.tenants[0].salt.back()), 0xff);
  EXPECT_THAT(config.tenants[1].gids, ElementsAre(50));
  EXPECT_EQ(config.tenants[1].quota_bytes, 0u) << "the arena, as large as it is";
  EXPECT_FALSE(config.allow_unlisted) << "closed as soon as tenants are listed";
}

TEST_F(ConfigTest, CommandLineWinsOverFile) {
  const auto result =
      parse_file("max_sessions = 3\nlog_level = \"warn\"\n",
                 {"--max-sessions", "5", "--quantize-at", "0.25", "--unlisted-quota-bytes", "1GiB", "--socket", "7"});
  ASSERT_TRUE(result.config.has_value()) << result.message;
  EXPECT_EQ(result.config->max_sessions, 5u);
  EXPECT_EQ(result.config->log_level, "warn");
  EXPECT_DOUBLE_EQ(result.config->watermarks.quantize_at, 0.25);
  EXPECT_EQ(result.config->socket, "7");
}

TEST_F(ConfigTest, EveryRuleIsReachableFromTheCommandLine) {
  for (const auto& rules : {setting_rules(), test_rules()}) {
    for (const auto& rule : rules) {
      std::string option = "--" + std::string(rule.key);
      std::replace(option.begin(), option.end(), '_', '-');
      EXPECT_THAT(parse({"--help"}).message, HasSubstr(option));
    }
  }
}

std::string text_of(const std::string& path) {
  std::stringstream text;
  text << std::ifstream(std::string(KVQ_SOURCE_DIR) + path).rdbuf();
  return text.str();
}

TEST_F(ConfigTest, ThereAreAtMost20SettingsAndEachIsInTheShippedFileAndInTheManuals) {
  EXPECT_LE(setting_rules().size(), 20u);
  const std::string shipped = text_of("/systemd/kvqd.toml"), manual = text_of("/docs/man/kvqd.conf.5");
  const std::string page = text_of("/docs/operations.md");
  for (const auto& rule : setting_rules()) {
    const std::string key(rule.key);
    EXPECT_TRUE(shipped.find("\n" + key + " = ") != std::string::npos ||
                shipped.find("\n# " + key + " = ") != std::string::npos)
        << key;
    EXPECT_THAT(manual, HasSubstr("\n.B " + key + "\n"));
    EXPECT_THAT(page, HasSubstr("\n| `" + key + "` |"));
  }
}

// Whoever takes a comment sign away gets what the comment promises: a default.
TEST_F(ConfigTest, TheShippedFileIsValidAndItsCommentsAreTheDefaults) {
  const std::string shipped = text_of("/systemd/kvqd.toml");
  ASSERT_TRUE(parse_file(shipped).config.has_value()) << parse_file(shipped).message;
  std::istringstream lines(shipped);
  int tried = 0;
  for (std::string line; std::getline(lines, line) && line.find("[[tenants]]") == std::string::npos;) {
    if (line.rfind("# ", 0) != 0 || line.find(" = ") == std::string::npos || line.find("group") != std::string::npos) {
      continue;
    }
    const auto result = parse_file(line.substr(2));
    EXPECT_TRUE(result.config.has_value()) << result.message;
    ++tried;
  }
  EXPECT_GT(tried, 5);
}

TEST_F(ConfigTest, UsersOfNoTenantAreServedOrRefused) {
  EXPECT_TRUE(parse({}).config.value().allow_unlisted);
  const std::string tenant = "[[tenants]]\nname = \"a\"\nuids = [1]\n";
  EXPECT_FALSE(parse_file(tenant).config.value().allow_unlisted);
  const Config served = parse_file("unlisted_quota_bytes = \"1GiB\"\n" + tenant).config.value();
  EXPECT_TRUE(served.allow_unlisted);
  EXPECT_EQ(served.unlisted_quota_bytes, 1ull << 30);
  EXPECT_FALSE(parse_file("unlisted_quota_bytes = \"refuse\"\n" + tenant).config.value().allow_unlisted);
  EXPECT_THAT(refusal("unlisted_quota_bytes = \"never\"\n"), HasSubstr("must be a size"));
  EXPECT_THAT(refusal("unlisted_quota_bytes = 0\n"), HasSubstr("must be from 1 to"));
}

TEST_F(ConfigTest, AskingOnlyEndsWellWithoutConfig) {
  EXPECT_THAT(parse({"--version"}).message, StartsWith("kvqd "));
  const auto checked = parse({"--check-config", "--arena-bytes", "1GiB"});
  EXPECT_FALSE(checked.config.has_value());
  EXPECT_EQ(checked.exit_code, ExitCode::ok);
  EXPECT_EQ(checked.message, "kvqd: configuration ok: 16 slabs of 67108864 bytes, 0 tenants");
  EXPECT_EQ(parse({"--check-config", "--max-sessions", "0"}).exit_code, ExitCode::usage);
}

TEST_F(ConfigTest, UnknownKeySuggestsTheNearest) {
  EXPECT_EQ(refusal("\narena_byte = 1\n"), "kvqd.toml:2: arena_byte = 1: unknown setting; did you mean arena_bytes?");
  EXPECT_EQ(refusal("tenant = 1\n"), "kvqd.toml:1: tenant = 1: unknown setting; did you mean tenants?");
  EXPECT_THAT(refusal("colour = \"red\"\n"), EndsWith("unknown setting; kvqd --help lists them"));
  EXPECT_THAT(refusal("[watermarks]\nquantize_at = 0.5\n"), StartsWith("kvqd.toml:1: watermarks: unknown setting"));
  EXPECT_EQ(refusal("[[tenants]]\nname = \"a\"\nuid = [1]\n"),
            "kvqd.toml:3: uid = [ 1 ]: unknown setting of a tenant; did you mean uids?");
  EXPECT_EQ(refusal_of({"--slab-byte", "3"}), "command line: --slab-byte: unknown option; did you mean --slab-bytes?");
}

TEST_F(ConfigTest, WrongTypeNamesTheRightOne) {
  EXPECT_EQ(refusal("max_pages = \"two\"\n"),
            "kvqd.toml:1: max_pages = \"two\": must be an integer from 16 to 2147483648");
  EXPECT_EQ(refusal("max_pages = 2.5\n"), "kvqd.toml:1: max_pages = 2.5: must be an integer from 16 to 2147483648");
  EXPECT_EQ(refusal("socket = 5\n"), "kvqd.toml:1: socket = 5: must be text in quotes");
  EXPECT_EQ(refusal("lock_memory = 1\n"), "kvqd.toml:1: lock_memory = 1: must be true or false");
  EXPECT_THAT(refusal("quantize_at = \"70%\"\n"), HasSubstr("must be a fraction of the arena"));
  EXPECT_THAT(refusal("tenants = 3\n"), HasSubstr("must be tables headed [[tenants]]"));
  EXPECT_THAT(refusal("[[tenants]]\nname = \"a\"\nuids = 1000\n"), HasSubstr("must be a list of numbers"));
  EXPECT_THAT(refusal_of({"--lock-memory", "yes"}), HasSubstr("must be true or false"));
}

TEST_F(ConfigTest, OutOfRangeNamesTheRange) {
  EXPECT_EQ(refusal("max_sessions = 0\n"), "kvqd.toml:1: max_sessions = 0: must be an integer from 1 to 4096");
  EXPECT_THAT(refusal("max_pages = -1\n"), EndsWith("must be an integer from 16 to 2147483648"));
  EXPECT_THAT(refusal("refuse_at = 1.01\n"), HasSubstr("above 0 and at most 1"));
  EXPECT_THAT(refusal("relief = 0\n"), HasSubstr("above 0 and at most 1"));
  EXPECT_THAT(refusal("relief = nan\n"), HasSubstr("above 0 and at most 1"));
  EXPECT_THAT(refusal("log_level = \"loud\"\n"), EndsWith("must be one of trace, debug, info, warn, error, off"));
  EXPECT_THAT(refusal("cold_format = \"dense\"\n"), EndsWith("must be one of int4, int4_k4, int4_k8, k8v4"));
  EXPECT_THAT(refusal("arena_bytes = -5\n"), HasSubstr("must be a size"));
  EXPECT_THAT(refusal("arena_bytes = \"300TiB\"\n"), HasSubstr("must be from 4096 to 281474976710656 bytes"));
}

TEST_F(ConfigTest, DeviceNamesAKindOrGpus) {
  using Uuids = std::vector<std::string>;
  const auto device = [&](const std::string& value) {
    auto result = parse_file("device = " + value + "\n");
    EXPECT_TRUE(result.config.has_value()) << result.message;
    return std::pair(result.config->device, result.config->device_uuids);
  };
  EXPECT_EQ(parse({}).config->device, DeviceKind::host);
  EXPECT_EQ(device("\"auto\""), std::pair(DeviceKind::automatic, Uuids()));
  EXPECT_EQ(device("\"host\""), std::pair(DeviceKind::host, Uuids()));
  EXPECT_EQ(device("\"cuda\""), std::pair(DeviceKind::cuda, Uuids()));
  EXPECT_EQ(device("\"GPU-12-34\""), std::pair(DeviceKind::cuda, Uuids{"GPU-12-34"}));
  EXPECT_EQ(device("\"MIG-5\""), std::pair(DeviceKind::cuda, Uuids{"MIG-5"}));
  EXPECT_EQ(device("[\"GPU-2\", \"GPU-1\"]"), std::pair(DeviceKind::cuda, Uuids{"GPU-2", "GPU-1"}));
  EXPECT_EQ(parse({"--device", "GPU-2,GPU-1"}).config->device_uuids, (Uuids{"GPU-2", "GPU-1"}));
  const std::string valid =
      ": must be auto, host, cuda, or the UUIDs of GPUs such as GPU-4d5f... (nvidia-smi -L lists "
      "them)";
  EXPECT_EQ(refusal("device = \"0\"\n"), "kvqd.toml:1: device = \"0\"" + valid);
  EXPECT_THAT(refusal("device = [\"GPU-1\", 2]\n"), EndsWith(valid));
  EXPECT_THAT(refusal("device = [\"GPU-1\", \"host\"]\n"), EndsWith(valid));
  EXPECT_THAT(refusal("device = [\"GPU-1\", \"GPU-1\"]\n"), EndsWith("names GPU-1 twice"));
  EXPECT_THAT(refusal("device = []\n"), EndsWith("must name 1 to 64 GPUs"));
}

TEST_F(ConfigTest, SlabsOfAGpuAreLargerUnlessTheyAreGiven) {
  const auto usual = parse({"--device", "cuda"});
  ASSERT_TRUE(usual.config.has_value()) << usual.message;
  EXPECT_EQ(usual.config->gpu_slab_bytes, 256ull << 20);
  const auto given = parse({"--device", "cuda", "--slab-bytes", "32MiB"});
  ASSERT_TRUE(given.config.has_value()) << given.message;
  EXPECT_EQ(given.config->gpu_slab_bytes, 32ull << 20);
  EXPECT_EQ(given.config->slab_bytes, 32ull << 20);
  EXPECT_THAT(refusal("device = \"cuda\"\narena_bytes = \"320MiB\"\n"),
              HasSubstr("multiple of slab_bytes (268435456)"));
}

TEST_F(ConfigTest, ArenaIsAShareOfTheGpu) {
  const auto result = parse_file("device = \"auto\"\narena_bytes = \"80%\"\n[[tenants]]\nname = \"a\"\nuids = [1]\n");
  ASSERT_TRUE(result.config.has_value()) << result.message;
  EXPECT_EQ(result.config->arena_percent, 80u);
  EXPECT_EQ(result.config->tenants[0].quota_bytes, 0u) << "the whole arena, whatever that will be";
  EXPECT_EQ(parse({"--arena-bytes", "1GiB", "--device", "cuda"}).config->arena_percent, 0u);
  EXPECT_EQ(refusal("arena_bytes = \"80%\"\n"),
            "kvqd.toml:1: arena_bytes = \"80%\": a share is of a GPU's memory; give a size, such as \"4GiB\", or set "
            "device");
  for (const char* bad : {"0%", "101%", "80.5%", "%", "-1%"}) {
    EXPECT_THAT(refusal(std::string("arena_bytes = \"") + bad + "\"\n"), HasSubstr("a share of its memory")) << bad;
  }
}

TEST_F(ConfigTest, WorkerOfTheGpu) {
  const auto result = parse({"--gpu-worker", "/opt/kvqd-gpu", "--worker-deadline-ms", "2500"});
  ASSERT_TRUE(result.config.has_value()) << result.message;
  EXPECT_EQ(result.config->gpu_worker, "/opt/kvqd-gpu");
  EXPECT_EQ(result.config->worker_deadline_ms, 2500u);
  EXPECT_EQ(result.config->gpu_export, "auto");
  EXPECT_EQ(parse_file("gpu_export = \"legacy\"\n").config->gpu_export, "legacy");
  EXPECT_THAT(refusal("gpu_export = \"ipc\"\n"), EndsWith("must be one of auto, vmm, legacy"));
  EXPECT_THAT(refusal_of({"--worker-deadline-ms", "99"}), HasSubstr("must be an integer from 100 to"));
}

TEST_F(ConfigTest, SlabsMustDivideTheArena) {
  EXPECT_THAT(refusal("slab_bytes = 5000\n"), StartsWith("kvqd.toml:1: slab_bytes = 5000: must be a multiple of 4096"));
  EXPECT_THAT(refusal("slab_bytes = 12288\n"), StartsWith("kvqd.toml:1: slab_bytes = 12288: must be a power of two"));
  EXPECT_THAT(refusal("arena_bytes = \"100MiB\"\n"), HasSubstr("must be a multiple of slab_bytes (67108864)"));
  EXPECT_THAT(refusal("slab_bytes = 4096\n"),
              AllOf(StartsWith("default: arena_bytes = 4294967296: is 1048576 slabs"), HasSubstr("raise slab_bytes")));
  EXPECT_THAT(refusal("arena_bytes = \"64MiB\"\n"), HasSubstr("is 1 slab, and one is kept for transcodes"));
  EXPECT_TRUE(parse_file("arena_bytes = \"128MiB\"\n").config.has_value());
}

TEST_F(ConfigTest, WatermarksMustRise) {
  EXPECT_EQ(refusal("quantize_at = 0.9\nevict_at = 0.6\n"),
            "kvqd.toml:2: evict_at = 0.6: watermarks must rise: quantize_at (0.9) must be below evict_at (0.6)");
  EXPECT_THAT(refusal("quantize_at = 0.85\n"), StartsWith("kvqd.toml:1: quantize_at = 0.85: watermarks must rise"));
  EXPECT_THAT(refusal("evict_at = 0.95\n"), HasSubstr("evict_at (0.95) must be below refuse_at (0.95)"));
  EXPECT_THAT(refusal("quantize_at = 0.04\n"), HasSubstr("relief (0.05) must be below quantize_at (0.04)"));
}

TEST_F(ConfigTest, TenantsMustBeDistinctAndFit) {
  const std::string first = "arena_bytes = \"1GiB\"\n[[tenants]]\nname = \"a\"\nuids = [1]\n";
  EXPECT_EQ(refusal(first + "[[tenants]]\nname = \"a\"\nuids = [2]\n"),
            "kvqd.toml:6: name = \"a\": there is a tenant of that name already; choose another");
  EXPECT_THAT(refusal(first + "[[tenants]]\nname = \"b\"\nuids = [2, 1]\n"),
              AllOf(StartsWith("kvqd.toml:7: uids = "), HasSubstr("uid 1 belongs to tenant a already")));
  EXPECT_EQ(refusal(first + "quota_bytes = \"2GiB\"\n"),
            "kvqd.toml:5: quota_bytes = \"2GiB\": is above arena_bytes (1073741824); lower it or raise arena_bytes");
  EXPECT_THAT(refusal("[[tenants]]\nuids = [1]\n"), StartsWith("kvqd.toml:1: [[tenants]]: has no name"));
  EXPECT_THAT(refusal("[[tenants]]\nname = \"a\"\n"), HasSubstr("has neither uids nor gids"));
  EXPECT_THAT(refusal("[[tenants]]\nname = \"A b\"\nuids = [1]\n"), HasSubstr("must be 1 to 32 characters"));
  EXPECT_THAT(refusal(first + "salt = \"12\"\n"), HasSubstr("must be 32 to 128 hexadecimal digits"));
  EXPECT_THAT(refusal(first + "share = 0\n"), EndsWith("must be an integer from 1 to 1000"));
  EXPECT_THAT(refusal(first + "format_floor = \"k8v4\"\n"), EndsWith("must be one of dense, int4"));
  EXPECT_THAT(refusal("unlisted_quota_bytes = \"refuse\"\n"), HasSubstr("nobody could connect"));
}

TEST_F(ConfigTest, BrokenFilesNameFileAndLine) {
  EXPECT_THAT(refusal_of({"--config", "/nonexistent/kvqd.toml"}), StartsWith("/nonexistent/kvqd.toml: cannot be read"));
  EXPECT_THAT(refusal("max_pages = 20\nmax_pages = 30\n"), StartsWith("kvqd.toml:2: not valid TOML: "));
  EXPECT_THAT(refusal("max_pages = \n"), StartsWith("kvqd.toml:1: not valid TOML: "));
  EXPECT_THAT(refusal_of({"--config", directory.c_str()}), HasSubstr("cannot be read"));
}

TEST_F(ConfigTest, CommandLineMistakesAreOneLine) {
  EXPECT_THAT(refusal_of({"--socket"}), HasSubstr("--socket"));
  EXPECT_THAT(refusal_of({"start"}), HasSubstr("unknown option"));
  EXPECT_THAT(refusal_of({"--max-pages", "16", "--max-pages", "17"}), HasSubstr("--max-pages"));
}

TEST(ParseSizeTest, ReadsUnitsAndRefusesTheRest) {
  EXPECT_EQ(parse_size("0"), 0u);
  EXPECT_EQ(parse_size("12B"), 12u);
  EXPECT_EQ(parse_size("1 KiB"), 1024u);
  EXPECT_EQ(parse_size("256MiB"), 256ull << 20);
  EXPECT_EQ(parse_size("3TiB"), 3ull << 40);
  EXPECT_EQ(parse_size("18446744073709551615"), UINT64_MAX);
  for (const char* bad :
       {"", "MiB", "1.5GiB", "-1", "1GB", "1gib", "1GiB ", "1MiBs", "18446744073709551616", "99999999TiB"}) {
    EXPECT_FALSE(parse_size(bad).has_value()) << bad;
  }
}

}  // namespace
}  // namespace kvq

// One setting changed in a file's text: exactly that line differs, and what cannot be changed safely is refused.
#include "daemon/config_edit.h"

#include <gmock/gmock.h>

namespace kvq {
namespace {

using ::testing::HasSubstr;

constexpr char kFile[] = R"(# settings of this node
socket = "/run/kvq/kvqd.sock"  # where clients connect

  quantize_at = 0.70   # cold pages become INT4
arena_bytes = "4GiB"

[[tenants]]   # the chat
name = "chat"
uids = [
  1001,
  1002 ]
quota_bytes = "3GiB"  # most it may hold

# the batch jobs
[[tenants]]
    name = 'batch' # é
    uids = [1003]
)";

std::string edited(const std::string& text, const std::string& key, const std::string& value) {
  return edit_config(text, "kvqd.toml", key, value).text;
}

std::string with(std::string text, const std::string& old, const std::string& now) {
  const std::size_t at = text.find(old);
  EXPECT_NE(at, std::string::npos) << old;
  return text.replace(at, old.size(), now);
}

std::string refusal(const std::string& text, const std::string& key, const std::string& value) {
  try {
    edit_config(text, "kvqd.toml", key, value);
  } catch (const StartupError& error) {
    return error.what();
  }
  return "taken";
}

TEST(ConfigEdit, OnlyTheValueIsReplaced) {
  EXPECT_EQ(edited(kFile, "quantize_at", "0.6"), with(kFile, "0.70", "0.6"));
  EXPECT_EQ(edited(kFile, "quota.chat", "512MiB"), with(kFile, "\"3GiB\"", "\"512MiB\""));
  EXPECT_EQ(edited(kFile, "quota.chat", "1073741824"), with(kFile, "\"3GiB\"", "1073741824"));
  EXPECT_EQ(edit_config(kFile, "kvqd.toml", "quantize_at", "0.6").line, "quantize_at = 0.6   # cold pages become INT4");
}

TEST(ConfigEdit, AMissingSettingIsAddedInItsTable) {
  EXPECT_EQ(edited(kFile, "evict_at", ".8"), with(kFile, "\"4GiB\"\n", "\"4GiB\"\nevict_at = 0.8\n"));
  EXPECT_EQ(edited(kFile, "share.chat", "3"), with(kFile, "may hold\n", "may hold\nshare = 3\n"));
  EXPECT_EQ(edited(kFile, "share.batch", "2"), std::string(kFile) + "    share = 2\n");
  EXPECT_EQ(edited(kFile, "quota.batch", "1GiB"), std::string(kFile) + "    quota_bytes = \"1GiB\"\n");
}

TEST(ConfigEdit, AFileWithoutSettingsGetsItsFirst) {
  EXPECT_EQ(edited("", "relief", "0.1"), "relief = 0.1\n");
  EXPECT_EQ(edited("# a\n# b\n\n# c\n", "relief", "0.1"), "# a\n# b\nrelief = 0.1\n\n# c\n");
  EXPECT_EQ(edited("[[tenants]]\nname = \"a\"\nuids = [1]\n", "relief", "0.1"),
            "relief = 0.1\n[[tenants]]\nname = \"a\"\nuids = [1]\n");
}

TEST(ConfigEdit, LineEndsStayAsTheyAre) {
  EXPECT_EQ(edited("relief = 0.1\r\n", "evict_at", "0.8"), "relief = 0.1\r\nevict_at = 0.8\r\n");
  EXPECT_EQ(edited("relief = 0.1", "evict_at", "0.8"), "relief = 0.1\nevict_at = 0.8\n");
  EXPECT_EQ(edited("relief = 0.1", "relief", "0.2"), "relief = 0.2");
}

TEST(ConfigEdit, WhatIsThereAlreadyChangesNothing) {
  const ConfigEdit same = edit_config(kFile, "kvqd.toml", "quota.chat", "3GiB");
  EXPECT_EQ(same.text, kFile);
  EXPECT_EQ(same.line, "");
}

TEST(ConfigEdit, AQuotaOfTheWholeArenaIsNoSetting) {
  EXPECT_EQ(edited(kFile, "quota.chat", "0"), with(kFile, "quota_bytes", "# quota_bytes"));
  EXPECT_EQ(edited(kFile, "quota.batch", "0"), kFile);
  EXPECT_THAT(refusal("tenants = [{name = \"a\", uids = [1], quota_bytes = 5}]\n", "quota.a", "0"),
              HasSubstr("take that setting out by hand"));
}

TEST(ConfigEdit, InlineTablesAreTablesToo) {
  constexpr char kInline[] = "tenants = [ { name = \"é\", uids = [1] }, { name = \"a\", uids = [2], share = 2 } ]\n";
  EXPECT_EQ(edited(kInline, "share.a", "5"), with(kInline, "share = 2", "share = 5"));
  EXPECT_EQ(edited(kInline, "quota.a", "1GiB"), with(kInline, "share = 2", "share = 2, quota_bytes = \"1GiB\""));
}

TEST(ConfigEdit, TextThatLooksLikeASettingIsNone) {
  constexpr char kTricky[] = "socket = \"\"\"/run\nquantize_at = 0.1\"\"\"\n# quantize_at = 0.2\nquantize_at = 0.3\n";
  EXPECT_EQ(edited(kTricky, "quantize_at", "0.4"), with(kTricky, "0.3", "0.4"));
}

// toml++ counts no byte order mark as a column, so the wrong bytes would be replaced.
TEST(ConfigEdit, WhatWouldMeanSomethingElseIsRefused) {
  EXPECT_THAT(refusal("\xEF\xBB\xBFrelief = 0.1\n", "relief", "0.25"),
              HasSubstr("cannot be changed safely here; set relief by hand"));
}

TEST(ConfigEdit, ATenantThatHasNoTableIsNamed) {
  EXPECT_THAT(refusal(kFile, "quota.uid-7", "1GiB"),
              HasSubstr("kvqd.toml: has no [[tenants]] table named uid-7; add one with its uids"));
  EXPECT_THAT(refusal("relief = \n", "relief", "0.1"), HasSubstr("line 1 is not valid TOML"));
}

}  // namespace
}  // namespace kvq

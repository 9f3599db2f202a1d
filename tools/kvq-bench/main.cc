// kvq-bench: what `kvqctl bench` runs. A program of its own, since it carries libkvq with its kernels, of which kvqctl
// needs nothing.
//
// Exit codes are kvqctl's; kBadPages: attention gave wrong answers.
#include <CLI/CLI.hpp>
#include <iostream>

#include "tools/kvq-bench/bench.h"
#include "tools/kvqctl/admin_client.h"
#include "tools/kvqctl/text.h"

namespace kvq_bench {
namespace {

using Json = nlohmann::ordered_json;

std::string figure(double value) { return kvqctl::format_double(value < 100 ? "%.2f" : "%.0f", value); }

std::string show(const Json& report) {
  std::vector<kvqctl::Row> rows = {{"WHAT", "VALUE", "UNIT", "OF A COPY", ""}};
  for (const Json& r : report.at("results")) {
    std::string what = r.at("what");
    if (!r.at("tokens_per_s").is_null())
      what += "; " + figure(r.at("tokens_per_s").get<double>() / 1e6) + " M tokens/s";
    rows.push_back({r.at("name"), figure(r.at("value")), r.at("unit"),
                    r.at("of_copy").is_null() ? "" : kvqctl::percent(r.at("of_copy")), what});
  }
  std::string out = kvqctl::table(rows, {0, 2, 4});
  for (const Json& s : report.at("skipped")) {
    out += "not measured: " + s.at("name").get<std::string>() + ": " + s.at("why").get<std::string>() + "\n";
  }
  out += "\n" + kvqctl::bytes_text(report.at("bytes")) + " of dense pages, " + report.at("threads").dump() +
         " threads, kernels for " + report.at("kernel_target").get<std::string>() + "; ";
  for (const Json& r : report.at("results")) {
    if (!r.at("error").is_null()) {
      out += r.at("name").get<std::string>() + " differs by " + kvqctl::format_double("%.1e", r.at("error")) +
             " (at most " + kvqctl::format_double("%g", r.at("most_error")) + "); ";
    }
  }
  out += report.at("answers_right").get<bool>() ? "answers are right\n" : "ANSWERS ARE WRONG\n";
  if (report.at("left_bytes") != 0) {
    out += kvqctl::bytes_text(report.at("left_bytes")) + " are still held by tenant " +
           report.at("tenant").get<std::string>() + "\n";
  }
  return out;
}

int run(int argc, char** argv) {
  CLI::App app{"Measures a running kvqd; use kvqctl bench."};
  BenchOptions options;
  bool json = false;
  app.add_option("--socket", options.socket, "kvqd's socket")->required();
  app.add_option("--seconds", options.seconds, "for all measurements together, about")->check(CLI::Range(0.5, 600.0));
  app.add_flag("--json", json, "as JSON");
  CLI11_PARSE(app, argc, argv);
  try {
    const Json report = run_bench(options);
    std::cout << (json ? report.dump(2) + "\n" : show(report)) << std::flush;
    if (report.at("answers_right").get<bool>()) return kvqctl::kOk;
    std::cerr << "kvqctl: attention gave wrong answers; test the machine's memory, and report it with this output\n";
    return kvqctl::kBadPages;
  } catch (const kvqctl::Failure& failure) {
    std::cerr << "kvqctl: " << failure.what() << "\n";
    return failure.exit_code;
  } catch (const Json::exception& error) {
    std::cerr << "kvqctl: kvqd's reply is not what this kvqctl knows (" << error.what()
              << "); install both of one release\n";
    return kvqctl::kRefused;
  }
}

}  // namespace
}  // namespace kvq_bench

int main(int argc, char** argv) { return kvq_bench::run(argc, argv); }

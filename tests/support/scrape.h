// What a scraper sees: one GET over a socket of its own, and the samples of the text by their names.
//
// Invariant: every call has its own connection and ends within a minute or throws std::runtime_error.
#pragma once

#include <cstdint>
#include <map>
#include <string>

namespace kvq::test {

// `address`: "unix:/PATH", or a port of 127.0.0.1.
int connect_metrics(const std::string& address);
std::string free_port();  // that nobody listened on just now

struct HttpReply {
  int status = 0;
  std::string head, body;
};
HttpReply http_get(const std::string& address, const std::string& target = "/metrics",
                   const std::string& method = "GET");

// By "name{label="value",...}"; throws when a line is no sample, or a sample comes twice.
using Samples = std::map<std::string, double>;
Samples parse_samples(const std::string& text);
Samples scrape(const std::string& address);

// Counters (histograms' counts too) that differ, and by how much. What moves by itself is left out: ticks, and steps,
// which the ticks see or not.
Samples moved(const Samples& before, const Samples& after);
// Sum of the samples of one family whose labels contain `part`.
double sum_of(const Samples& samples, const std::string& family, const std::string& part = "");

}  // namespace kvq::test
